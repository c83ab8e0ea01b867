"""Values sent between ingress, manager and workers: frozen and picklable, without decisions."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

from raydix.engine.core.answers.continuations import BegunAnswer
from raydix.engine.core.answers.lead import Lead
from raydix.engine.core.answers.reasoning_limit import ReasoningLimit
from raydix.engine.core.objectives import LATE_PRIORITY, NO_OBJECTIVES, Objectives

BlockHash: TypeAlias = bytes
"""16-byte digest of a block: its tokens, all tokens before them, and the model (`raydix.engine.core.hashing`)."""

GRAMMAR_DIGEST_BYTES = 16


class Role(StrEnum):
    """Part of the work that a worker is placed for. Every worker can do all parts; assignments follow the role."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    ELASTIC = "elastic"
    """Any of the others, as the load asks."""


class EvictionReason(StrEnum):
    """Reason why a block left a worker's pool, the object store or the disk."""

    FULL = "pool full"
    EXPIRED = "expired"
    QUOTA = "over quota"
    """Above the ceiling of the block's tenant."""
    TAKEN = "taken over"
    """Taken over by a request to write on in the block."""
    RESET = "reset"
    WORKER_LOST = "worker lost"
    """The worker died and its pool with it."""
    STORE_FULL = "object store full"
    DISK_FULL = "disk full"
    SEGMENT_LOST = "segment lost"
    """The object store or the disk does not have the segment any more, or only damaged."""
    HANDED_OVER = "handed over"
    """Without prefix caching a segment is of use for its hand-over only."""


class Outcome(StrEnum):
    """The end of a request, as the manager is told."""

    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"
    """The client left, or nothing more is known of the request."""


class FinishReason(StrEnum):
    """Reason why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    """The answer calls functions; towards clients only, in place of STOP."""
    ERROR = "error"


class Pooling(StrEnum):
    """Way from the hidden states of a prompt's tokens to one vector."""

    MEAN = "mean"
    LAST = "last"
    """The last token's, which has seen all others."""


class GrammarKind(StrEnum):
    """Language that a grammar's source is written in. Workers take JSON_SCHEMA, REGEX and LARK, which llguidance knows;
    requests are read from the others into these."""

    JSON_SCHEMA = "json_schema"
    """A JSON Schema, as JSON. Its `x-guidance` has the options of white space."""
    REGEX = "regex"
    """A regular expression that matches the whole answer."""
    LARK = "lark"
    """A context-free grammar in Lark's notation as llguidance reads it; `start` is the answer."""
    EBNF = "ebnf"
    """A context-free grammar in llama.cpp's notation (GBNF); `root` is the answer."""
    CHOICE = "choice"
    """A JSON list of strings, of which the answer is one."""
    STRUCTURAL_TAG = "structural_tag"
    """Free text that goes on in a prescribed way behind triggers: a JSON object with `triggers`, a list of strings, and
    `structures`, a list of objects with `begin`, `schema` and `end`."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar as the client wrote it, until reading its request (`raydix.engine.serving.grammar_check`) has checked
    it and brought it into canonical form (`raydix.engine.model.grammar_source`)."""

    kind: GrammarKind
    source: str
    lead: Lead | None = None
    """Reasoning that may stand before the answer; the grammar binds what follows."""
    frame: str = ""
    """Rules in Lark's notation of an answer of which the grammar binds the part `@answer` alone."""

    @property
    def digest(self) -> bytes:
        """Name of the grammar and its frame, whatever reasoning stands before the answer, the same in every process: 16
        bytes."""
        # The kind is part of the name: one source can be valid in two languages, and mean other answers.
        text = f"{self.kind}\0{self.source}\0{self.frame}".encode()
        return blake2b(text, digest_size=GRAMMAR_DIGEST_BYTES, key=b"raydix grammar").digest()


