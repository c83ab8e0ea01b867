"""A request inside one worker: its tokens, its blocks, and how far it has come."""

from dataclasses import dataclass, field

from engine.core.hashing import BlockChain, hash_block
from engine.core.swapping import Swapped
from engine.core.types import Assignment, BlockHash, Stage, TokenLogprobs


@dataclass(slots=True, eq=False)
class Request:
    """The mutable state of an assignment. Owned by the scheduler; nobody else writes to it.

    Positions below `num_computed` have their KV in `blocks`; positions below `num_shared` lie in blocks that were
    found in the cache and must not be written again. The request is *decoding* when one token remains to be computed.
    """

    assignment: Assignment
    root: BlockHash
    block_size: int
    arrival: int
    """Order of submission in this worker; the latest is preempted first."""
    chain: BlockChain = field(init=False)
    token_ids: list[int] = field(init=False)
    blocks: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of the full blocks of `token_ids` that have been needed so far."""
    num_computed: int = 0
    num_shared: int = 0
    num_sealed: int = 0
    """How many of `blocks`, from the first, have been sealed or were found sealed."""
    awaited: set[BlockHash] = field(default_factory=set)
    """Blocks that are on their way from elsewhere; the request waits for them until `await_deadline`."""
    awaits_handover: bool = field(init=False)
    """Whether a prefill worker is to send the first sampled token, too."""
    await_deadline: float = 0.0
    held: list[int] = field(default_factory=list)
    """Imported blocks kept for this request until it starts."""
    wanted: tuple[BlockHash, ...] = ()
    """Blocks that the pool was told to evict late because the request will use them when its turn comes."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the cache when the request first started; None before that."""
    scores: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of prompt tokens, from the one that position `assignment.num_scored` predicts on."""
    num_reported: int = 0
    """How many of `scores`, from the first, have been reported."""
    num_to_score: int = field(init=False)
    """Positions from 0 on whose next token is to be scored; 0 if none are, or if a prefill worker has scored them."""
    num_preemptions: int = 0
    swapped: Swapped | None = None
    """What is kept outside the pool, from a preemption until it is back in `blocks`."""
    submitted_at: float = 0.0
    started_at: float | None = None

    def __post_init__(self) -> None:
        self.chain = BlockChain(self.root, self.assignment.salt, self.block_size)
        self.token_ids = list(self.assignment.token_ids)
        self.awaited = set(self.assignment.awaited)
        self.awaits_handover = self.assignment.stage is Stage.DECODE
        scores = self.assignment.sampling.prompt_logprobs is not None
        self.num_to_score = self.assignment.num_prompt_tokens - 1 if scores else 0

    @property
    def request_id(self) -> str:
        return self.assignment.request_id

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is still to be computed before the next token can be sampled."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_scored(self) -> int:
        """Positions from 0 on whose next token has been scored: the next one to score."""
        return self.assignment.num_scored + len(self.scores)

    @property
    def num_output(self) -> int:
        """Generated tokens so far, those of earlier attempts included: the position of the next one."""
        return len(self.token_ids) - self.assignment.num_prompt_tokens

    def full_hashes(self) -> list[BlockHash]:
        """Hashes of all full blocks of the tokens so far, extending what was known."""
        self.chain.extend(self.hashes, self.token_ids)
        return self.hashes

    def tail_hash(self, num_tokens: int) -> BlockHash | None:
        """The hash of the partial last block of the first `num_tokens` tokens; None if they end at a block's edge."""
        full = num_tokens // self.block_size
        if num_tokens == full * self.block_size:
            return None
        parent = self.chain.parent(self.full_hashes(), full)
        return hash_block(parent, self.token_ids[full * self.block_size : num_tokens])
