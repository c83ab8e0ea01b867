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


class ChromeTrace(Shape):
    """Trace of processes for some seconds, in Chrome's format."""

    traceEvents: list[dict[str, Any]] = Field(description="Slices of time by process and row, and arrows.")
    displayTimeUnit: Literal["ms"] = Field(description="Unit in which times are shown.")
    otherData: dict[str, Any] = Field(
        description="`started_at`, the time from which on times are counted; slices `dropped` beyond the limit of each "
        "process; workers that did not answer (`missing`)."
    )


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
    saved_s: float = Field(description="Predicted time that computing these tokens would have taken, in seconds.")
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
    empty_blocks: int | None = Field(description="Of these, blocks without contents.")
    blocks: int | None = Field(description="All blocks of the pool; null before its first report.")
    requests: int = Field(description="Requests that it has.")
    decoding: int = Field(description="Of these, requests whose tokens it computes now or will.")
    queued: int = Field(description="Prompts that it computes now or will.")
    queued_s: float = Field(description="Predicted time of these prompts, in seconds.")
    token_budget: int = Field(description="Tokens of a step.")
    leaving: bool = Field(description="True once it is about to stop.")
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


class MovedKV(Shape):
    """KV that a worker has taken from a place, since the manager started."""

    source: str = Field(description="The worker that exported it; `disk` where that is not known.")
    target: str = Field(description="The worker that took it.")
    segments: int = Field(description="Segments.")
    blocks: int = Field(description="Their blocks.")
    bytes: int = Field(description="Their size.")


class Disk(Shape):
    """KV on disk."""

    bytes: int = Field(description="Size of the files.")
    budget_bytes: int = Field(description="The most that are kept.")


class CachedSession(Shape):
    """Requests that extend each other's prompts."""

    requests: int = Field(description="Requests so far.")
    running: int = Field(description="Requests under way.")
    prompt_blocks: int = Field(description="Full blocks of its last prompt.")
    blocks: int = Field(description="Blocks of its own; what several sessions begin with is one session's.")
    last_stop: str | None = Field(description="Why its last answer ended: stop, length or tool_calls; null otherwise.")
    has_place: bool = Field(description="True if it is its turn, where sessions take turns.")
    pauses: int = Field(description="Requests that waited for the session's turn.")
    paused_s: float = Field(description="How long they waited in all, in seconds.")


class CacheReport(Shape):
    """State of the cache. The fields from `known_sessions` on are for administrators."""

    object: Literal["cache"] = Field(description="Kind of the object.")
    prefix_caching: bool = Field(description="False if nothing is kept for later requests.")
    block_size: int = Field(description="Token positions of a block.")
    block_bytes: int = Field(description="Bytes of a block.")
    hit_rate: float | None = Field(description="Of prompt tokens, over the last requests.")
    tenants: dict[str, TenantUse] = Field(description="By name; all for administrators, else one's own.")
    hottest_prefixes: list[HottestPrefix] = Field(description="The caller's own.")
    sessions: list[CachedSession] = Field(description="The caller's own, the latest first; at most 20.")
    price_per_million_tokens: float | None = Field(description="Price of prompt tokens, as configured; else null.")
    known_sessions: int | None = Field(default=None, description="Sessions that are remembered.")
    placed_sessions: int | None = Field(default=None, description="Sessions whose turn it is.")
    paused_sessions: int | None = Field(default=None, description="Sessions that wait for their turn.")
    known_blocks: int | None = Field(default=None, description="Blocks anywhere.")
    elastic_workers_wanted: int | None = Field(
        default=None, description="Elastic workers that the load needs, up to their limit; null without such workers."
    )
    workers: list[CachedWorker] | None = Field(default=None, description="Each worker's cache.")
    object_store: ObjectStore | None = Field(default=None, description="KV in the object store.")
    links: list[Link] | None = Field(default=None, description="What imports between nodes take.")
    moved: list[MovedKV] | None = Field(
        default=None, description="KV that moved between workers, the last move first; at most 200 pairs."
    )
    disk: Disk | None = Field(default=None, description="KV on disk.")
    hit_blocks: dict[str, int] | None = Field(default=None, description="Hits by source.")
    missed_blocks: dict[str, int] | None = Field(default=None, description="Misses by reason.")
    evicted_blocks: dict[str, int] | None = Field(default=None, description="Evictions by reason.")