class DraftSource(StrEnum):
    """Origin of drafts: guesses of a request's next tokens."""

    REQUEST = "request"
    """The request's own prompt and answer."""
    PREDICTION = "prediction"
    """The client's prediction of the answer."""
    PAST = "past"
    """Answers of the same salt on the same worker: to earlier requests, and to others of the same prompt under way."""
    CLUSTER = "cluster"
    """Answers of the same salt to the same prompt, of any worker, as the manager keeps them."""
    GRAMMAR = "grammar"
    """Tokens forced by the request's grammar and, with `PAST`, likely ones where it allows a few."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Rules for choosing tokens and ending generation. Validated where requests enter (`raydix.engine.api`)."""

    max_tokens: int
    """0: the request ends when its prompt is computed."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    """The only ids to choose from; None for all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of ids whose last one is never generated right behind the others."""
    stop_token_ids: tuple[int, ...] = ()
    """All ids that end generation; the model's own end-of-sequence ids are included unless `ignore_eos`."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Number of most likely alternatives reported with each token; 0 reports the chosen token only."""
    logprob_token_ids: tuple[int, ...] = ()
    """Ids reported with each token in place of the likeliest ones, if any."""
    prompt_logprobs: int | None = None
    """Number of alternatives, as `logprobs`, for the tokens of the prompt behind the first."""
    pooling: Pooling | None = None
    """The request ends with the pooled hidden state of its prompt: for 0 `max_tokens`, without `prompt_logprobs`."""
    grammar: Grammar | None = None
    """The answer's form: only tokens that go on with it are sampled, and generation ends where it ends."""
    reasoning_limit: ReasoningLimit | None = None
    speculation: bool = True
    """False: no draft is made for this request. Drafts change no answer, only its pace."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: of the chosen token and the most likely ones, best first.

    Short lists are tuples. Lists of a large part of the vocabulary are arrays, which a process passes on and copies
    without making an object of each number."""

    chosen: float
    top_ids: Sequence[int]
    top_logprobs: Sequence[float]
    rank: int | None = None
    """Rank of the chosen token among all tokens, from 1, ties by id; known for prompt tokens only."""


class Stage(StrEnum):
    """Part of a request that an assignment covers."""

    WHOLE = "whole"
    """Prefill and decode."""
    PREFILL = "prefill"
    """Compute the prompt, sample one token, export the KV."""
    DECODE = "decode"
    """Continue from imported KV; compute the missing blocks after a timeout."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank adapter of the model (LoRA, arXiv 2106.09685)."""

    name: str
    """Name in the API, in place of the model's. Two adapters may have one name, one after the other."""
    folder: str
    """Folder of its files, on every worker's node."""
    digest: bytes
    """Digest of its weights, their scaling and its invocation: the same name with others is another adapter."""
    invocation: tuple[int, ...] = ()
    """Token ids from whose last place in a prompt on it is computed (activated LoRA, arXiv 2504.12397); empty: from the
    first token on."""

    def begins_at(self, prompt: Sequence[int]) -> int | None:
        """Position of the first token of a prompt that is computed with the adapter; None: none is, nor the answer,
        since its invocation is not there."""
        if not self.invocation:
            return 0
        ids, wanted = (array("I", each).tobytes() for each in (prompt, self.invocation))
        width = len(wanted) // len(self.invocation)
        at = ids.rfind(wanted)
        # Bytes may be alike between two tokens.
        while at > 0 and at % width:
            at = ids.rfind(wanted, 0, at + len(wanted) - 1)
        return None if at < 0 or at % width else at // width


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """The adapters that were loaded at run time, as an ingress replica knows them."""

    known: tuple[Adapter, ...] = ()
    """Adapters that its requests may name."""
    in_use: frozenset[bytes] = frozenset()
    """Digests of the adapters of its requests under way."""


@dataclass(frozen=True, slots=True)
class Salt:
    """Sharing domain of a sequence's KV; the ingress derives it from the tenant (`raydix.engine.core.tenants`) and the
    adapter."""

    private: bytes = b""
    """Blocks are shared among sequences of the same value."""
    num_public_tokens: int = 0
    """Leading public tokens; blocks wholly among the public tokens are shared with everyone."""
    adapter: bytes = b""
    """Digest of the adapter that the KV is computed with (`Adapter.digest`); empty: the model alone."""
    num_plain_tokens: int = 0
    """Leading tokens computed without the adapter; blocks wholly among them are shared with the model alone."""

    @property
    def answers(self) -> bytes:
        """Sharing domain of past answers and drafts, which each adapter has for itself."""
        return self.private + self.adapter


