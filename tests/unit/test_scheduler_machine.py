"""Whatever happens to a scheduler, in whatever order: each request is answered as if it had been alone.

A dictionary holds what each hash stands for, another what each request must still say. See `builders.FakeModel` for how
wrong or stale KV is found.
"""

import random
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.hashing import BlockChain, hash_block, state_hash
from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.tenants import Tenant, num_public_tokens
from raydix.engine.core.types import (
    Assignment,
    BlockHash,
    CacheHints,
    DraftSource,
    FinishReason,
    Handover,
    Pooling,
    PromptEvent,
    Salt,
    Stage,
    TokenEvent,
    TokenLogprobs,
)
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.drafts.draft import Draft
from raydix.engine.core.worker.idle import MAX_REQUESTS, SHARE
from raydix.engine.core.worker.scheduler import Scheduler
from raydix.engine.core.worker.states import States
from raydix.engine.core.worker.step import (
    CopyBlock,
    ExportedBlocks,
    RunnerOutput,
    SchedulerOutput,
    StepOutcome,
    SwapIn,
    SwapOut,
)
from raydix.engine.core.worker.swaps import SwapPolicy
from tests.unit.builders import (
    ROOT,
    VOCAB,
    FakeModel,
    chain_of,
    expected_answer,
    import_blocks,
    keys_of,
    make_assignment,
    pooled_of,
    scores_of,
)

