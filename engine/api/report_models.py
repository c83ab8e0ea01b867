"""Shapes of reports about the server, for `/openapi.json`; as `raydix.engine.api.response_models`."""

from typing import Any, Literal

from pydantic import Field

from raydix.engine.api.response_models import Model, Seconds, Shape


class Health(Shape):
    """A request could be served now."""

    status: Literal["ok"] = Field(description="Always ok; an error otherwise.")


class Version(Shape):
    """The version of raydix."""

    version: str = Field(description="As in its package.")


class ApiDocument(Shape):
    """OpenAPI's document."""

    openapi: str = Field(description="Version of OpenAPI.")
    info: dict[str, str] = Field(description="Name and version of raydix.")
    paths: dict[str, Any] = Field(description="Routes.")
    components: dict[str, Any] = Field(description="Objects.")


class Load(Shape):
    """Work of one ingress replica."""

    server_load: int = Field(description="Answers under way.")


class ServerInfo(Shape):
    """Model, settings and versions."""

    object: Literal["server.info"] = Field(description="Kind of the object.")
    model: Model = Field(description="The model that is served.")
    raydix_config: dict[str, Any] = Field(description="Numbers, switches and fixed words of the configuration.")
    system_env: dict[str, str | int | None] = Field(description="Versions, and the machine of the replica.")


class CacheReset(Shape):
    """Blocks that were forgotten."""

    object: Literal["cache.reset"] = Field(description="Kind of the object.")
    store_blocks: int = Field(description="In the object store and on disk.")
    pool_blocks: int = Field(description="In the pools of workers.")


class TenantUse(Shape):
    """Use of the cache by a tenant since the manager started."""

    requests: int = Field(description="Requests that were placed.")
    prompt_tokens: int = Field(description="Tokens of their prompts.")
    hit_tokens: int = Field(description="Tokens found in a cache.")
    hit_rate: float | None = Field(description="Over the last requests.")


class HottestPrefix(Shape):
    """A prefix of the caller's own that many requests share."""

    preview: str = Field(description="Its first tokens as text.")
    requests: int = Field(description="Requests that began with it.")
    hit_tokens: int = Field(description="Tokens that it saved.")


class CachedWorker(Shape):
    """Cache of a worker."""

    id: str = Field(description="Its name.")
    role: str = Field(description="prefill, decode, mixed or elastic.")
    duty: str | None = Field(description="Main work of an elastic worker now: prefill, decode or mixed; else null.")
    node: str = Field(description="Ray's id of its node.")
    cached_blocks: int = Field(description="Blocks with a name.")
    available_blocks: int | None = Field(description="Blocks that no request holds; null before its first report.")
    costs: dict[str, float] = Field(description="Seconds per unit, as measured.")


class ObjectStore(Shape):
    """KV in the object store."""

    segments: int = Field(description="Exported segments.")
    bytes: int = Field(description="Their size.")
    budget_bytes: int = Field(description="The most that are kept on each node.")
    nodes: dict[str, int] = Field(description="Their size on each node.")


class Link(Shape):
    """Measured imports from the object store of a node to the workers on a node."""

    source: str = Field(description="Ray's id of the one node.")
    target: str = Field(description="Ray's id of the other node, or of the same one.")
    import_s: float = Field(description="Seconds of an import, besides its bytes.")
    import_byte_s: float = Field(description="Seconds of a byte.")


class Disk(Shape):
    """KV on disk."""

    bytes: int = Field(description="Size of the files.")
    budget_bytes: int = Field(description="The most that are kept.")