@dataclass(frozen=True, slots=True)
class CacheMark:
    """A place in a prompt: the KV before it is to be kept longer than the rest
    (`raydix.engine.core.eviction.retention`)."""

    num_blocks: int
    """Blocks up to the mark, with the one in which the mark lies."""
    priority: int
    ttl_s: float
    """Seconds to live from the end of the request on."""


@dataclass(frozen=True, slots=True)
class CacheHints:
    """Retention of a request's KV after its end, as the client asks for."""

    tenant: str = ""
    """Tenant whose quota the KV counts against."""
    priority: int = 0
    ttl_s: float | None = None
    """Seconds to live from the end of the request on; None for no limit."""
    marks: tuple[CacheMark, ...] = ()
    call_token: int | None = None
    """Token that each call of a function begins with, where the answer may have calls: eviction learns by it how soon
    prompts come back. None: nothing tells calls from other text."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Retention of a block. Of several requests' hints for one block the most generous counts."""

    tenant: str = ""
    priority: int = 0
    """A tenant's blocks of a lower priority are evicted before its blocks of a higher one."""
    expires_at: float | None = None
    """Time from which the blocks are evicted before any other; None for never. In seconds of a pool's clock or, outside
    the process, since the epoch."""


DEFAULT_RETENTION = Retention()


class AttemptName(NamedTuple):
    """The name of one attempt of a request."""

    request_id: str
    number: int


class AttemptOver(AttemptName):
    """Says in a token stream that the worker has no attempt of this name any more, nor events of it to come."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Assignment:
    """A request as a worker gets it. A retried request comes again with a higher `attempt` and more tokens."""

    request_id: str
    attempt: int
    stage: Stage
    token_ids: tuple[int, ...]
    """The prompt, and all tokens generated by earlier attempts."""
    num_prompt_tokens: int
    sampling: Sampling
    reply_to: str
    """Id of the ingress replica that gets the events."""
    salt: Salt = Salt()
    awaited: tuple[BlockHash, ...] = ()
    """Blocks and recurrent states promised to this worker by others; the request waits for them, but can do
    without."""
    await_timeout_s: float = 30.0
    """Longest time to wait without the arrival of an awaited block."""
    num_scored: int = 0
    """Prompt tokens behind the first whose log-probabilities were delivered by earlier attempts."""
    cache: CacheHints = CacheHints()
    promised_to: int = 0
    """Epoch of the worker incarnation that blocks and handover were promised to; 0 for none."""
    priority: int = 0
    """Requests of lower numbers start before, and are preempted after, those of higher ones."""
    is_idle: bool = False
    """True for work without a waiting client: its KV is put into the pool for later requests, and no event is sent."""
    prediction: tuple[int, ...] = ()
    """The client's guess of the answer, for drafts: right or wrong, the answer has the same tokens."""
    continuations: tuple[bytes, ...] = ()
    """Beginnings of answers as `Admission.continuations`, for drafts, too."""
    is_suspect: bool = False
    """True if a worker may have died or fallen silent by this request: it begins alone
    (`raydix.engine.model.isolation`)."""
    adapter: Adapter | None = None
    """The adapter of every row of the request; None: the model alone. The salt has its digest."""
    parts_at: int = 0
    """Leading blocks that earlier prompts of the cluster had, too: a place for a snapshot of recurrent states."""


class StartTimes(NamedTuple):
    """The beginning of an attempt in one worker."""

    waited_s: float
    """Seconds from the submission to the first chunk: for a free place, and for KV that others compute or send."""
    num_chunks: int
    """Chunks up to the worker's first token."""


class TokenEvent(NamedTuple):
    """A generated token, or the end of a request without one (`token_id` None)."""

    request_id: str
    attempt: int
    position: int
    """Index among the generated tokens, from 0; the same in every attempt and on every worker."""
    token_id: int | None
    finish: FinishReason | None
    logprobs: TokenLogprobs | None
    cached_tokens: int
    """Prompt tokens with KV found in a cache by this attempt."""
    detail: str | None = None
    """Cause, when `finish` is ERROR."""
    num_preemptions: int = 0
    """Preemptions of this attempt so far."""
    is_refusal: bool = False
    """True if `finish` is ERROR by the request's own fault: trying again fails again."""
    pooled: bytes | None = None
    """Pooled hidden state at the end of a request that pools, little-endian float32."""
    num_accepted: int = 0
    """Draft tokens of this event's step that became tokens; with the step's last event of the request."""
    num_rejected: int = 0
    """Draft tokens that were not right."""
    draft_source: DraftSource | None = None
    """Origin of the draft of this event's step; with these counts."""
    start: StartTimes | None = None
    """The attempt's beginning; with the first event that the worker sends of the attempt."""


