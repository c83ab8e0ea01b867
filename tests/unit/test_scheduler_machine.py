"""Whatever happens to a scheduler, in whatever order: each request is answered as if it had been alone.

A dictionary holds what each hash stands for, another what each request must still say. See `builders.FakeModel` for how
wrong or stale KV is found.
"""

from dataclasses import dataclass

from builders import (
    ROOT,
    VOCAB,
    FakeModel,
    chain_of,
    expected_answer,
    import_blocks,
    keys_of,
    make_assignment,
    scores_of,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.block_pool import BlockPool
from engine.core.costs import WorkerCosts
from engine.core.hashing import BlockChain, hash_block
from engine.core.moves import SwapIn, SwapOut
from engine.core.scheduler import (
    ExportedBlocks,
    RunnerOutput,
    Scheduler,
    SchedulerLimits,
    SchedulerOutput,
    StepOutcome,
)
from engine.core.swapping import SwapPolicy
from engine.core.tenants import num_public_tokens
from engine.core.types import (
    Assignment,
    BlockHash,
    FinishReason,
    Handover,
    PromptEvent,
    Salt,
    Stage,
    TokenEvent,
)

AWAIT_TIMEOUT_S = 10.0
TOKENS = st.integers(0, VOCAB - 1)


@dataclass
class Expected:
    """What one request must say. `position` is that of its next token, `num_scored` counts the scores it has given."""

    assignment: Assignment
    chain: BlockChain
    answer: list[int]
    finish: FinishReason
    position: int
    num_scored: int
    is_live: bool = True

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.assignment.token_ids[: self.assignment.num_prompt_tokens]

    @property
    def sequence(self) -> list[int]:
        return [*self.prompt, *self.answer]

    @property
    def scores(self) -> list:
        wanted = self.assignment.sampling.prompt_logprobs is not None
        return scores_of(self.chain, self.prompt) if wanted else []

    @property
    def num_sent(self) -> int:
        """Generated tokens that the assignment came with."""
        return len(self.assignment.token_ids) - self.assignment.num_prompt_tokens


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler, its pool, a fake model, and everything that may happen to them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.expected: dict[str, Expected] = {}
        self.contents: dict[BlockHash, list[int]] = {}
        self.exports: list[ExportedBlocks] = []
        self.under_way: tuple[SchedulerOutput, RunnerOutput] | None = None

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(3, 12),
        spare=st.integers(0, 3),
        token_budget=st.integers(1, 12),
        max_requests=st.integers(1, 5),
        public_prefix=st.lists(TOKENS, max_size=9).map(tuple),
        swap_blocks=st.sampled_from([0, 3, 100]),
        swap_s=st.sampled_from([0.0, WorkerCosts().prefill_s(4, 0, 100, 0) / 2]),
    )
    def build(
        self, block_size, num_blocks, spare, token_budget, max_requests, public_prefix, swap_blocks, swap_s
    ) -> None:
        self.public_prefix: tuple[int, ...] = public_prefix
        self.pool = BlockPool(num_blocks, block_size)
        self.model = FakeModel(self.pool)
        self.limits = SchedulerLimits(token_budget, max_requests)
        self.max_model_len = max(2, num_blocks * block_size - spare)
        swapping = SwapPolicy(swap_blocks, costs=WorkerCosts(swap_s=swap_s))
        self.scheduler = Scheduler(self.pool, self.limits, self.max_model_len, swapping)

    # Requests come and go

    @rule(
        data=st.data(),
        stage=st.sampled_from(Stage),
        more=st.lists(TOKENS, max_size=6),
        max_tokens=st.integers(0, 12),
        stop=st.lists(TOKENS, max_size=1),
        min_tokens=st.integers(0, 3),
        private=st.sampled_from([b"", b"", b"tenant"]),
        is_public=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 0, 1]),
    )
    def submit(self, data, stage, more, max_tokens, stop, min_tokens, private, is_public, prompt_logprobs) -> None:
        prefix = [*self.public_prefix] if is_public else []
        if self.expected and not is_public:
            prefix = self._draw(data, self.expected).sequence
            prefix = prefix[: data.draw(st.integers(0, len(prefix)))]
        prompt = [*prefix, *more][: self.max_model_len - 1] or [0]
        request_id = f"r{len(self.expected)}"
        salt = Salt(private, num_public_tokens(tuple(prompt), [self.public_prefix]))
        hashes = chain_of(salt, self.pool.block_size).hashes(prompt)
        awaited = data.draw(st.sets(st.sampled_from(hashes))) if hashes else set()
        self._submit(
            make_assignment(
                request_id,
                prompt,
                stage=stage,
                max_tokens=max_tokens,
                stop=stop,
                min_tokens=min_tokens,
                salt=salt,
                awaited=sorted(awaited),
                await_timeout_s=AWAIT_TIMEOUT_S,
                prompt_logprobs=prompt_logprobs,
            )
        )

    @rule(prompts=st.lists(st.lists(TOKENS, min_size=1, max_size=6), min_size=2, max_size=5), steps=st.integers(1, 9))
    def crowd(self, prompts, steps) -> None:
        """More than the pool holds once they have grown: somebody is preempted."""
        for prompt in prompts:
            max_tokens = self.max_model_len // len(prompts) + 4
            request_id = f"r{len(self.expected)}"
            self._submit(make_assignment(request_id, prompt[: self.max_model_len - 1], max_tokens=max_tokens))
        for _ in range(steps if self.under_way is None else 0):
            self._begin()
            self._end()

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), stage=st.sampled_from(Stage), awaits=st.booleans(), is_overtaken=st.booleans())
    def submit_again(self, data, stage, awaits, is_overtaken) -> None:
        """A higher attempt, with some of what was generated already; its handover may come before it."""
        known = self._draw(data, self.expected)
        num_generated = data.draw(st.integers(0, max(0, min(known.position, len(known.answer) - 1))))
        generated = known.answer[:num_generated]
        old = known.assignment
        hashes = known.chain.hashes([*known.prompt, *generated])
        is_overtaken &= stage is Stage.DECODE and num_generated + 1 < len(known.answer)
        if is_overtaken:
            handover = Handover(old.request_id, old.attempt + 1, known.answer[num_generated], None)
            self.scheduler.handed_over(handover, self.now)
        self._submit(
            make_assignment(
                old.request_id,
                known.prompt,
                generated=generated,
                stage=stage,
                attempt=old.attempt + 1,
                max_tokens=old.sampling.max_tokens,
                stop=old.sampling.stop_token_ids,
                min_tokens=old.sampling.min_tokens,
                salt=old.salt,
                awaited=hashes if awaits else (),
                await_timeout_s=AWAIT_TIMEOUT_S,
                prompt_logprobs=old.sampling.prompt_logprobs,
                num_scored=known.num_scored,
            )
        )
        if is_overtaken:
            again = self.expected[old.request_id]
            again.position += 1
            again.num_scored = len(again.scores)

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def submit_twice(self, data) -> None:
        """The same attempt once more changes nothing."""
        known = self._draw(data, self._live())
        before = self.scheduler.get(known.assignment.request_id)
        self.scheduler.submit(known.assignment, ROOT, self.now)
        assert self.scheduler.get(known.assignment.request_id) is before

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data) -> None:
        known = self._draw(data, self.expected)
        has_ended = data.draw(st.booleans())
        assert self.scheduler.abort(known.assignment.request_id, has_ended=has_ended) == known.is_live
        known.is_live = False

    # Imports

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), is_intact=st.booleans())
    def blocks_arrive(self, data, is_intact) -> None:
        """Or do not: a segment of any blocks of any request, live or not, in whatever order with others."""
        known = self._draw(data, self.expected)
        hashes = known.chain.hashes(known.sequence)
        first = data.draw(st.integers(0, len(hashes)))
        self._import(hashes[first : data.draw(st.integers(first, len(hashes)))], is_intact)

    @precondition(lambda self: self._live(Stage.DECODE))
    @rule(data=st.data(), num_late=st.sampled_from([0, 1, 20]), is_intact=st.booleans())
    def hand_over(self, data, num_late, is_intact) -> None:
        """The prefill worker's last blocks, the partial one included, and its last word; perhaps again and again."""
        known = self._draw(data, self._live(Stage.DECODE))
        if known.num_sent >= len(known.answer) - 1:
            return  # the answer ends with the prefill worker's token, or there is none
        assignment = known.assignment
        hashes = known.chain.hashes(assignment.token_ids)
        if len(assignment.token_ids) % self.pool.block_size:
            hashes.append(self._tail_hash(known))
        self._import(hashes[max(0, len(hashes) - num_late - 1) :], is_intact)
        request = self.scheduler.get(assignment.request_id)
        assert request is not None
        accepts = request.awaits_handover
        assert not accepts or request in self.scheduler.waiting, "a request that started may have sampled the token"
        token_id = known.answer[known.num_sent]
        self.scheduler.handed_over(Handover(assignment.request_id, assignment.attempt - 1, token_id, None), self.now)
        assert request.awaits_handover == accepts, "an older attempt's handover was taken"
        self.scheduler.handed_over(Handover(assignment.request_id, assignment.attempt, token_id, None), self.now)
        known.position += accepts
        if accepts:  # the prefill worker has scored the prompt before it sampled
            known.num_scored = len(known.scores)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def keep_awaiting(self, data) -> None:
        self.scheduler.keep_awaiting([self._draw(data, self.expected).assignment.request_id], self.now)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def stop_awaiting(self, data) -> None:
        some = data.draw(st.sampled_from([None, *self.expected]))
        if some is None:
            self.scheduler.stop_awaiting_all()
        else:
            self.scheduler.stop_awaiting([some])

    # Exports and the pool

    @precondition(lambda self: self.exports)
    @rule(data=st.data())
    def release_export(self, data) -> None:
        self._release(data.draw(st.sampled_from(self.exports)))

    @precondition(lambda self: self.pool.num_cached)
    @rule()
    def reset_pool(self) -> None:
        self.pool.reset()
        assert self.pool.num_cached == 0

    # Steps

    @precondition(lambda self: self.under_way is None)
    @rule(seconds=st.sampled_from([0.0, 0.1, 4.0, AWAIT_TIMEOUT_S]), count=st.integers(1, 4))
    def step(self, seconds: float, count: int) -> None:
        self.now += seconds
        for _ in range(count):
            self._begin()
            self._end()

    @precondition(lambda self: self.under_way is None)
    @rule(failing=st.sampled_from([(), (), (SwapOut,), (SwapIn,), (SwapOut, SwapIn)]))
    def begin_step(self, failing: tuple[type, ...]) -> None:
        """Whatever is kept outside the pool may not be taken there, or not come back."""
        self._begin(failing)

    @precondition(lambda self: self.under_way is not None)
    @rule()
    def end_step(self) -> None:
        self._end()

    def drain(self) -> None:
        """With nothing new coming, every request ends within a bounded number of steps."""
        if self.under_way is not None:
            self._end()
        live = self._live()
        for _ in range(sum(len(known.sequence) for known in live.values()) * (len(live) + 1)):
            for export in list(self.exports):
                self._release(export)
            if not self._live():
                break
            self.now += AWAIT_TIMEOUT_S
            output = self._begin()
            assert output.chunks, "requests are here, but nothing can be computed"
            self._end()
            self.check()
        assert not self._live(), "requests do not end"
        for export in list(self.exports):
            self._release(export)
        assert self.scheduler.num_requests == 0
        assert self.pool.num_available == self.pool.num_blocks

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.drain()

    @invariant()
    def check(self) -> None:
        self.scheduler.check_integrity(block for export in self.exports for block in export.blocks)
        assert {request.request_id for request in self.scheduler.requests()} == self._live().keys()
        assert len(self.scheduler.running) <= self.limits.max_requests
        for block_hash in self.pool.hashes():
            block = self.pool.lookup(block_hash)
            content = self.contents[block_hash]
            assert self.model.cells[block][: len(content)].tolist() == content, "a block is not what its hash says"

    # Inside

    def _live(self, stage: Stage | None = None) -> dict[str, Expected]:
        return {
            request_id: known
            for request_id, known in self.expected.items()
            if known.is_live and stage in (None, known.assignment.stage)
        }

    def _draw(self, data: st.DataObject, among: dict[str, Expected]) -> Expected:
        return among[data.draw(st.sampled_from(list(among)))]

    def _import(self, hashes: list[BlockHash], is_intact: bool) -> None:
        """What the engine does with a segment."""
        if is_intact:
            import_blocks(self.scheduler, self.model, hashes, [self.contents[block_hash] for block_hash in hashes])
        self.scheduler.blocks_settled(hashes, self.now)

    def _submit(self, assignment: Assignment) -> None:
        chain = chain_of(assignment.salt, self.pool.block_size)
        prompt = assignment.token_ids[: assignment.num_prompt_tokens]
        answer, finish = expected_answer(chain, prompt, assignment.sampling, self.max_model_len)
        num_generated = len(assignment.token_ids) - len(prompt)
        known = Expected(assignment, chain, answer, finish, num_generated, assignment.num_scored)
        self.expected[assignment.request_id] = known
        self._learn_contents(known)
        self.scheduler.submit(assignment, ROOT, self.now)

    def _learn_contents(self, known: Expected) -> None:
        block_size, keys = self.pool.block_size, keys_of(known.chain, known.sequence)
        for index, block_hash in enumerate(known.chain.hashes(known.sequence)):
            self.contents[block_hash] = keys[index * block_size : (index + 1) * block_size]
        num_sent = len(known.assignment.token_ids)
        if num_sent % block_size:
            self.contents[self._tail_hash(known)] = keys[num_sent // block_size * block_size : num_sent]

    def _tail_hash(self, known: Expected) -> BlockHash:
        sent, block_size = known.assignment.token_ids, self.pool.block_size
        full = known.chain.hashes(sent)
        return hash_block(known.chain.parent(full, len(full)), sent[len(full) * block_size :])

    def _begin(self, failing: tuple[type, ...] = ()) -> SchedulerOutput:
        decoding = {request.request_id for request in self.scheduler.running.values() if request.num_remaining == 1}
        before = {request.request_id for request in self.scheduler.preempted if request.swapped is not None}
        running = set(self.scheduler.running)
        output = self.scheduler.schedule(self.now)
        resumed = set(self.scheduler.running) - running
        assert resumed <= before or before <= resumed or output.preempted, "a swapped request is overtaken"
        for move in output.moves:
            if isinstance(move, failing):
                self.model.swapped.pop(move.request_id, None)
                output = self.scheduler.swap_failed(move.request_id, output)
            else:
                self.model.move(move)
        swapped = {request.request_id for request in self.scheduler.preempted if request.swapped is not None}
        assert self.model.swapped.keys() == swapped, "something else is kept outside than what is counted"
        scheduled = [chunk.request.request_id for chunk in output.chunks]
        assert output.num_tokens <= self.limits.token_budget
        assert all(chunk.num_tokens > 0 for chunk in output.chunks)
        assert len(set(scheduled)) == len(scheduled) and set(scheduled) <= self.scheduler.running.keys()
        decoding &= self.scheduler.running.keys()
        if self.limits.max_requests <= self.limits.token_budget:
            assert set(scheduled[: len(decoding)]) == decoding, "decodes do not come first"
        self.under_way = output, self.model.run(output)
        return output

    def _end(self) -> None:
        assert self.under_way is not None
        (output, computed), self.under_way = self.under_way, None
        outcome = self.scheduler.update(output, computed, self.now)
        for scores in outcome.scores:
            self._take_scores(scores)
        ended = {event.request_id for event in outcome.events if self._take(event)}
        assert ended == {request.request_id for request in outcome.finished}
        self._check_exports(outcome)

    def _take_scores(self, event: PromptEvent) -> None:
        """Each prompt token is scored once, in order."""
        known = self.expected[event.request_id]
        assert known.is_live and event.attempt == known.assignment.attempt
        assert event.logprobs, "an event that says nothing"
        assert event.position == known.num_scored + 1
        known.num_scored += len(event.logprobs)
        assert list(event.logprobs) == known.scores[event.position - 1 : known.num_scored]

    def _take(self, event: TokenEvent) -> bool:
        """Compare one event with what was expected; whether the request has ended with it."""
        known = self.expected[event.request_id]
        assert known.is_live, "an event of a request that has ended"
        assert event.attempt == known.assignment.attempt
        assert event.position == known.position
        assert event.token_id == (known.answer[known.position] if known.answer else None)
        assert known.num_scored == len(known.scores), "a token before the prompt's scores"
        is_last = known.position >= len(known.answer) - 1
        assert event.finish == (known.finish if is_last else None)
        assert 0 <= event.cached_tokens <= known.assignment.num_prompt_tokens
        known.position += 1
        known.is_live = not is_last and known.assignment.stage is not Stage.PREFILL
        return not known.is_live

    def _check_exports(self, outcome: StepOutcome) -> None:
        for export in outcome.exports:
            self.exports.append(export)
            known = self.expected[export.request_id]
            assert known.assignment.stage is Stage.PREFILL
            if export.handover is not None:
                assert export.handover.token_id == known.answer[known.num_sent]
                tail = len(known.assignment.token_ids) % self.pool.block_size
                assert export.handover.tail == (self._tail_hash(known) if tail else None)
        handed_over = {export.request_id for export in outcome.exports if export.handover is not None}
        assert handed_over == {
            event.request_id
            for event in outcome.events
            if event.finish is None and self.expected[event.request_id].assignment.stage is Stage.PREFILL
        }

    def _release(self, export: ExportedBlocks) -> None:
        """The exporter copies the blocks only now: they must still be what they were."""
        self.exports.remove(export)
        for block_hash, block in zip(export.hashes, export.blocks, strict=True):
            content = self.contents[block_hash]
            assert self.model.cells[block][: len(content)].tolist() == content
        self.pool.release(export.blocks)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=200, stateful_step_count=40)