AWAIT_TIMEOUT_S = 10.0
TOKENS = st.integers(0, VOCAB - 1)
TENANTS = (Tenant("a"), Tenant("b", weight=2.0))


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
    def scores(self) -> list[TokenLogprobs]:
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
        self.num_idle = 0
        self.told: set[BlockHash] = set()
        """What the pool of a model with recurrent layers has told of."""
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
        keeps_blocks=st.sampled_from([True, True, False]),
        draft_seed=st.sampled_from([None, 1, 2, 3]),
        draft_token_s=st.sampled_from([0.0, 2e-4, 1e-3]),
        num_states=st.sampled_from([None, None, 2, 3, 6, 20]),
    )
    def build(
        self,
        block_size: int,
        num_blocks: int,
        spare: int,
        token_budget: int,
        max_requests: int,
        public_prefix: tuple[int, ...],
        swap_blocks: int,
        swap_s: float,
        keeps_blocks: bool,
        draft_seed: int | None,
        draft_token_s: float,
        num_states: int | None,
    ) -> None:
        """`num_states`: of a model with recurrent layers."""
        self.chance = None if draft_seed is None else random.Random(draft_seed)
        self.public_prefix: tuple[int, ...] = public_prefix
        states = None if num_states is None else States(num_states)
        self.pool = BlockPool(num_blocks, block_size, keeps_blocks=keeps_blocks, states=states)
        self.model = FakeModel(self.pool)
        self.limits = SchedulerLimits(token_budget, max_requests)
        self.max_model_len = max(2, num_blocks * block_size - spare)
        swap_policy = SwapPolicy(swap_blocks, costs=WorkerCosts(swap_s=swap_s, draft_token_s=draft_token_s))
        self.scheduler = Scheduler(self.pool, self.limits, self.max_model_len, swap_policy, tenants=TENANTS)

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
        pooling=st.sampled_from([None, *Pooling]),
        priority=st.sampled_from([0, 0, -1, 2]),
        tenant=st.sampled_from(["", "", "a", "b"]),
    )
    def submit(
        self,
        data: st.DataObject,
        stage: Stage,
        more: list[int],
        max_tokens: int,
        stop: list[int],
        min_tokens: int,
        private: bytes,
        is_public: bool,
        prompt_logprobs: int | None,
        pooling: Pooling | None,
        priority: int,
        tenant: str,
    ) -> None:
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
                prompt_logprobs=prompt_logprobs if max_tokens or pooling is None else None,
                pooling=None if max_tokens else pooling,
                priority=priority,
                cache=CacheHints(tenant=tenant),
            )
        )

    @rule(
        prompts=st.lists(st.lists(TOKENS, min_size=1, max_size=6), min_size=2, max_size=5),
        steps=st.integers(1, 9),
        tenants=st.sampled_from([("",), ("a", "b"), ("a", "a", "a", "b")]),
    )
    def crowd(self, prompts: list[list[int]], steps: int, tenants: tuple[str, ...]) -> None:
        """More than the pool holds once they have grown: somebody is preempted."""
        for number, prompt in enumerate(prompts):
            max_tokens = self.max_model_len // len(prompts) + 4
            request_id = f"r{len(self.expected)}"
            cache = CacheHints(tenant=tenants[number % len(tenants)])
            self._submit(
                make_assignment(request_id, prompt[: self.max_model_len - 1], max_tokens=max_tokens, cache=cache)
            )
        for _ in range(steps if self.under_way is None else 0):
            self._begin()
            self._end()

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), stage=st.sampled_from(Stage), awaits=st.booleans(), is_overtaken=st.booleans())
    def submit_again(self, data: st.DataObject, stage: Stage, awaits: bool, is_overtaken: bool) -> None:
        """A higher attempt, with some of what was generated already; its handover may come before it."""
        known = self._draw(data, self.expected)
        num_generated = data.draw(st.integers(0, max(0, min(known.position, len(known.answer) - 1))))
        generated = known.answer[:num_generated]
        old = known.assignment
        hashes = known.chain.hashes([*known.prompt, *generated])
        is_overtaken &= stage is Stage.DECODE and num_generated + 1 < len(known.answer)
        if is_overtaken:
            handover = Handover(old.request_id, old.attempt + 1, known.answer[num_generated], None)
            self.scheduler.imports.handed_over(handover, self.now)
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
                pooling=old.sampling.pooling,
                num_scored=known.num_scored,
                priority=old.priority,
                cache=old.cache,
            )
        )
        if is_overtaken:
            again = self.expected[old.request_id]
            again.position += 1
            again.num_scored = len(again.scores)

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), more=st.lists(TOKENS, max_size=6), is_dropped=st.booleans())
    def submit_idle(self, data: st.DataObject, more: list[int], is_dropped: bool) -> None:
        """Somebody's sequence, or a beginning of it with another end, that nobody waits for."""
        known = self._draw(data, self.expected)
        sequence = known.sequence[: data.draw(st.integers(0, len(known.sequence)))]
        tokens = [*sequence, *more][: self.max_model_len] or [0]
        self.num_idle += 1
        salt = Salt(known.assignment.salt.private, num_public_tokens(tuple(tokens), [self.public_prefix]))
        assignment = make_assignment(f"idle{self.num_idle}", tokens, max_tokens=0, salt=salt, is_idle=True)
        self._learn_blocks(chain_of(salt, self.pool.block_size), tokens)
        self.scheduler.submit(assignment, ROOT, self.now)
        if is_dropped:
            self.scheduler.abort(assignment.request_id, self.now)

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def submit_twice(self, data: st.DataObject) -> None:
        """The same attempt once more changes nothing."""
        known = self._draw(data, self._live())
        before = self.scheduler.requests.get(known.assignment.request_id)
        self.scheduler.submit(known.assignment, ROOT, self.now)
        assert self.scheduler.requests.get(known.assignment.request_id) is before

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        known = self._draw(data, self.expected)
        has_ended = data.draw(st.booleans())
        assert self.scheduler.abort(known.assignment.request_id, self.now, has_ended=has_ended) == known.is_live
        known.is_live = False

    # Imports

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), is_intact=st.booleans(), has_state=st.booleans())
    def blocks_arrive(self, data: st.DataObject, is_intact: bool, has_state: bool) -> None:
        """Or do not: a segment of any blocks of any request, live or not, in whatever order with others, perhaps with
        the recurrent state behind one of them."""
        known = self._draw(data, self.expected)
        hashes = known.chain.hashes(known.sequence)
        first = data.draw(st.integers(0, len(hashes)))
        path = hashes[: data.draw(st.integers(0, len(hashes)))] if has_state else []
        self._import(hashes[first : data.draw(st.integers(first, len(hashes)))], is_intact, path)

    @precondition(lambda self: self._live(Stage.DECODE))
    @rule(data=st.data(), num_late=st.sampled_from([0, 1, 20]), is_intact=st.booleans(), has_state=st.booleans())
    def hand_over(self, data: st.DataObject, num_late: int, is_intact: bool, has_state: bool) -> None:
        """The prefill worker's last blocks, the partial one included, the recurrent state behind them, if it had room
        for one, and its last word; perhaps again and again."""
        known = self._draw(data, self._live(Stage.DECODE))
        if known.num_sent >= len(known.answer) - 1:
            return  # the answer ends with the prefill worker's token, or there is none
        assignment = known.assignment
        hashes = known.chain.hashes(assignment.token_ids)
        if len(assignment.token_ids) % self.pool.block_size:
            hashes.append(self._tail_hash(known))
        tail = hashes[-1] if len(assignment.token_ids) % self.pool.block_size else None
        sent = Handover(assignment.request_id, assignment.attempt, known.answer[known.num_sent], tail)
        self._import(hashes[max(0, len(hashes) - num_late - 1) :], is_intact, hashes if has_state else [], sent)
        request = self.scheduler.requests.get(assignment.request_id)
        assert request is not None
        accepts = request.awaits_handover
        assert not accepts or request in self.scheduler.waiting, "a request that started may have sampled the token"
        token_id = known.answer[known.num_sent]
        self.scheduler.imports.handed_over(
            Handover(assignment.request_id, assignment.attempt - 1, token_id, None), self.now
        )
        assert request.awaits_handover == accepts, "an older attempt's handover was taken"
        self.scheduler.imports.handed_over(
            Handover(assignment.request_id, assignment.attempt, token_id, None), self.now
        )
        known.position += accepts
        if accepts:  # the prefill worker has scored the prompt before it sampled
            known.num_scored = len(known.scores)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def keep_awaiting(self, data: st.DataObject) -> None:
        self.scheduler.imports.keep_awaiting([self._draw(data, self.expected).assignment.request_id], self.now)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def stop_awaiting(self, data: st.DataObject) -> None:
        some = data.draw(st.sampled_from([None, *self.expected]))
        if some is None:
            self.scheduler.imports.stop_awaiting_all()
        else:
            self.scheduler.imports.stop_awaiting([some])

    # Exports and the pool

    @precondition(lambda self: self.exports)
    @rule(data=st.data())
    def release_export(self, data: st.DataObject) -> None:
        self._release(data.draw(st.sampled_from(self.exports)))

    @precondition(lambda self: self.pool.num_cached)
    @rule()
    def reset_pool(self) -> None:
        self.scheduler.reset()
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
        for _ in range(MAX_REQUESTS * self.pool.num_blocks):
            self._begin()
            self._end()
        assert len(self.scheduler.requests) == 0
        assert self.pool.keeps_blocks or self.pool.drain_journal() == ([], [])
        assert self.pool.num_available == self.pool.num_blocks

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.drain()

    @invariant()
    def check(self) -> None:
        self.scheduler.check_integrity(block for export in self.exports for block in export.blocks)
        idle = {request.request_id for request in self.scheduler.idle}
        assert {request.request_id for request in self.scheduler.requests.values()} - idle == self._live().keys()
        if self.under_way is None:
            assert not any(request.blocks for request in self.scheduler.idle), "idle work holds blocks between steps"
            running = self.scheduler.running.values()
            assert all(len(request.blocks) <= request.num_needed_blocks for request in running), "a draft's blocks stay"
        assert len(self.scheduler.running) <= self.limits.max_requests
        states = set() if self.pool.states is None else set(self.pool.states.hashes())
        for block_hash in set(self.pool.hashes()) - states:
            block = self.pool.lookup(block_hash)
            content = self.contents[block_hash]
            assert self.model.cells[block][: len(content)].tolist() == content, "a block is not what its hash says"
        self._check_states()

    # Inside

    def _check_states(self) -> None:
        """Each snapshot is the state behind the block that names it, and the pool tells what is there."""
        states = self.pool.states
        if states is None:
            return
        by_state = {state_hash(block_hash): block_hash for block_hash in self.contents}
        for state in states.hashes():
            block_hash = by_state[state]
            assert states.has_ahead or self.pool.lookup(block_hash) is not None, "a snapshot without its KV"
            _, slot = states.longest([block_hash])
            assert slot is not None and self.model.states[slot] == self.contents[block_hash][-1]
        came, gone = self.pool.drain_journal()
        self.told = (self.told | set(came)) - {name for name, _ in gone}
        kept = set(self.pool.hashes()) if self.pool.keeps_blocks else set()
        assert self.told == kept, "the journal tells something else than what is there"

    def _live(self, stage: Stage | None = None) -> dict[str, Expected]:
        return {
            request_id: known
            for request_id, known in self.expected.items()
            if known.is_live and stage in (None, known.assignment.stage)
        }

    def _draw(self, data: st.DataObject, among: dict[str, Expected]) -> Expected:
        return among[data.draw(st.sampled_from(list(among)))]

    def _import(
        self,
        hashes: list[BlockHash],
        is_intact: bool,
        path: list[BlockHash],
        handover: Handover | None = None,
    ) -> None:
        """What the engine does with a segment; `path`: to the block behind which it has a recurrent state, if any."""
        path = path if self.pool.states is not None else []
        if is_intact:
            contents = [self.contents[block_hash] for block_hash in hashes]
            states = {tuple(path): self.contents[path[-1]][-1]} if path else {}
            import_blocks(self.scheduler, self.model, hashes, contents, handover, states)
        tail = None if handover is None else handover.tail
        names = [*hashes, *map(state_hash, path[-1:])]
        self.scheduler.imports.settled([name for name in names if name != tail], self.now)

    def _submit(self, assignment: Assignment) -> None:
        chain = chain_of(assignment.salt, self.pool.block_size)
        prompt = assignment.token_ids[: assignment.num_prompt_tokens]
        answer, finish = expected_answer(chain, prompt, assignment.sampling, self.max_model_len)
        num_generated = len(assignment.token_ids) - len(prompt)
        known = Expected(assignment, chain, answer, finish, num_generated, assignment.num_scored)
        self.expected[assignment.request_id] = known
        self._learn_contents(known)
        self.scheduler.submit(assignment, ROOT, self.now)

    def _learn_blocks(self, chain: BlockChain, sequence: list[int]) -> list[int]:
        block_size, keys = self.pool.block_size, keys_of(chain, sequence)
        for index, block_hash in enumerate(chain.hashes(sequence)):
            self.contents[block_hash] = keys[index * block_size : (index + 1) * block_size]
        return keys

    def _learn_contents(self, known: Expected) -> None:
        block_size, keys = self.pool.block_size, self._learn_blocks(known.chain, known.sequence)
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
        output = self.scheduler.schedule(self.now, self._drafts())
        assert output.chunks or not self.scheduler.running, "requests run, but nothing is computed"
        assert not output.preempted or self.scheduler.running.keys() <= running, "a step that preempts starts nothing"
        resumed = set(self.scheduler.running) - running
        urgency = {request.request_id: request.assignment.priority for request in self.scheduler.requests.values()}
        tenant = {request.request_id: request.tenant for request in self.scheduler.requests.values()}
        pairs = [(one, other) for one in before - resumed for other in resumed - before]
        overtaken = [one for one, other in pairs if tenant[one] == tenant[other] and urgency[one] <= urgency[other]]
        assert not overtaken or output.preempted, "a swapped request is overtaken"
        for move in output.moves:
            if isinstance(move, failing) and not isinstance(move, CopyBlock):
                self.model.swapped.pop(move.request_id, None)
                output = self.scheduler.swap_failed(move.request_id, output, self.now)
            else:
                self.model.move(move)
        swapped = {request.request_id for request in self.scheduler.preempted if request.swapped is not None}
        assert self.model.swapped.keys() == swapped, "something else is kept outside than what is counted"
        scheduled = [chunk.request.request_id for chunk in output.chunks]
        assert output.num_tokens <= self.limits.token_budget
        assert all(chunk.num_tokens > 0 for chunk in output.chunks)
        idle = [request_id for request_id in scheduled if request_id.startswith("idle")]
        if idle:
            [*others, last] = output.chunks
            assert [last.request.request_id] == idle, "one idle request goes on, behind all others"
            ends = [chunk.start + chunk.num_tokens - len(chunk.draft) for chunk in others]
            assert ends == [len(chunk.request.token_ids) for chunk in others]
            assert all(chunk.num_tokens == 1 + len(chunk.draft) for chunk in others), "nobody prefills meanwhile"
            assert last.num_tokens <= max(self.pool.block_size, self.limits.token_budget // SHARE)
            assert not self.scheduler.preempted and not output.preempted
            scheduled.remove(last.request.request_id)
        assert len(set(scheduled)) == len(scheduled) and set(scheduled) <= self.scheduler.running.keys()
        decoding &= self.scheduler.running.keys()
        if self.limits.max_requests <= self.limits.token_budget:
            assert set(scheduled[: len(decoding)]) == decoding, "decodes do not come first"
        self.under_way = output, self.model.run(output)
        return output

    def _drafts(self) -> list[Draft]:
        """Drafts for any requests, whether they decode or not: right, wrong from some token on, or of any tokens."""
        chance, drafts = self.chance, list[Draft]()
        for request_id, known in self._live().items() if chance is not None else ():
            assert chance is not None
            depth = chance.randint(1, 9)
            tokens = known.answer[known.position :][:depth] if chance.random() < 0.5 else []
            if chance.random() < 0.5:
                tokens += [chance.randrange(VOCAB) for _ in range(depth)]
            falling = sorted((chance.random() for _ in tokens), reverse=True)
            drafts.append(Draft(request_id, chance.choice(list(DraftSource)), tuple(tokens), tuple(falling)))
        return drafts

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
        assert event.pooled == pooled_of(known.assignment, known.chain)
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
                if self.pool.states is not None:
                    full = known.chain.hashes(known.assignment.token_ids)
                    assert export.states[-1][0].path == tuple([*full, self._tail_hash(known)] if tail else full)
            for state, slot in export.states:
                assert state.name == state_hash(state.path[-1])
                assert self.model.states[slot] == self.contents[state.path[-1]][-1]
            # Before the next step, or requests that run would lack the slots.
            if export.states:
                self._release(export)
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
        self.scheduler.transfers.release(export, self.now)


TestScheduler = pytest.mark.no_cover(SchedulerMachine.TestCase)
TestScheduler.settings = settings(max_examples=200, stateful_step_count=40)