class PromptEvent(NamedTuple):
    """Log-probabilities of consecutive prompt tokens, reported in order, all before the first generated token."""

    request_id: str
    attempt: int
    position: int
    """Index in the prompt of the first token reported; at least 1, since nothing precedes token 0."""
    logprobs: tuple[TokenLogprobs, ...]


StreamEvent: TypeAlias = PromptEvent | TokenEvent | AttemptOver
"""An item of a worker's token stream."""


class Handover(NamedTuple):
    """The end of a prefill assignment: the decode worker can go on from the sampled token."""

    request_id: str
    attempt: int
    token_id: int
    tail: BlockHash | None
    """The partial last block of the prompt, exported like any other."""


class Snapshot(NamedTuple):
    """A recurrent state that is sent with the KV before it."""

    name: BlockHash
    """Name of the state (`raydix.engine.core.hashing.state_hash`): a second kind of block."""
    path: tuple[BlockHash, ...]
    """All blocks of the sequence up to the one at whose end the state was taken; the state is of no use without."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Contents of an exported segment. Its payload is the blocks in this order, one after the other, and behind them
    the recurrent states in theirs."""

    fingerprint: str
    """Fingerprint of the model, KV dtype and layout; must equal the importing worker's."""
    hashes: tuple[BlockHash, ...]
    """Hash of each block, in sequence order; the last block is partial when `handover` names it as its tail."""
    num_bytes: int
    checksum: int
    handover: Handover | None = None
    retention: Retention = DEFAULT_RETENTION
    states: tuple[Snapshot, ...] = ()
    """Recurrent states; the last one is behind the partial block if there is one."""
    state_bytes: int = 0
    """Bytes of each state; 0 for a model without them."""

    @property
    def full_hashes(self) -> tuple[BlockHash, ...]:
        """All hashes but the tail: the blocks that other requests can use."""
        # A partial block goes on differently in each request, so only the one that is handed over may have it.
        return self.hashes if self._tail is None else self.hashes[:-1]

    @property
    def full_states(self) -> tuple[Snapshot, ...]:
        """All states but the one behind the tail."""
        tail = self._tail
        return tuple(state for state in self.states if state.path[-1] != tail)

    @property
    def names(self) -> tuple[BlockHash, ...]:
        """The names of all that other requests can use, blocks and states."""
        if not self.states:
            return self.full_hashes
        return (*self.full_hashes, *(state.name for state in self.full_states))

    @property
    def blocks_bytes(self) -> int:
        """Bytes of the blocks together: where the states begin in the payload."""
        return self.num_bytes - len(self.states) * self.state_bytes

    @property
    def _tail(self) -> BlockHash | None:
        return None if self.handover is None else self.handover.tail


@dataclass(frozen=True, slots=True)
class AdmitRequest:
    """Facts about a request for its placement."""

    request_id: str
    attempt: int
    hashes: tuple[BlockHash, ...]
    """Hashes of all full blocks of the prompt and of the tokens generated by earlier attempts."""
    num_tokens: int
    session: str | None = None
    ingress_id: str = ""
    """Ingress that sends the request; if the ingress falls silent, its requests are ended."""
    cache: CacheHints = CacheHints()
    preview: tuple[int, ...] = ()
    """The first tokens, for reports."""
    generates: bool = True
    """True if tokens follow the prompt; otherwise no decode worker is needed."""
    avoided: tuple[str, ...] = ()
    """Workers that the ingress cannot reach: the request goes to others, if there are others."""
    answer_name: bytes = b""
    """Name of the place where the answer begins (`BlockChain.answer_name`); empty for no drafts from others."""
    objectives: Objectives = NO_OBJECTIVES
    """The request's own, which go before those of the configuration."""
    priority: int = 0
    """Priority as `Assignment.priority`."""
    reasoning_turn: int | None = None
    """Number of earlier answers in a chat whose next answer may begin with reasoning; None for other requests."""
    adapter: str | None = None
    """Name of the request's adapter, for reports; None: the model alone."""

    @property
    def is_behind(self) -> bool:
        """True if the request gives way to others."""
        return self.priority >= LATE_PRIORITY


