"""Two engines that send each other KV and recurrent states; `FakeModel` finds a state that is not its request's own."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest

from raydix.engine.core.hashing import state_hash
from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.types import BlockHash, EvictionReason, TokenEvent
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.states import States
from raydix.engine.core.worker.transfers import MAX_STATES
from raydix.engine.model.engine import Engine
from raydix.engine.model.exchange import ExportedSegment
from tests.unit.builders import FINGERPRINT, FakeModel, answer_to, hashes_of, make_assignment, tokens_of

PROMPT = tuple(token % 4 for token in range(7, 29))
"""22 tokens: five full blocks, and two tokens."""
HASHES = hashes_of(PROMPT)


class Node:
    """An engine whose model has recurrent states."""

    def __init__(self, num_blocks: int = 32, num_states: int = 12) -> None:
        self.states = States(num_states)
        self.pool = BlockPool(num_blocks, 4, states=self.states)
        model = FakeModel(self.pool)
        self.engine = Engine(
            model, model, self.pool, SchedulerLimits(100, 8), num_blocks * 4, FINGERPRINT, states=model
        )

    def ask(self, prompt: Sequence[int] = PROMPT, awaited: Sequence[BlockHash] = ()) -> int:
        """Answer one prompt; returns the tokens of the prompt that were not computed."""
        assignment = make_assignment("a", prompt, awaited=awaited)
        self.engine.submit(assignment, 0.0)
        return self.finish(prompt)

    def finish(self, prompt: Sequence[int] = PROMPT) -> int:
        events: list[TokenEvent] = []
        while (result := self.engine.step(0.0)) is not None:
            events += result.events
        self.engine.scheduler.check_integrity()
        assert tokens_of(events) == answer_to(make_assignment("a", prompt))
        return events[-1].cached_tokens

    def export(self, names: Sequence[BlockHash]) -> list[ExportedSegment]:
        segments, missing = self.engine.exchange.export(names, 0.0)
        assert missing == ()
        return segments

    def take(self, segment: ExportedSegment) -> bool:
        return self.engine.exchange.import_segment(segment.header, segment.payload, 0.0)


@pytest.fixture
def sender() -> Node:
    sender = Node()
    assert sender.ask() == 0
    return sender


def test_kv_and_its_state_make_a_hit_elsewhere(sender: Node) -> None:
    [segment] = sender.export([*HASHES, state_hash(HASHES[-1])])
    assert segment.header.names == (*HASHES, state_hash(HASHES[-1]))
    assert segment.payload.nbytes == segment.header.num_bytes == 5 * 32 + 8
    receiver = Node()
    assert receiver.take(segment)
    assert receiver.pool.drain_journal() == ([*HASHES, state_hash(HASHES[-1])], [])
    assert receiver.ask() == 20
    assert receiver.take(segment), "a second time nothing is missing"
    assert receiver.ask() == 20


def test_without_the_state_everything_is_computed_again(sender: Node) -> None:
    [segment] = sender.export(HASHES)
    receiver = Node()
    assert receiver.take(segment) and receiver.ask() == 0


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_a_state_may_overtake_its_blocks(sender: Node, order: Sequence[int]) -> None:
    """The request goes on when all are there, whatever came first."""
    names = [HASHES[:2], HASHES[2:], [state_hash(HASHES[-1])]]
    segments = [sender.export(part)[0] for part in names]
    receiver = Node()
    receiver.engine.submit(make_assignment("a", PROMPT, awaited=[name for part in names for name in part]), 0.0)
    for place in order:
        assert receiver.engine.step(0.0) is None, "it waits"
        assert receiver.take(segments[place])
        receiver.engine.scheduler.check_integrity()
    assert receiver.finish() == 20


def test_a_state_whose_blocks_never_come_is_of_no_use(sender: Node) -> None:
    receiver = Node()
    for names in (HASHES[3:], [state_hash(HASHES[-1])]):
        assert receiver.take(sender.export(names)[0])
    assert receiver.ask() == 0
    assert receiver.ask() == 20


def test_a_state_that_is_sent_on_still_waits_for_its_blocks(sender: Node) -> None:
    """Only a request that goes on from a state has found the blocks before it; an export has not looked for them."""
    receiver, third = Node(), Node()
    name = state_hash(HASHES[-1])
    assert receiver.take(sender.export([name])[0])
    [segment] = receiver.export([name])
    receiver.engine.scheduler.check_integrity()
    assert third.take(segment) and third.take(sender.export(HASHES)[0])
    assert third.ask() == 20


def test_a_reset_forgets_states_whose_blocks_are_still_to_come(sender: Node) -> None:
    receiver = Node()
    name = state_hash(HASHES[-1])
    assert receiver.take(sender.export([name])[0])
    receiver.pool.drain_journal()
    receiver.engine.scheduler.reset()
    assert receiver.states.num_snapshots == 0
    assert receiver.pool.drain_journal() == ([], [(name, EvictionReason.RESET)])
    receiver.engine.scheduler.check_integrity()


@pytest.mark.parametrize("damage", ["checksum", "fingerprint", "size", "states"])
def test_a_damaged_segment_costs_time_only(sender: Node, damage: str) -> None:
    names = [*HASHES, state_hash(HASHES[-1])]
    [segment] = sender.export(names)
    header = segment.header
    broken = {
        "checksum": replace(header, checksum=header.checksum + 1),
        "fingerprint": replace(header, fingerprint="another model"),
        "size": replace(header, hashes=(*header.hashes, b"another")),
        "states": replace(header, states=()),
    }
    receiver = Node()
    receiver.engine.submit(make_assignment("a", PROMPT, awaited=names), 0.0)
    assert not receiver.take(replace(segment, header=broken[damage]))
    assert receiver.states.num_snapshots == 0
    # The names that the header had are settled; those that it lacks come with another segment, or do not.
    receiver.engine.scheduler.imports.settled(names, 0.0)
    assert receiver.finish() == 0


def test_what_is_gone_is_reported_missing(sender: Node) -> None:
    name = state_hash(HASHES[-1])
    sender.states.drop(HASHES[-1], EvictionReason.FULL)
    segments, missing = sender.engine.exchange.export([*HASHES, name], 0.0)
    assert missing == (name,) and [segment.header.states for segment in segments] == [()]


def test_few_states_are_copied_out_at_a_time() -> None:
    sender = Node(num_blocks=100, num_states=40)
    for number in range(MAX_STATES + 1):
        sender.ask((*PROMPT[:4], *((number >> bit) % 2 for bit in range(8)), 1))
    states = sender.states.hashes()
    assert len(states) > MAX_STATES
    names = [*HASHES[:1], *states]
    first, rest = sender.engine.scheduler.transfers.first_part(names)
    assert len(first) == 1 + MAX_STATES and [*first, *rest] == names
    plain = Engine(model := FakeModel(pool := BlockPool(8, 4)), model, pool, SchedulerLimits(8, 8), 32, FINGERPRINT)
    assert plain.scheduler.transfers.first_part(names) == (names, ())


def test_a_state_without_a_slot_is_left_out(sender: Node) -> None:
    receiver = Node(num_states=2)
    slots = [receiver.states.allocate() for _ in range(2)]
    [segment] = sender.export([*HASHES, state_hash(HASHES[-1])])
    assert receiver.take(segment) and receiver.states.num_snapshots == 0
    for slot in slots:
        assert slot is not None
        receiver.states.release(slot)
    assert receiver.ask() == 0
