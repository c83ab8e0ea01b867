"""What the unit tests of engine and core build their cases from.

`FakeModel` stands in for a model and its KV tensors. Its KV of a position is a *key* of everything that position
depends on: the model and every token up to it; and, in the private part, the salt, so that a tenant who reads another's
is found out. A forward pass writes the keys of its chunk and reads all keys that the chunk attends to, through the
block table; one that is not the key of the request's own tokens fails the test. And the token that it samples is a
function of the last key, so what a request must answer is known from its prompt alone, whatever was cached, chunked,
preempted, imported or taken over.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from raydix.engine.core.hashing import BlockChain, root_hash, state_hash
from raydix.engine.core.types import (
    Assignment,
    BlockHash,
    CacheHints,
    FinishReason,
    Handover,
    Pooling,
    PromptEvent,
    Salt,
    Sampling,
    SegmentHeader,
    Snapshot,
    Stage,
    TokenEvent,
    TokenLogprobs,
)
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.drafts.rows import up_to_difference
from raydix.engine.core.worker.scheduler import Scheduler
from raydix.engine.core.worker.step import (
    CopyBlock,
    Move,
    RunnerOutput,
    SampledToken,
    ScheduledChunk,
    SchedulerOutput,
    StepOutcome,
    SwapDrop,
    SwapIn,
    SwapOut,
)

FINGERPRINT = "test-model/cpu"
ROOT = root_hash(FINGERPRINT)
UNSALTED = Salt()
NO_HINTS = CacheHints()
NO_STATES: Mapping[tuple[BlockHash, ...], int] = MappingProxyType({})
VOCAB = 4
KEY_BYTES = 8
SUM_BYTES = 12
_MASK = (1 << 63) - 1


def keys_of(chain: BlockChain, token_ids: Iterable[int], known: Sequence[int] = ()) -> list[int]:
    """The KV key of each position of a sequence. `known`: the keys of its first positions."""
    keys = list(known)
    key = keys[-1] if keys else int.from_bytes(chain.root[:7], "little")
    private_from = chain.num_public_blocks * chain.block_size
    for position, token_id in enumerate(islice(token_ids, len(keys), None), len(keys)):
        if position == private_from:
            key = hash((key, int.from_bytes(chain.salt.private, "little"))) & _MASK
        key = hash((key, token_id)) & _MASK
        keys.append(key)
    return keys


def sampled_after(chain: BlockChain, token_ids: Sequence[int]) -> int:
    """The token that `FakeModel` samples after `token_ids`."""
    return keys_of(chain, token_ids)[-1] % VOCAB


def scores_of(chain: BlockChain, token_ids: Sequence[int]) -> list[TokenLogprobs]:
    """What `FakeModel` says of each token behind the first."""
    return [TokenLogprobs(-float(key % 997), (), ()) for key in keys_of(chain, token_ids)[1:]]


def pooled_of(assignment: Assignment, chain: BlockChain) -> bytes | None:
    """The sum that `FakeModel` gives as the pooled hidden state of an assignment's prompt, if the state is wanted."""
    pooling, num_tokens = assignment.sampling.pooling, assignment.num_prompt_tokens
    if pooling is None:
        return None
    keys = keys_of(chain, assignment.token_ids[:num_tokens])
    return sum(keys[-1:] if pooling is Pooling.LAST else keys).to_bytes(SUM_BYTES)


def expected_answer(
    chain: BlockChain, prompt: Sequence[int], sampling: Sampling, max_model_len: int
) -> tuple[list[int], FinishReason]:
    """All tokens that a prompt must be answered with, and why the answer ends there."""
    token_ids = list(prompt)
    if sampling.max_tokens == 0:
        return [], FinishReason.LENGTH
    keys = keys_of(chain, token_ids)
    while True:
        token_ids.append(keys[-1] % VOCAB)
        keys = keys_of(chain, token_ids, keys)
        count = len(token_ids) - len(prompt)
        if token_ids[-1] in sampling.stop_token_ids and count > sampling.min_tokens:
            return token_ids[len(prompt) :], FinishReason.STOP
        if count >= sampling.max_tokens or len(token_ids) >= max_model_len:
            return token_ids[len(prompt) :], FinishReason.LENGTH