class Expected(NamedTuple):
    """The manager's expectations of a placement."""

    ttft_s: float
    """Seconds from the admission to the first token."""
    blocks: tuple[tuple[str, int], ...]
    """Number of the prompt's full blocks by their source (`raydix.engine.core.manager.explain.BlockSource`)."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The manager's answer: the workers of the request, and the promised blocks."""

    request_id: str
    attempt: int
    prefill: str
    decode: str
    prefill_epoch: int
    decode_epoch: int
    prefill_awaited: tuple[BlockHash, ...]
    decode_awaited: tuple[BlockHash, ...]
    continuations: tuple[bytes, ...] = ()
    """Packed answers that began where this one does, the likeliest last."""
    gives_way: bool = False
    """True if the request is late, and others go first (`LATE_PRIORITY`)."""
    expected_ttft_s: float | None = None
    """Part of `expected`, whose class would double the time of sending an admission; None without the manager."""
    found: tuple[tuple[str, int], ...] = ()
    """The other part."""
    num_known: int = 0
    """Leading blocks of the prompt that the manager knew."""
    prefill_states: tuple[BlockHash, ...] = ()
    """Recurrent states that the prefill worker awaits beside its blocks."""

    @property
    def expected(self) -> Expected | None:
        """The manager's expectations; None without the manager."""
        return None if self.expected_ttft_s is None else Expected(self.expected_ttft_s, self.found)

    def whole(self) -> "Admission":
        """Have the prefill worker do the whole request."""
        # What the decode worker awaited comes from the prefill worker, which is now the same.
        return replace(self, decode=self.prefill, decode_epoch=self.prefill_epoch, decode_awaited=())


class Paused(NamedTuple):
    """The manager's answer to a request whose session is to wait for its turn; the request is to ask again."""

    num_ahead: int
    """Sessions whose turn comes before."""
    num_placed: int
    """Sessions whose turn it is."""
    num_blocks: int
    """Blocks that the session needs."""
    paused_s: float
    """Time since the pause began."""


class ProcessName(NamedTuple):
    """A process of the cluster."""

    node: str
    """Ray's id of the node."""
    pid: int
    """Id on that node."""
    started: int
    """Start of the process, in ticks since the node's: tells it from a later process with the same id."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A registered worker, as others may know it."""

    worker_id: str
    role: Role
    epoch: int
    process: ProcessName | None = None


@dataclass(frozen=True, slots=True)
class Membership:
    """The workers of the cluster, as the manager knows them."""

    workers: tuple[WorkerInfo, ...]
    """Registered workers."""
    num_starting: int
    """Workers that a host is starting and that are not registered yet."""
    fingerprint: str | None = None
    """The fingerprint of the registered workers' KV; None if there are none."""
    leaving: frozenset[str] = frozenset()
    """Registered workers that are about to stop: their requests are to go on elsewhere."""
    starts_on_demand: bool = False
    """True if there may be no worker while nobody asks: a request has one started."""
    adapters: tuple[Adapter, ...] | None = None
    """The adapters that were loaded at run time; None while the manager has not learnt of them yet."""


class DraftUse(NamedTuple):
    """Draft tokens of one source in one attempt of a request."""

    source: DraftSource
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """An attempt got its first token `ttft_s` seconds after its admission."""

    request_id: str
    attempt: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A request is over, or an admission of it; `answer`, for others that ask the same, comes with the last one."""

    request_id: str
    attempt: int = 0
    how: Outcome = Outcome.ABORTED
    num_preemptions: int = 0
    drafts: tuple[DraftUse, ...] = ()
    answer: BegunAnswer | None = None
    handover_s: float | None = None
    """Time from the first token to the second one, where another worker computed the second one."""
    stop: FinishReason | None = None
    """Reason for the answer's end; None without one."""


NoteWork: TypeAlias = Callable[[Sequence[str]], None]
"""Notes the ids of the requests that the calling thread computes for from now on (`raydix.actors.last_words`)."""


def note_nothing(request_ids: Sequence[str]) -> None:
    """The `NoteWork` of a process whose last words nobody reads."""