class ShownRequest(Shape):
    """A request under way or ended. Times end in `_s` and are seconds since its arrival."""

    number: int = Field(description="Its number at this replica; names the row.")
    id: str = Field(description="As in its answer, for `/v1/requests/{id}/explain`.")
    request: str = Field(description="Its name in logs.")
    tenant: str = Field(description="Its tenant.")
    kind: str = Field(description="chat, completion, messages, responses, embedding or scoring.")
    stream: bool = Field(description="True if the answer is streamed.")
    state: Literal["waiting", "prefilling", "decoding", "ended"] = Field(description="Part of its life.")
    outcome: str | None = Field(description="How it ended: stop, length, tool_calls, aborted or failed.")
    choices: int = Field(description="Answers that it asks for.")
    attempts: int = Field(description="1, and one more for each failover.")
    priority: int = Field(description="0, or more for what comes later.")
    prefill_workers: list[str] = Field(description="Workers of its prompts.")
    decode_workers: list[str] = Field(description="Workers of its answers.")
    prompt_tokens: int = Field(description="Tokens of its prompts.")
    cached_tokens: int = Field(description="Of these, tokens found in a cache; 0 before the first token.")
    imported_tokens: int = Field(description="Of these, tokens that another place sent.")
    generated_tokens: int = Field(description="Tokens of its answers so far.")
    max_tokens: int = Field(description="The most of one answer.")
    accepted_tokens: int = Field(description="Tokens of its answers that were in a draft.")
    preemptions: int = Field(description="How often it had to make room.")
    arrived_at: float = Field(description="Time of its arrival, in seconds since 1970.")
    ended_at: float | None = Field(description="Time of its end, in seconds since 1970.")
    placed_s: float | None = Field(description="Workers were chosen.")
    moved_s: float | None = Field(description="Other workers were chosen, after the last failover.")
    first_token_s: float | None = Field(description="The first token came.")
    ended_s: float | None = Field(description="It ended.")


class RequestCounts(Shape):
    """Requests under way."""

    waiting: int = Field(description="No worker has them yet.")
    prefilling: int = Field(description="No token has come.")
    decoding: int = Field(description="Tokens come.")


class RequestList(Shape):
    """Requests of one replica: one's own, for administrators all."""

    object: Literal["requests"] = Field(description="Kind of the object.")
    counts: RequestCounts = Field(description="All requests under way.")
    requests: list[ShownRequest] = Field(description="Those under way, oldest first, then the latest ended ones.")


class RequestsEvent(Shape):
    """Data of an event `requests`."""

    counts: RequestCounts = Field(description="All requests under way.")
    requests: list[ShownRequest] = Field(description="New and changed ones.")


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


class ExplainedBranch(Shape):
    """Where a session left another one."""

    of: str = Field(description="Id of the answer of the other session that was under way.")
    blocks: int = Field(description="Leading blocks that both prompts have.")


class ExplainedSession(Shape):
    """A session, as it was at the admission of one of its requests."""

    requests: int = Field(description="Requests so far, with this one.")
    blocks: int = Field(description="Blocks of its own.")
    pauses: int = Field(description="Requests that waited for the session's turn.")
    paused_s: float = Field(description="How long they waited in all, in seconds.")
    branch: ExplainedBranch | None = Field(
        description="Set if its first prompt extended a session whose request was under way: a sub-agent, a fork."
    )


class ExplainedEviction(Shape):
    """Blocks of a prompt that were evicted before it came."""

    ago_s: float = Field(description="Seconds between the first one's eviction and the placement.")
    more_blocks: int = Field(description="Blocks of room, in all places together, that would have kept them.")


class Attempt(Shape):
    """One placement of a request."""

    attempt: int = Field(description="0, and one more after each failover.")
    prompt_tokens: int = Field(description="Tokens of the prompt, generated ones among them after a failover.")
    block_size: int = Field(description="Token positions of a block.")
    blocks: list[BlockRun] = Field(description="The prompt's blocks.")
    unhashed_tokens: int = Field(description="Tokens behind the last full block.")
    left_cache_at: int | None = Field(description="Position of the first token whose block was computed.")
    why: str | None = Field(description="Why that block was computed, in a sentence.")
    evicted: ExplainedEviction | None = Field(description="Set if that block was evicted before.")
    note: str | None = Field(description="Why there are no blocks.")
    prefill_worker: str | None = Field(description="Worker of the prompt: the answer's, or another one.")
    decode_worker: str = Field(description="Worker of the answer.")
    duties: dict[str, str] = Field(
        description="Main work, at the placement, of the elastic ones among these workers and the candidates."
    )
    candidates: list[Candidate] = Field(description="Workers that were compared.")
    predicted_ttft_s: float = Field(description="Predicted time to the first token, in seconds.")
    uncached_s: float = Field(description="Predicted time of computing the whole prompt without a cache, in seconds.")
    saved_s: float = Field(description="The part of that which the hits are predicted to save, in seconds.")
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
    session: ExplainedSession | None = Field(description="The session that it belongs to, by the blocks of its prompt.")


