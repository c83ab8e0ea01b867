"""Snapshots of recurrent states: where they are taken, who goes on from them, and when they go.

`FakeModel` finds every state that is not the one of its request's own tokens; `test_scheduler_machine` drives the same
through random events.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.hashing import state_hash
from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.types import CacheHints, CacheMark, DraftSource, EvictionReason, Pooling, Salt
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.drafts.draft import Draft
from raydix.engine.core.worker.scheduler import Scheduler
from raydix.engine.core.worker.states import States
from raydix.engine.core.worker.step import SwapIn
from raydix.engine.core.worker.swaps import SwapPolicy
from tests.unit.builders import (
    FakeModel,
    answer_to,
    chain_of,
    hashes_of,
    make_assignment,
    run_all,
    step,
    submit,
    tokens_of,
)

PROMPT = tuple(token % 4 for token in range(7, 29))
"""22 tokens: five full blocks, and two tokens."""


class Worker:
    """A scheduler with states over a fake model."""

    def __init__(
        self,
        num_states: int = 12,
        num_blocks: int = 60,
        budget: int = 100,
        max_requests: int = 8,
        swap_blocks: int = 0,
    ) -> None:
        self.states = States(num_states)
        self.pool = BlockPool(num_blocks, 4, states=self.states)
        self.model = FakeModel(self.pool)
        costs = WorkerCosts(draft_token_s=0.0, swap_s=0.0, swap_byte_s=0.0)
        limits = SchedulerLimits(budget, max_requests)
        policy = SwapPolicy(swap_blocks, self.model.block_bytes, self.model.state_bytes, costs)
        self.scheduler = Scheduler(self.pool, limits, num_blocks * 4, policy)

    def ask(self, name: str, prompt: Sequence[int], **options: object) -> int:
        """Answer one prompt; returns the tokens of the prompt that were not computed."""
        assignment = make_assignment(name, prompt, **options)  # type: ignore[arg-type]
        submit(self.scheduler, assignment)
        events = run_all(self.scheduler, self.model)[name]
        self.scheduler.check_integrity()
        expected: list[int | None] = [*answer_to(assignment)]
        assert tokens_of(events) == (expected or [None])
        return events[-1].cached_tokens

    def snapshots_of(self, tokens: Sequence[int]) -> list[int]:
        """Numbers of blocks of a sequence behind which there is a snapshot."""
        return [number for number, name in enumerate(hashes_of(tokens), 1) if self.states.has(name)]


def test_the_same_prompt_goes_on_from_its_last_full_block() -> None:
    worker = Worker()
    assert worker.ask("cold", PROMPT) == 0
    assert worker.ask("warm", PROMPT) == 20


def test_a_prompt_of_whole_blocks_goes_on_before_its_last_one() -> None:
    """The last token is computed for its output, and its state lies before it."""
    worker = Worker()
    worker.ask("cold", PROMPT[:20])
    assert worker.ask("warm", PROMPT[:20]) == 16


def test_the_next_turn_goes_on_behind_the_answer() -> None:
    worker = Worker()
    worker.ask("first", PROMPT, max_tokens=12)
    said = [*PROMPT, *answer_to(make_assignment("first", PROMPT, max_tokens=12))]
    assert worker.snapshots_of(said) == [5, 8], "the end of the prompt, and of what was computed of the answer"
    assert worker.ask("second", [*said, 3, 2, 1]) == 32


@pytest.mark.parametrize("suffix", [3, 4, 16, 41])
def test_whoever_parts_from_a_known_prompt_makes_the_next_one_a_hit(suffix: int) -> None:
    """However long what differs is. The blocks that are there already are read and not written again."""
    worker = Worker(num_blocks=200)
    others = [(*PROMPT[:13], *(number % 4 for number in range(first, first + suffix))) for first in (0, 2, 3)]
    others = [other for other in others if other[13] != PROMPT[13]]
    assert worker.ask("known", PROMPT) == 0
    assert worker.ask("parts", others[0]) == 0
    assert worker.snapshots_of(PROMPT) == [3, 5]
    assert worker.ask("hits", others[1]) == 12


def test_a_waiting_request_gets_its_snapshot_from_the_one_that_computes() -> None:
    worker = Worker(budget=8)
    submit(worker.scheduler, make_assignment("first", PROMPT))
    step(worker.scheduler, worker.model)
    other = make_assignment("other", (*PROMPT[:17], (PROMPT[17] + 1) % 4, 1, 1))
    submit(worker.scheduler, other)
    events = run_all(worker.scheduler, worker.model)["other"]
    assert events[-1].cached_tokens == 16 and tokens_of(events) == answer_to(other)


class Counted(OrderedDict[Any, Any]):
    """Counts the names that are looked for."""

    num_looks = 0

    def __contains__(self, name: object) -> bool:
        self.num_looks += 1
        return super().__contains__(name)


def test_a_waiting_request_looks_at_few_of_its_blocks_in_each_step() -> None:
    """Its prompt of 256 blocks parts behind 200 of them from one that is computed in chunks of one block."""
    worker = Worker(num_blocks=600, budget=4)
    computing, snapshots = Counted(), Counted()
    worker.scheduler._contents.computing, worker.states._slots = computing, snapshots
    shared = tuple(token % 50 for token in range(800))
    for name, token in (("a", 1), ("b", 2)):
        submit(worker.scheduler, make_assignment(name, (*shared, *[token] * 224)))
    step(worker.scheduler, worker.model)
    assert [*worker.scheduler.running] == ["a"]
    most = 0
    while "b" not in worker.scheduler.running:
        computing.num_looks = snapshots.num_looks = 0
        step(worker.scheduler, worker.model)
        if "b" not in worker.scheduler.running:
            most = max(most, computing.num_looks + snapshots.num_looks)
    assert 0 < most < 40, "it looked at all of its 256 blocks"
    assert 200 in worker.snapshots_of(shared), "the running one left a snapshot where they part"
    assert worker.scheduler.running["b"].num_cached_tokens == 800


def test_of_requests_that_part_at_one_place_the_first_computes() -> None:
    worker = Worker()
    worker.ask("known", PROMPT)
    others = {name: make_assignment(name, (*PROMPT[:13], (PROMPT[13] + at) % 4)) for at, name in ((1, "a"), (2, "b"))}
    for assignment in others.values():
        submit(worker.scheduler, assignment)
    events = run_all(worker.scheduler, worker.model)
    assert {name: events[name][-1].cached_tokens for name in others} == {"a": 0, "b": 12}


def test_the_public_prefix_and_marks_have_snapshots() -> None:
    worker = Worker()
    hints = CacheHints(marks=(CacheMark(num_blocks=3, priority=0, ttl_s=60.0),))
    salt = Salt(b"tenant", 8)
    worker.ask("marked", PROMPT, cache=hints, salt=salt)
    names = chain_of(salt).hashes(PROMPT)
    assert [worker.states.has(name) for name in names] == [False, True, True, False, True]


def test_a_preempted_request_goes_on_from_its_last_snapshot() -> None:
    worker = Worker(num_blocks=16)
    assignments = [make_assignment(name, PROMPT[at : at + 12], max_tokens=30) for at, name in enumerate("abc")]
    for assignment in assignments:
        submit(worker.scheduler, assignment)
    events, starts = dict[str, list[int | None]](), dict[str, list[int]]()
    while worker.scheduler.requests:
        output, outcome = step(worker.scheduler, worker.model)
        worker.scheduler.check_integrity()
        for chunk in output.chunks:
            starts.setdefault(chunk.request.request_id, []).append(chunk.start)
        for event in outcome.events:
            events.setdefault(event.request_id, []).append(event.token_id)
    assert events == {each.request_id: answer_to(each) for each in assignments}
    back = [start for each in starts.values() for before, start in pairwise(each) if start < before]
    assert max(back) > 0, "computed again from somewhere in the middle"


def test_a_swapped_request_goes_on_where_it_was() -> None:
    """With its KV and its state from outside; or, where the pool has all its KV still, with the state alone."""
    worker = Worker(num_blocks=16, swap_blocks=100)
    assignments = [make_assignment(name, PROMPT[at : at + 12], max_tokens=30) for at, name in enumerate("abc")]
    for assignment in assignments:
        submit(worker.scheduler, assignment)
    events, starts = dict[str, list[int | None]](), dict[str, list[int]]()
    num_swapped = 0
    while worker.scheduler.requests:
        output, outcome = step(worker.scheduler, worker.model)
        worker.scheduler.check_integrity()
        num_swapped += sum(isinstance(move, SwapIn) for move in output.moves)
        for chunk in output.chunks:
            starts.setdefault(chunk.request.request_id, []).append(chunk.start)
        for event in outcome.events:
            events.setdefault(event.request_id, []).append(event.token_id)
    assert events == {each.request_id: answer_to(each) for each in assignments}
    assert num_swapped > 0
    assert all(before < start for each in starts.values() for before, start in pairwise(each)), "nothing twice"


def test_a_state_takes_room_outside_the_pool() -> None:
    policy = SwapPolicy(max_blocks=100, block_bytes=100, state_bytes=250)
    assert policy.num_extra == 3
    assert policy.pays(1, 50, 0, 100) and not replace(policy, state_bytes=10**9).pays(1, 50, 0, 100)


def test_without_caching_nothing_is_kept() -> None:
    worker = Worker()
    worker.pool.keeps_blocks = False
    assert worker.ask("cold", PROMPT, max_tokens=9) == worker.ask("again", PROMPT, max_tokens=9) == 0
    assert worker.states.num_snapshots == 0


def test_the_least_states_serve_one_request_after_the_other() -> None:
    worker = Worker(num_states=2)
    for name in ("a", "b"):
        submit(worker.scheduler, make_assignment(name, (1, *PROMPT), max_tokens=9))
    output, _ = step(worker.scheduler, worker.model)
    assert len(output.chunks) == 1
    assert len(run_all(worker.scheduler, worker.model)) == 2


@pytest.mark.parametrize(("num_states", "num_accepted"), [(20, 5), (4, 1), (2, 0)])
def test_a_draft_is_as_long_as_there_are_states(num_states: int, num_accepted: int) -> None:
    """Behind each of its tokens stands one, in a slot that nobody has; what was rejected leaves none behind."""
    worker = Worker(num_states)
    assignment = make_assignment("a", PROMPT, max_tokens=20)
    answer = answer_to(assignment)
    submit(worker.scheduler, assignment)
    step(worker.scheduler, worker.model)
    wrong = (*answer[1:6], (answer[6] + 1) % 4, 0)
    draft = Draft("a", DraftSource.REQUEST, wrong, (1.0,) * len(wrong))
    output = worker.scheduler.schedule(0.0, [draft])
    outcome = worker.scheduler.update(output, worker.model.run(output), 0.0)
    worker.scheduler.check_integrity()
    assert worker.snapshots_of(PROMPT) == ([5] if num_states > 2 else []), "a draft takes no snapshot's place"
    tokens = tokens_of(outcome.events)
    assert tokens == answer[1 : 1 + len(tokens)] and len(tokens) - 1 == min(num_accepted, 5)
    assert tokens_of(run_all(worker.scheduler, worker.model)["a"]) == answer[1 + len(tokens) :]


def test_a_step_that_failed_leaves_no_state_held() -> None:
    worker = Worker(num_states=2)
    submit(worker.scheduler, make_assignment("a", PROMPT))
    worker.scheduler.schedule(0.0)
    worker.scheduler.abort("a", 0.0)
    assert worker.ask("b", PROMPT) == 0


@pytest.mark.parametrize("options", [{"prompt_logprobs": 0}, {"pooling": Pooling.MEAN, "max_tokens": 0}])
def test_results_of_cached_positions_are_computed_from_the_beginning(options: dict[str, object]) -> None:
    worker = Worker()
    worker.ask("plain", PROMPT)
    submit(worker.scheduler, make_assignment("results", PROMPT, **options))  # type: ignore[arg-type]
    output, _ = step(worker.scheduler, worker.model)
    assert output.chunks[0].start == 0 and output.chunks[0].store_from == 20


def test_the_pool_tells_of_its_blocks_and_of_its_snapshots() -> None:
    worker = Worker()
    names = hashes_of(PROMPT)
    worker.ask("cold", PROMPT, max_tokens=1)
    assert worker.pool.drain_journal() == ([*names, state_hash(names[-1])], [])
    assert worker.pool.hashes() == [*names, state_hash(names[-1])]
    worker.states.drop(names[-1], EvictionReason.FULL)
    assert worker.pool.drain_journal() == ([], [(state_hash(names[-1]), EvictionReason.FULL)])
    assert worker.pool.hashes() == names


def test_a_snapshot_goes_with_the_first_block_before_it() -> None:
    worker = Worker(num_blocks=9)
    worker.ask("first", PROMPT, max_tokens=1)
    worker.ask("second", [(token + 1) % 4 for token in PROMPT], max_tokens=1)
    assert worker.snapshots_of(PROMPT) == [] and worker.ask("again", PROMPT, max_tokens=1) == 0


class LookedAt(list[bytes]):
    """A path that counts how many of its blocks were looked at."""

    num_looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_looks += 1
        return super().__getitem__(index)


def test_a_snapshot_that_moves_on_looks_at_its_new_blocks_only() -> None:
    """A request of 100,000 tokens takes one in every block, in the engine's thread."""
    states, names = States(4), [number.to_bytes(4, "little") for number in range(1002)]
    slots = [slot for slot in (states.allocate(), states.allocate()) if slot is not None]
    paths = [LookedAt(names[:1000]), LookedAt(names)]
    assert all(states.keep(slot, path) for slot, path in zip(slots, paths, strict=True))
    assert paths[1].num_looks < 10 and states.longest(names) == (1002, slots[1])
    states.drop(names[999], EvictionReason.TAKEN)
    states.check_integrity(slots)
    assert set(states.blocks_on_paths()) == {*names}
    # Two that part, and the block where they do goes.
    states.drop(names[1001], EvictionReason.TAKEN)
    others = [b"a", b"b", b"c"], [b"a", b"b", b"d", b"e"]
    assert all(states.keep(slot, other) for slot, other in zip(slots, others, strict=True))
    states.check_integrity(slots)
    states.block_gone(b"d", EvictionReason.FULL)
    assert states.num_snapshots == 1 and set(states.blocks_on_paths()) == {b"a", b"b", b"c"}
    states.block_gone(b"a", EvictionReason.FULL)
    states.check_integrity(slots)
    assert states.num_snapshots == 0 and states.blocks_on_paths() == []


def test_a_reset_forgets_snapshots() -> None:
    worker = Worker()
    worker.ask("first", PROMPT)
    assert worker.scheduler.reset() > 0 and worker.states.num_snapshots == 0


def test_idle_work_is_dropped() -> None:
    worker = Worker()
    submit(worker.scheduler, make_assignment("idle", PROMPT, max_tokens=0, is_idle=True))
    assert not worker.scheduler.idle and worker.scheduler.idle.counts.num_dropped == 1
