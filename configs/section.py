"""Base of the sections of the configuration, and what a change of a key does."""

from enum import Enum, StrEnum

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen; unknown keys, infinity and NaN are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DeploymentKind(Enum):
    """A kind of deployment, whose replicas have keys of the configuration for their whole lives."""

    INGRESS = "ingress"
    MANAGER = "manager"
    WORKERS = "workers"


class Effect(StrEnum):
    """What a change of a key does. It stands at the key's field (`Annotated[int, Effect.IN_PLACE]`), or at the field of
    a whole section. Which deployments get the key as an argument follows from it (`raydix.configs.sections`)."""

    IN_PLACE = "applies in place"
    IN_PLACE_UNLESS_OFF = "applies in place; from or to 0 restarts the ingress"
    INGRESS = "restarts the ingress"
    MANAGER = "restarts the manager"
    ROLE = "restarts the workers of the role"
    WORKERS = "restarts all workers"
    INGRESS_AND_MANAGER = "restarts the ingress and the manager"
    INGRESS_AND_WORKERS = "restarts the ingress and all workers"
    EVERYTHING = "restarts everything"
    NUMBER = "adds or removes replicas; the others go on"
    ROLES = "starts or ends the workers of the role; with prefill or elastic the ingress may restart"
    SERVER = "at the next start of raydix serve"

    @property
    def is_live(self) -> bool:
        """True if a change restarts no replica, so that the key may stand in a `user_config`."""
        return self in (Effect.IN_PLACE, Effect.IN_PLACE_UNLESS_OFF, Effect.NUMBER)

    def restarts(self, kind: DeploymentKind) -> bool:
        """True if a change restarts the replicas of this kind, which have the key as an argument."""
        return kind in _RESTARTED.get(self, ())


_RESTARTED = {
    Effect.INGRESS: (DeploymentKind.INGRESS,),
    Effect.MANAGER: (DeploymentKind.MANAGER,),
    Effect.ROLE: (DeploymentKind.WORKERS,),
    Effect.WORKERS: (DeploymentKind.WORKERS,),
    Effect.INGRESS_AND_MANAGER: (DeploymentKind.INGRESS, DeploymentKind.MANAGER),
    Effect.INGRESS_AND_WORKERS: (DeploymentKind.INGRESS, DeploymentKind.WORKERS),
    Effect.EVERYTHING: tuple(DeploymentKind),
}


def effects_of(section: type[BaseModel]) -> dict[str, Effect]:
    """The effect of each key of a section that has one of its own."""
    found = {}
    for name, field in section.model_fields.items():
        for note in field.metadata:
            if isinstance(note, Effect):
                found[name] = note
    return found