class ExplainedPause(Shape):
    """Wait of a request for its session's turn (`placement.session_quantum_s`)."""

    why: str = Field(description="The reason, in a sentence.")
    ahead: int = Field(description="Sessions whose turn comes before.")
    placed: int = Field(description="Sessions whose turn it is.")
    blocks: int = Field(description="Blocks that the session needs.")
    paused_s: float = Field(description="Seconds since the pause began.")


class ExplainedChoice(Shape):
    """Placements of one answer."""

    id: str = Field(description="The answer's request inside the engine.")
    attempts: list[Attempt] = Field(description="Its placements.")
    paused: ExplainedPause | None = Field(description="Its wait for its session's turn; null if it does not wait.")


class ExplainedPrefix(Shape):
    """A prompt beside the earlier one of the same tenant that it shares most tokens with."""

    previous: str = Field(description="Id of the earlier answer.")
    reason: str | None = Field(
        description="`system_changed`, `tools_changed`, `tools_reordered`, `keys_reordered`, `volatile`, "
        "`message_edited`, `branch`, `reasoning_left_out`, `white_space`, `shorter_than_a_block`, `another_salt`, "
        "`not_found` or `template`; null where the prompt goes on from the earlier one, and was hit."
    )
    token_index: int | None = Field(description="Of the first other token.")
    part: str | None = Field(description="The first other part: `system`, `tools[2]`, `messages[5]`.")
    lost_tokens: int = Field(description="Tokens that would have been found behind the place.")
    lost_s: float | None = Field(description="Their part of the prompt's predicted computation, in seconds.")
    text_before: str | None = Field(default=None, description="Text of both prompts before the place.")
    previous_text: str | None = Field(default=None, description="How the earlier prompt goes on.")
    text: str | None = Field(default=None, description="How this prompt goes on.")


class Explanation(Shape):
    """Sources of a prompt's blocks, and reasons of the choice of workers."""

    id: str = Field(description="As asked for.")
    object: Literal["request.explanation"] = Field(description="Kind of the object.")
    choices: list[ExplainedChoice] = Field(description="One for each answer.")
    prefix: ExplainedPrefix | None = Field(
        description="Of a chat at this replica: where its prompt left the one before."
    )
    ignored: list[str] | None = Field(description="Of a chat at this replica: its fields without effect.")
    applied: list[str] | None = Field(
        description="Of a chat at this replica: its hints that acted in another way, with what they became."
    )


class DoctorExample(Shape):
    """Two prompts of a finding, the ones that lost most."""

    id: str = Field(description="Id of the later prompt's answer.")
    previous: str = Field(description="Id of the earlier one's.")
    lost_tokens: int = Field(description="Tokens that were lost between these two.")
    token_index: int = Field(description="Of the first other token, or of the first that was not found.")
    part: str | None = Field(description="The first other part: `system`, `tools[2]`, `messages[5]`.")
    text_before: str = Field(description="Text of both prompts before the place.")
    previous_text: str = Field(description="How the earlier prompt goes on.")
    text: str = Field(description="How the later prompt goes on.")


class DoctorFinding(Shape):
    """Prompts that begin alike and lost tokens for the same reason."""

    reason: str = Field(description="As `prefix.reason` of `/v1/requests/{id}/explain`; also `evicted` or `lost`.")
    part: str | None = Field(description="Where they part: `system`, `tools` or `messages`.")
    prompts: int = Field(description="Prompts that lost tokens.")
    lost_tokens: int = Field(description="Tokens that were computed and need not have been.")
    lost_s: float | None = Field(description="Predicted time of computing them, in seconds.")
    lost_tokens_per_day: int = Field(description="Tokens in a day that goes on so.")
    lost_s_per_day: float | None = Field(description="Seconds in a day that goes on so.")
    advice: str = Field(description="What to change, in a sentence.")
    evicted_ago_s: float | None = Field(description="Longest time between an eviction and the prompt, in seconds.")
    more_blocks: int | None = Field(description="Blocks of room that would have kept each of them.")
    example: DoctorExample = Field(description="Two of them.")


class CacheDoctor(Shape):
    """What costs a tenant's prompts at this replica their hits."""

    object: Literal["cache.doctor"] = Field(description="Kind of the object.")
    observed_s: float = Field(description="Time since the oldest prompt that was looked at, at most an hour.")
    prompts: int = Field(description="Prompts that were looked at.")
    prompt_tokens: int = Field(description="Their tokens.")
    cached_tokens: int | None = Field(description="Tokens of them that were found; null without the manager.")
    findings: list[DoctorFinding] = Field(description="The most expensive first.")


class CacheEvent(Shape):
    """Data of an event `snapshot`, `stored` or `removed`."""

    next: int = Field(description="Number to go on from, as `since`.")
    blocks: list[str] = Field(description="Hashes of blocks, in hexadecimal.")