class FakeModel:
    """A runner and a block store over an array of keys, [num_blocks, block_size]. Keeps what was written for ever."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.cells = np.zeros((pool.num_blocks, pool.block_size), np.int64)
        self.block_bytes = pool.block_size * KEY_BYTES
        self.swapped: dict[str, list[list[int]]] = {}
        """The keys of each block that is kept outside the pool."""
        self.swapped_states: dict[str, int] = {}
        """The state of each preempted request that was kept outside last."""
        self.states = np.zeros(0 if pool.states is None else pool.states.num_slots, np.int64)
        """What a recurrent layer would know behind a position: its key."""
        self.state_bytes = KEY_BYTES
        self._known: dict[str, tuple[BlockChain, list[int], list[int]]] = {}
        """The tokens of each request that were computed last, and their keys: a step adds few to a long sequence."""

    def run(self, output: SchedulerOutput) -> RunnerOutput:
        """Write, then attend and sample, as a batch does."""
        self._write(output)
        if self.pool.states is not None:
            self._go_on(output)
        return self._read(output)

    def check(self) -> None:
        """It always runs."""

    def warm_up(self, num_tokens: int) -> None:
        """It is always warm."""

    def export_blocks(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        return self.cells[list(block_ids)].reshape(-1).view(np.uint8)

    def start_export(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        return self.export_blocks(block_ids)

    def import_blocks(self, buffer: npt.NDArray[np.uint8], block_ids: Sequence[int]) -> None:
        self.cells[list(block_ids)] = buffer.view(np.int64).reshape(len(block_ids), self.pool.block_size)

    def copy_block(self, source: int, target: int) -> None:
        self.cells[target] = self.cells[source]

    def export_states(self, slots: Sequence[int]) -> npt.NDArray[np.uint8]:
        return self.states[list(slots)].view(np.uint8)

    def import_states(self, buffer: npt.NDArray[np.uint8], slots: Sequence[int]) -> None:
        self.states[list(slots)] = buffer.view(np.int64)

    def move(self, move: Move) -> None:
        """What an engine does before it runs a step."""
        match move:
            case CopyBlock(source, target):
                self.copy_block(source, target)
            case SwapOut(request_id, blocks, state):
                self.swapped[request_id] = self.cells[list(blocks)].tolist()
                if state is not None:
                    self.swapped_states[request_id] = int(self.states[state])
            case SwapIn(request_id, blocks, state):
                kept = self.swapped.pop(request_id)
                if blocks:
                    self.cells[list(blocks)] = kept[-len(blocks) :]
                if state is not None:
                    self.states[state] = self.swapped_states[request_id]
            case SwapDrop(request_id):
                self.swapped.pop(request_id)

    def move_all(self, output: SchedulerOutput) -> None:
        for move in output.moves:
            self.move(move)

    def _write(self, output: SchedulerOutput) -> None:
        written: set[tuple[int, int]] = set()
        for chunk in output.chunks:
            request = chunk.request
            end = chunk.start + chunk.num_tokens
            keys = self._keys(chunk)
            for position in range(max(chunk.start, chunk.store_from), end):
                block, offset = request.blocks[position // self.pool.block_size], position % self.pool.block_size
                assert self.pool.hash_of(block) is None, f"{request.request_id} writes to a block that others may read"
                assert (block, offset) not in written, "two chunks write to one slot"
                written.add((block, offset))
                self.cells[block, offset] = keys[position]

    def _go_on(self, output: SchedulerOutput) -> None:
        """Take each request's state over its chunk, as a recurrent layer does."""
        sources = {chunk.states.source for chunk in output.chunks if chunk.states is not None}
        written: set[int] = set()
        for chunk in output.chunks:
            request, moves, keys = chunk.request, chunk.states, self._keys(chunk)
            assert moves is not None, f"{request.request_id} has no state to go on from, nor one to write"
            if moves.source is None:
                assert chunk.start == 0, f"{request.request_id} goes on without a state"
            else:
                assert self.states[moves.source] == keys[chunk.start - 1], (
                    f"{request.request_id} goes on from a state that is not its own"
                )
            for num_tokens, slot in moves.writes:
                assert chunk.start < num_tokens <= chunk.start + chunk.num_tokens
                assert slot not in sources and slot not in written, "a state is written that is read, or written twice"
                written.add(slot)
                self.states[slot] = keys[num_tokens - 1]

    def _read(self, output: SchedulerOutput) -> RunnerOutput:
        sampled, scores, sums, pooled = dict[str, Sequence[SampledToken]](), {}, {}, {}
        for chunk in output.chunks:
            request = chunk.request
            end = chunk.start + chunk.num_tokens
            keys = self._keys(chunk)
            assert len(keys) == end, "a draft begins behind the request's last token"
            seen = self.cells[request.blocks].reshape(-1)[:end].tolist()
            assert seen == keys, f"{request.request_id} attends to KV that is not its own"
            if chunk.samples:
                tokens = [SampledToken(key % VOCAB) for key in keys[-1 - len(chunk.draft) :]]
                sampled[request.request_id] = up_to_difference(chunk.draft, tokens)
            if chunk.scored:
                assert chunk.start <= chunk.scored[0] and chunk.scored[-1] < end
                scores[request.request_id] = scores_of(request.chain, request.token_ids)[
                    chunk.scored.start : chunk.scored.stop
                ]
            if chunk.pooled:
                assert chunk.start <= chunk.pooled[0] and chunk.pooled[-1] == end - 1
                sums[request.request_id] = self._sums(chunk, keys)
            if chunk.ends_pooled:
                pooled[request.request_id] = sums.get(request.request_id, [request.pooled_sum])[-1]
        return RunnerOutput(sampled, scores, sums=sums, pooled=pooled)

    def _keys(self, chunk: ScheduledChunk) -> list[int]:
        """The keys of a request up to a chunk's end, those of the draft last."""
        request = chunk.request
        tokens = list(request.token_ids[: chunk.start + chunk.num_tokens])
        chain, computed, keys = self._known.get(request.request_id, (request.chain, [], []))
        if chain is not request.chain or tokens[: len(computed)] != computed:
            keys = []
        keys = keys_of(request.chain, tokens, keys)
        self._known[request.request_id] = (request.chain, tokens, keys)
        return keys_of(request.chain, [*tokens, *chunk.draft], keys)

    def _sums(self, chunk: ScheduledChunk, keys: list[int]) -> list[bytes]:
        """The request's sum behind each block that ends among the pooled positions, and behind the last of these."""
        total, sums = int.from_bytes(chunk.request.pooled_sum), []
        for position in chunk.pooled:
            total += keys[position]
            if (position + 1) % self.pool.block_size == 0 or position == chunk.pooled[-1]:
                sums.append(total.to_bytes(SUM_BYTES))
        return sums


