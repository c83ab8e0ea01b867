"""A request inside one worker: tokens, blocks, progress."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from raydix.engine.core.eviction.retention import marked, retention
from raydix.engine.core.hashing import BlockChain
from raydix.engine.core.types import (
    Assignment,
    BlockHash,
    FinishReason,
    Pooling,
    Retention,
    Stage,
    StartTimes,
    TokenLogprobs,
)
from raydix.engine.core.worker.drafts.texts import Suffixes


@dataclass(frozen=True, slots=True)
class Swapped:
    """Record of a preempted request's KV outside the pool."""

    first_block: int
    """Index in the sequence of the first kept block; the blocks before it must be found in the pool."""
    num_blocks: int
    num_computed: int
    """Leading positions whose KV lies in the kept blocks or the blocks before them."""
    num_extra: int = 0
    """Room of the recurrent state behind these positions, in blocks."""


@dataclass(slots=True, eq=False)
class Request:
    """The mutable record of an assignment. Only the scheduler and its parts write to the fields, but `suffixes`, the
    drafter's.

    | positions | their KV |
    |---|---|
    | below `num_shared` | in blocks found in the cache, not to be written again |
    | from `num_shared` to below `num_computed` | in own blocks of `blocks` |

    The request is *decoding* when one token remains to be computed.
    """

    assignment: Assignment
    chain: BlockChain
    """Names of its blocks."""
    arrival: int
    """Order of submission in this worker; the latest is preempted first."""
    request_id: str = field(init=False)
    token_ids: list[int] = field(init=False)
    blocks: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of the full blocks of `token_ids` needed so far."""
    num_computed: int = 0
    num_shared: int = 0
    num_sealed: int = 0
    """Number of `blocks`, from the first, that have been sealed or were found sealed."""
    awaited: set[BlockHash] = field(default_factory=set)
    """Blocks on their way from elsewhere; the request waits for them until `await_deadline`."""
    awaits_handover: bool = field(init=False)
    """True until the prefill worker of a split request has sent the first sampled token."""
    await_deadline: float = 0.0
    awaits_grammar: bool = field(init=False)
    """True until the grammar of the request has been compiled, without a deadline."""
    held: list[int] = field(default_factory=list)
    """Imported blocks held for this request until it starts."""
    protected: tuple[BlockHash, ...] = ()
    """Blocks that the pool evicts late because the waiting request will use them."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the cache when the request first started; None before that."""
    scores: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of prompt tokens, from the one that position `assignment.num_scored` predicts on."""
    num_reported: int = 0
    """Number of `scores`, from the first, that have been reported."""
    num_to_score: int = field(init=False)
    """Positions from 0 on whose next token is to be scored; 0 for none, or after a handover by a prefill worker."""
    num_pooled: int = field(init=False)
    """The next position whose hidden state is to be added to `pooled_sum`."""
    num_to_pool: int = field(init=False)
    """Positions from 0 on of a prompt that is pooled; 0 for none."""
    pooled_sum: bytes = b""
    """Sum of the hidden states of all pooled positions so far (`raydix.engine.core.worker.prompt_results`)."""
    has_prompt_results: bool = field(init=False)
    """True if the prompt is scored or pooled."""
    num_preemptions: int = 0
    swapped: Swapped | None = None
    """KV kept outside the pool, from a preemption until it is back in `blocks`."""
    is_named: bool = True
    """True if the full blocks get names, so that other requests can find them."""
    state: int | None = None
    """Slot of the recurrent state behind `num_computed`; None at the beginning, and for a model without such states."""
    parted_at: int | None = None
    """Number of blocks after which the prompt parts from what the pool had, if the last snapshot lies before."""
    rolling: BlockHash | None = None
    """The request's own last snapshot, if it stays only until the next one."""
    snapshots: list[BlockHash] = field(default_factory=list)
    """Blocks behind which the request has taken snapshots that stay, since the last export of a prefill."""
    suffixes: Suffixes | None = None
    """Earlier places of the last tokens, if drafts are made of these."""
    submitted_at: float = 0.0
    started_at: float | None = None
    num_chunks: int = 0
    """Chunks up to the first event."""
    has_answered: bool = False
    """True once an event was sent."""

    def __post_init__(self) -> None:
        self.request_id = self.assignment.request_id
        self.token_ids = list(self.assignment.token_ids)
        self.awaited = set(self.assignment.awaited)
        self.awaits_handover = self.assignment.stage is Stage.DECODE
        self.awaits_grammar = self.assignment.sampling.grammar is not None
        scores = self.assignment.sampling.prompt_logprobs is not None
        # The last position predicts the first token of the answer, not one of the prompt.
        self.num_to_score = self.assignment.num_prompt_tokens - 1 if scores else 0
        pooling = self.assignment.sampling.pooling
        assert pooling is None or not scores, "a position's result is wanted once"
        self.num_to_pool = 0 if pooling is None else self.assignment.num_prompt_tokens
        # Pooling by the last token begins there, as if the positions before had been added already.
        self.num_pooled = self.num_to_pool - 1 if pooling is Pooling.LAST else 0
        self.has_prompt_results = self.num_to_score > 0 or self.num_to_pool > 0

    @property
    def tenant(self) -> str:
        return self.assignment.cache.tenant

    @property
    def start(self) -> StartTimes:
        """The beginning of the request in this worker, once it has started."""
        assert self.started_at is not None
        return StartTimes(max(0.0, self.started_at - self.submitted_at), self.num_chunks)

    @property
    def block_size(self) -> int:
        return self.chain.block_size

    @property
    def num_remaining(self) -> int:
        """Tokens without KV before the next token can be sampled."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_needed_blocks(self) -> int:
        """Blocks needed for the next token and its KV."""
        # A full last block needs one more: the token that is sampled next has its KV behind it.
        return len(self.token_ids) // self.block_size + 1

    @property
    def num_missing_blocks(self) -> int:
        return max(0, self.num_needed_blocks - len(self.blocks))

    @property
    def num_scored(self) -> int:
        """Positions from 0 on whose next token has been scored: the next position to score."""
        return self.assignment.num_scored + len(self.scores)

    @property
    def num_output(self) -> int:
        """Tokens generated so far, by earlier attempts too: the position of the next one."""
        return len(self.token_ids) - self.assignment.num_prompt_tokens

    @property
    def num_given(self) -> int:
        """Tokens generated by earlier attempts: the position of the first one here."""
        return len(self.assignment.token_ids) - self.assignment.num_prompt_tokens

    def num_missing_for(self, num_tokens: int) -> int:
        """Blocks to be allocated for the KV of the next `num_tokens`; negative if there are more than that."""
        return -(-(self.num_computed + num_tokens) // self.block_size) - len(self.blocks)

    def begin_with(self, matched: Sequence[int]) -> None:
        """Run from the shared blocks `matched` on, without waiting for anything. A later handover comes too late: its
        token may have been sampled here."""
        self.awaited.clear()
        self.awaits_handover = False
        self.blocks = list(matched)
        self.num_sealed = len(matched)
        self.num_shared = len(matched) * self.block_size
        # The last token is computed even if its block is shared: its output is what the next token is sampled from.
        self.num_computed = min(self.num_shared, len(self.token_ids) - 1)

    def note_start(self, now: float) -> None:
        """Note when the request first started, and how much of the prompt was there."""
        # The first start counts. After a preemption a request finds its own blocks, which are no hits.
        if self.num_cached_tokens is None:
            self.num_cached_tokens = min(self.num_computed, self.assignment.num_prompt_tokens)
            self.started_at = now

    def give_up_blocks(self) -> list[int]:
        """Return the blocks, which the request has no more, nor any progress."""
        blocks, self.blocks = self.blocks, []
        self.num_computed = self.num_shared = self.num_sealed = 0
        return blocks

    def retention(self, now: float) -> Retention:
        """Retention of the request's blocks behind all marks if it ends at `now`."""
        return retention(self.assignment.cache, now)

    def marked(self, now: float) -> Sequence[Retention]:
        """Retention of the blocks before the last mark, from the first block on."""
        return marked(self.assignment.cache, now)

    @property
    def stop(self) -> FinishReason | None:
        """The reason of an ended answer's end: calls, or its turn is over; None where nothing tells them apart, or
        another worker generates the answer."""
        call = self.assignment.cache.call_token
        if call is None or self.assignment.stage is Stage.PREFILL:
            return None
        answer = self.token_ids[self.assignment.num_prompt_tokens :]
        return FinishReason.TOOL_CALLS if call in answer else FinishReason.STOP

    def check_integrity(self, *, is_running: bool) -> None:
        """Assert that progress, blocks, scores and pooling agree."""
        assert self.num_computed <= len(self.blocks) * self.block_size
        assert self.num_computed < len(self.token_ids)
        assert is_running or not self.blocks
        assert not is_running or not (self.held or self.protected or self.awaits_grammar)
        assert 0 <= self.num_reported <= len(self.scores)
        assert not self.num_to_score or self.num_scored <= self.num_to_score
        # Nothing is computed past a position whose score is missing: it could never be scored afterwards.
        assert self.num_scored >= self.num_to_score or self.num_computed <= self.num_scored
        assert self.num_pooled <= self.num_to_pool
        assert self.num_pooled == self.num_to_pool or self.num_computed <= self.num_pooled

    def full_hashes(self) -> list[BlockHash]:
        """Hashes of all full blocks of the tokens so far, extending the known ones; none unless blocks are named."""
        if self.is_named:
            self.chain.extend(self.hashes, self.token_ids)
        return self.hashes

    def tail_hash(self, num_tokens: int) -> BlockHash | None:
        """The hash of the partial last block of the first `num_tokens` tokens; None if they end at a block's edge."""
        full = num_tokens // self.block_size
        if num_tokens == full * self.block_size:
            return None
        return self.chain.partial(self.full_hashes(), full, self.token_ids[full * self.block_size : num_tokens])