class CacheReport(Shape):
    """State of the cache. The fields from `known_blocks` on are for administrators."""

    object: Literal["cache"] = Field(description="Kind of the object.")
    prefix_caching: bool = Field(description="False if nothing is kept for later requests.")
    block_size: int = Field(description="Token positions of a block.")
    block_bytes: int = Field(description="Bytes of a block.")
    hit_rate: float | None = Field(description="Of prompt tokens, over the last requests.")
    tenants: dict[str, TenantUse] = Field(description="By name; all for administrators, else one's own.")
    hottest_prefixes: list[HottestPrefix] = Field(description="The caller's own.")
    known_blocks: int | None = Field(default=None, description="Blocks anywhere.")
    elastic_workers_wanted: int | None = Field(
        default=None, description="Elastic workers that the load needs, up to their limit; null without such workers."
    )
    workers: list[CachedWorker] | None = Field(default=None, description="Each worker's cache.")
    object_store: ObjectStore | None = Field(default=None, description="KV in the object store.")
    links: list[Link] | None = Field(default=None, description="What imports between nodes take.")
    disk: Disk | None = Field(default=None, description="KV on disk.")
    hit_blocks: dict[str, int] | None = Field(default=None, description="Hits by source.")
    missed_blocks: dict[str, int] | None = Field(default=None, description="Misses by reason.")
    evicted_blocks: dict[str, int] | None = Field(default=None, description="Evictions by reason.")


class BlockRun(Shape):
    """Consecutive blocks of a prompt from one source."""

    source: str = Field(description="Where they came from, or why they were computed.")
    hit: bool = Field(description="True if they were not computed.")
    count: int = Field(description="Number of blocks.")


class Candidate(Shape):
    """A worker that could have taken a request."""

    worker: str = Field(description="Its name.")
    local_blocks: int = Field(description="Blocks in its pool.")
    imported_blocks: int = Field(description="Blocks that it would import.")
    wait_s: Seconds
    import_s: Seconds
    compute_s: Seconds
    ttft_s: Seconds
    others_s: Seconds
    room_s: Seconds
    transfer_s: Seconds
    cost_s: Seconds


class DraftedTokens(Shape):
    """Draft tokens of one source."""

    drafted: int = Field(description="Computed in steps of the request.")
    accepted: int = Field(description="Of these, part of the answer.")


class Attempt(Shape):
    """One placement of a request."""

    attempt: int = Field(description="0, and one more after each failover.")
    prompt_tokens: int = Field(description="Tokens of the prompt, generated ones among them after a failover.")
    block_size: int = Field(description="Token positions of a block.")
    blocks: list[BlockRun] = Field(description="The prompt's blocks.")
    unhashed_tokens: int = Field(description="Tokens behind the last full block.")
    note: str | None = Field(description="Why there are no blocks.")
    prefill_worker: str | None = Field(description="Worker of the prompt: the answer's, or another one.")
    decode_worker: str = Field(description="Worker of the answer.")
    duties: dict[str, str] = Field(
        description="Main work, at the placement, of the elastic ones among these workers and the candidates."
    )
    candidates: list[Candidate] = Field(description="Workers that were compared.")
    predicted_ttft_s: float = Field(description="Predicted time to the first token, in seconds.")
    objective_ttft_s: float | None = Field(description="Objective for the time to the first token, in seconds.")
    late: Literal["wait", "give_way"] | None = Field(
        description="What was done because every worker was predicted to be later than that; null in time."
    )
    actual_ttft_s: float | None = Field(description="Measured time to the first token, in seconds.")
    predicted_handover_s: float | None = Field(
        description="Predicted time from the first token to the second one, in seconds; null unless one worker "
        "computes the prompt and another one the answer."
    )
    actual_handover_s: float | None = Field(description="Measured, at the end.")
    regret_s: float | None = Field(description="How much sooner the best other candidate was predicted to be.")
    preemptions: int = Field(description="How often it had to make room.")
    drafts: dict[str, DraftedTokens] = Field(description="Drafts by source, at the end.")
    ended: str | None = Field(description="How it ended.")


class ExplainedChoice(Shape):
    """Placements of one answer."""

    id: str = Field(description="The answer's request inside the engine.")
    attempts: list[Attempt] = Field(description="Its placements.")


class Explanation(Shape):
    """Sources of a prompt's blocks, and reasons of the choice of workers."""

    id: str = Field(description="As asked for.")
    object: Literal["request.explanation"] = Field(description="Kind of the object.")
    choices: list[ExplainedChoice] = Field(description="One for each answer.")


class CacheEvent(Shape):
    """Data of an event `snapshot`, `stored` or `removed`."""

    next: int = Field(description="Number to go on from, as `since`.")
    blocks: list[str] = Field(description="Hashes of blocks, in hexadecimal.")