def make_assignment(
    request_id: str = "a",
    prompt: Sequence[int] = (1, 2, 3),
    *,
    generated: Sequence[int] = (),
    stage: Stage = Stage.WHOLE,
    attempt: int = 0,
    max_tokens: int = 4,
    stop: Sequence[int] = (),
    min_tokens: int = 0,
    salt: Salt = UNSALTED,
    awaited: Sequence[BlockHash] = (),
    await_timeout_s: float = 30.0,
    prompt_logprobs: int | None = None,
    pooling: Pooling | None = None,
    num_scored: int = 0,
    cache: CacheHints = NO_HINTS,
    priority: int = 0,
    is_idle: bool = False,
) -> Assignment:
    return Assignment(
        request_id,
        attempt,
        stage,
        (*prompt, *generated),
        len(prompt),
        Sampling(
            max_tokens,
            stop_token_ids=tuple(stop),
            min_tokens=min_tokens,
            prompt_logprobs=prompt_logprobs,
            pooling=pooling,
        ),
        "ingress",
        salt,
        tuple(awaited),
        await_timeout_s,
        num_scored,
        cache,
        priority=priority,
        is_idle=is_idle,
    )


def chain_of(salt: Salt = UNSALTED, block_size: int = 4) -> BlockChain:
    return BlockChain(ROOT, salt, block_size)


