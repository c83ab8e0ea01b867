"""Schema of the worker pools: `workers` in the configuration."""

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from raydix.configs.section import Effect, Section


class Numbers(NamedTuple):
    """Bounds of a number of replicas; the same for a fixed number."""

    least: int
    most: int


class WorkerSection(Section):
    """One pool of workers."""

    replicas: Annotated[int, Effect.NUMBER] = Field(default=1, ge=1, le=4096, description="Workers of this role.")
    token_budget: Annotated[int, Effect.IN_PLACE] = Field(
        default=512, ge=16, le=65536, description="Tokens of one step; at least max_requests."
    )
    max_requests: Annotated[int, Effect.IN_PLACE] = Field(
        default=64, ge=1, le=4096, description="Requests that run at the same time."
    )
    num_threads: Annotated[int, Effect.ROLE] = Field(
        default=0,
        ge=0,
        le=1024,
        description="Threads for matrix products; 0: one for each core that the process may use, and no more than the "
        "quota of its container.",
    )
    device: Annotated[Literal["auto", "cpu", "cuda"], Effect.ROLE] = Field(
        default="auto", description="Where the model runs."
    )
    num_cpus: Annotated[float, Effect.ROLE] = Field(
        default=0.1, gt=0, description="CPUs reserved at Ray for one worker."
    )
    num_gpus: Annotated[float, Effect.ROLE] = Field(
        default=0.0, ge=0, description="GPUs reserved at Ray for one worker; at most one."
    )
    resources: Annotated[dict[str, float], Effect.ROLE] = Field(
        default_factory=dict, description="Other Ray resources of one worker."
    )
    label_selector: Annotated[dict[str, str], Effect.ROLE] = Field(
        default_factory=dict, description="Labels of a node for such a worker."
    )

    @property
    def numbers(self) -> Numbers:
        return Numbers(self.replicas, self.replicas)

    @field_validator("num_gpus")
    @classmethod
    def _computes_on_one(cls, num_gpus: float) -> float:
        # A part of a GPU is right: several small workers share one.
        if num_gpus > 1:
            raise ValueError(
                f"{num_gpus:g} are more than the one GPU that a worker computes on (there is no tensor parallelism), "
                "and the others would stand idle: raise replicas instead"
            )
        return num_gpus

    @model_validator(mode="after")
    def _budget_covers_decodes(self) -> Self:
        # Decodes are never put off for the budget, so it must have a token for each of them.
        if self.token_budget < self.max_requests:
            raise ValueError(
                f"token_budget ({self.token_budget}) must be at least max_requests ({self.max_requests}): "
                "every decoding request takes one token of each step"
            )
        return self


class ElasticSection(WorkerSection):
    """A pool of workers whose number may follow the load."""

    min_replicas: Annotated[int, Effect.NUMBER] = Field(
        default=1,
        ge=0,
        le=4096,
        description="Least number of workers, with `max_replicas`. With 0 there is none while nobody asks, and the "
        "first request waits for one to start.",
    )
    max_replicas: Annotated[int | None, Effect.NUMBER] = Field(
        default=None,
        ge=1,
        le=4096,
        description="Highest number of workers, in the place of `replicas`: the number follows the load and the "
        "objectives of `slo`. By default the number is fixed.",
    )
    shrink_after_s: Annotated[float, Effect.IN_PLACE] = Field(
        default=60.0,
        gt=0,
        le=86_400,
        description="Seconds for which fewer workers must have been enough before the number falls.",
    )

    @property
    def numbers(self) -> Numbers:
        if self.max_replicas is None:
            return Numbers(self.replicas, self.replicas)
        return Numbers(self.min_replicas, self.max_replicas)

    @model_validator(mode="after")
    def _one_number(self) -> Self:
        if self.max_replicas is None:
            # 1 is the default: a value that would have no effect is refused, not ignored.
            if self.min_replicas != 1:
                raise ValueError(
                    f"min_replicas ({self.min_replicas}) needs max_replicas: without it the number is fixed"
                )
        elif self.replicas != 1:
            raise ValueError(
                f"replicas ({self.replicas}) is a fixed number, and max_replicas ({self.max_replicas}) the limit of a "
                "number that follows the load: one of them must go"
            )
        elif self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas ({self.max_replicas}) must be at least min_replicas ({self.min_replicas})")
        return self


class WorkersSection(Section):
    """The worker pools. Prefill and decode belong together; mixed and elastic stand alone or beside them."""

    prefill: Annotated[WorkerSection | None, Effect.ROLES] = Field(
        default=None, description="Workers that compute prompts."
    )
    decode: Annotated[WorkerSection | None, Effect.ROLES] = Field(
        default=None, description="Workers that generate from imported KV."
    )
    mixed: Annotated[WorkerSection | None, Effect.ROLES] = Field(default=None, description="Workers that do both.")
    elastic: Annotated[ElasticSection | None, Effect.ROLES] = Field(
        default=None,
        description="Workers that prefill, decode or do both as the load asks, to keep to the objectives of `slo`.",
    )

    @property
    def sections(self) -> dict[str, WorkerSection]:
        """The configured pools, by role."""
        pools = {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed, "elastic": self.elastic}
        return {role: section for role, section in pools.items() if section is not None}

    @property
    def hands_over(self) -> bool:
        """True if some workers may hand KV over to others that decode."""
        return self.prefill is not None or self.elastic is not None

    @model_validator(mode="after")
    def _roles_complete(self) -> Self:
        if (self.prefill is None) != (self.decode is None):
            raise ValueError("prefill and decode workers belong together: configure both, or mixed")
        if not self.sections:
            raise ValueError("no workers: configure prefill and decode, mixed, or elastic")
        if self.elastic is not None and self.elastic.numbers.least == 0 and len(self.sections) > 1:
            raise ValueError("elastic.min_replicas is 0, which needs all workers to be elastic: the others stay anyway")
        return self