def hashes_of(token_ids: Sequence[int], block_size: int = 4) -> list[BlockHash]:
    """The hashes of all full blocks of a sequence."""
    return chain_of(block_size=block_size).hashes(token_ids)


def answer_to(assignment: Assignment, max_model_len: int = 1 << 20) -> list[int]:
    """All tokens that an assignment's prompt must be answered with."""
    prompt = assignment.token_ids[: assignment.num_prompt_tokens]
    return expected_answer(chain_of(assignment.salt), prompt, assignment.sampling, max_model_len)[0]


def submit(scheduler: Scheduler, assignment: Assignment, now: float = 0.0) -> None:
    scheduler.submit(assignment, ROOT, now)


def step(scheduler: Scheduler, model: FakeModel, now: float = 0.0) -> tuple[SchedulerOutput, StepOutcome]:
    """One whole step, its exports released at once."""
    output = scheduler.schedule(now)
    model.move_all(output)
    outcome = scheduler.update(output, model.run(output), now)
    for export in outcome.exports:
        scheduler.transfers.release(export, 0.0)
    return output, outcome


def run_all(scheduler: Scheduler, model: FakeModel, now: float = 0.0) -> dict[str, list[TokenEvent]]:
    """Step until nothing is left; the events of each request."""
    events: dict[str, list[TokenEvent]] = {}
    while scheduler.requests:
        output, outcome = step(scheduler, model, now)
        assert output.chunks, "requests are here, but nothing can be computed"
        for event in outcome.events:
            events.setdefault(event.request_id, []).append(event)
    return events


def run_to_end(
    scheduler: Scheduler, model: FakeModel
) -> tuple[list[PromptEvent], list[TokenEvent], list[tuple[int, int]]]:
    """Step until nothing is left: scores, other events, and first position and length of each chunk."""
    scores: list[PromptEvent] = []
    events: list[TokenEvent] = []
    chunks: list[tuple[int, int]] = []
    while scheduler.requests:
        output, outcome = step(scheduler, model)
        scheduler.check_integrity()
        scores += outcome.scores
        events += outcome.events
        chunks += [(chunk.start, chunk.num_tokens) for chunk in output.chunks]
    return scores, events, chunks


def tokens_of(events: Iterable[TokenEvent]) -> list[int | None]:
    return [event.token_id for event in events]


def import_blocks(
    scheduler: Scheduler,
    model: FakeModel,
    hashes: Sequence[BlockHash],
    contents: Sequence[Sequence[int]],
    handover: Handover | None = None,
    states: Mapping[tuple[BlockHash, ...], int] = NO_STATES,
) -> None:
    """Put blocks of these hashes and keys into the pool as far as there is room, as an import does. `states`: the key
    before each recurrent state of the segment, by the blocks up to it."""
    sent = tuple([Snapshot(state_hash(path[-1]), path) for path in states])
    header = SegmentHeader(FINGERPRINT, tuple(hashes), num_bytes=0, checksum=0, handover=handover, states=sent)
    incoming = scheduler.transfers.take_in(header, 0.0)
    for index, block in zip(incoming.indexes, incoming.blocks, strict=True):
        model.cells[block, : len(contents[index])] = contents[index]
    for state, slot in zip(incoming.states, incoming.slots, strict=True):
        model.states[slot] = states[state.path]
    scheduler.transfers.taken_in(incoming, 0.0, is_filled=True)
