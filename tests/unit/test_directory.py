"""The directory's answers, case by case. Blocks have four tokens and ten bytes; importing them is always cheaper."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.errors import NoWorkerError
from raydix.engine.core.hashing import state_hash
from raydix.engine.core.manager.cache_report import cache_report
from raydix.engine.core.manager.directory import PAUSED_WHY, Directory, explained
from raydix.engine.core.manager.explain import BlockSource, Decision, Eviction
from raydix.engine.core.manager.instructions import DeliverSegment, Export, HandoverLost, Instruction, Lost
from raydix.engine.core.manager.placement import CostModel
from raydix.engine.core.manager.turns import SILENT_S, PausedError, TurnLimits
from raydix.engine.core.objectives import LATE_PRIORITY
from raydix.engine.core.types import (
    Admission,
    AdmitRequest,
    AttemptName,
    BlockHash,
    CacheHints,
    DraftSource,
    DraftUse,
    Ended,
    EvictionReason,
    FinishReason,
    Handover,
    Outcome,
    Paused,
    Role,
    SegmentHeader,
    Snapshot,
)

MakeDirectory = Callable[..., Directory]

A, B, C, D = b"a", b"ab", b"abc", b"abcd"


def prompt(name: str, num_blocks: int) -> tuple[BlockHash, ...]:
    return tuple(f"{name} {number}".encode() for number in range(num_blocks))


def join(directory: Directory, worker_id: str, role: Role, *hashes: BlockHash, epoch: int = 1) -> list[Instruction]:
    return directory.register(worker_id, role, epoch, 10, hashes)


def admit(
    directory: Directory, request_id: str, *hashes: BlockHash, attempt: int = 0
) -> tuple[Admission, list[Instruction]]:
    return directory.admit(AdmitRequest(request_id, attempt, hashes, len(hashes) * 4 + 2), 0.0)


def export(
    directory: Directory, worker_id: str, *hashes: BlockHash, handover: Handover | None = None, num_bytes: int = 0
) -> list[Instruction]:
    header = SegmentHeader("model", hashes, num_bytes or len(hashes) * 10, 0, handover)
    return directory.segment_exported(worker_id, 1, header, "ref", 0.0)


def seal(directory: Directory, worker_id: str, *hashes: BlockHash) -> list[Instruction]:
    return directory.blocks_changed(worker_id, 1, hashes, ())


def evict(directory: Directory, worker_id: str, *hashes: BlockHash) -> list[Instruction]:
    return directory.blocks_changed(worker_id, 1, (), [(block_hash, EvictionReason.FULL) for block_hash in hashes])


def fail_export(directory: Directory, worker_id: str, *hashes: BlockHash) -> list[Instruction]:
    return directory.export_failed(worker_id, 1, hashes)


def delivered(instructions: list[Instruction]) -> list[tuple[str, tuple[BlockHash, ...]]]:
    assert all(isinstance(instruction, DeliverSegment) for instruction in instructions)
    return [(i.worker_id, i.segment.header.hashes) for i in instructions if isinstance(i, DeliverSegment)]


@pytest.fixture
def split(make_directory: MakeDirectory) -> Directory:
    """One prefill and one decode worker, both empty."""
    directory = make_directory()
    join(directory, "p", Role.PREFILL)
    join(directory, "d", Role.DECODE)
    return directory


def test_a_new_prompt_is_computed_and_sent_on(split: Directory) -> None:
    admission, instructions = admit(split, "r", A, B)
    assert (admission.prefill, admission.decode) == ("p", "d")
    assert admission.prefill_awaited == () and admission.decode_awaited == (A, B)
    assert instructions == []
    assert delivered(export(split, "p", A)) == [("d", (A,))]
    assert seal(split, "p", A) == []
    handover = Handover("r", 0, 7, b"tail")
    assert delivered(export(split, "p", B, b"tail", handover=handover)) == [("d", (B, b"tail"))]
    assert len(split.stock.segments) == 2, "the tail belongs to its request and is not indexed"
    assert split.end_request("r", 0.0) == []


def test_a_prompt_without_answer_stays_with_its_prefill_worker(split: Directory) -> None:
    admission, _ = split.admit(AdmitRequest("r", 0, (A, B), 10, generates=False), 0.0)
    assert (admission.prefill, admission.decode, admission.decode_awaited) == ("p", "p", ())
    assert seal(split, "p", A, B) == [], "nobody waits for it"
    assert split.end_request("r", 0.0) == []


def test_a_bare_handover_is_delivered_and_not_kept(split: Directory) -> None:
    admit(split, "r")
    assert delivered(export(split, "p", handover=Handover("r", 0, 7, None))) == [("d", ())]
    assert len(split.stock.segments) == len(split.stock.blocks) == 0


def test_a_handover_of_an_older_attempt_goes_nowhere(split: Directory) -> None:
    admit(split, "r", A)
    admit(split, "r", A, attempt=1)
    assert export(split, "p", handover=Handover("r", 0, 7, None)) == []
    assert export(split, "p", handover=Handover("unknown", 0, 7, None)) == []


def test_what_another_request_computes_is_awaited(split: Directory) -> None:
    admit(split, "r1", A, B)
    join(split, "d2", Role.DECODE)
    admission, instructions = admit(split, "r2", A, B, C)
    assert (admission.prefill, admission.decode) == ("p", "d2")
    assert admission.prefill_awaited == (A, B), "not computed twice, even if they come from the same worker"
    assert instructions == []
    assert delivered(export(split, "p", A, B)) == [("d", (A, B)), ("d2", (A, B))]


def test_a_prompt_follows_one_that_is_about_to_compute_its_beginning() -> None:
    """Where imports take longer than computing: a token takes a second, a block 1,000."""
    costs = WorkerCosts(step_s=0.0, prefill_token_s=1.0, decode_token_s=0.0, import_byte_s=100.0)
    directory = Directory(CostModel(block_size=4, prior=costs), segment_budget_bytes=10_000)
    beginning = prompt("x", 8)
    join(directory, "a", Role.MIXED)
    assert admit(directory, "r1", *beginning)[0].prefill == "a"
    join(directory, "b", Role.MIXED)
    assert admit(directory, "r2", *prompt("y", 4))[0].prefill == "b"
    admission, instructions = admit(directory, "r3", *beginning, A)
    assert (admission.prefill, admission.prefill_awaited, instructions) == ("a", beginning, [])
    [decision] = directory.decisions.of("r3").values()
    candidates: Any = decision[-1].as_json()["candidates"]
    times = {each["worker"]: each for each in candidates}
    assert (times["a"]["imported_blocks"], times["a"]["import_s"], times["a"]["wait_s"]) == (8, 0.0, 34.0)
    assert (times["b"]["imported_blocks"], times["b"]["wait_s"]) == (0, 18.0)
    assert seal(directory, "a", *beginning) == [], "the worker has what it awaited"
    directory.check_integrity()
    directory.end_request("r1", 0.0)
    assert admit(directory, "r4", *beginning, B)[0].prefill_awaited == (), "the blocks are there"


def test_when_the_one_who_computes_ends_the_next_one_takes_over(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    workers = []
    for request_id, worker_id in (("r1", "a"), ("r2", "b"), ("r3", "c")):
        join(directory, worker_id, Role.MIXED)
        workers.append(admit(directory, request_id, A, B)[0].prefill)
    assert workers == ["a", "b", "c"], "each goes where nothing is queued"
    assert directory.end_request("r1", 0.0) == [Export("a", (A, B))], "they may be there and not reported yet"
    assert delivered(export(directory, "a", A)) == [("b", (A,)), ("c", (A,))]
    assert directory.export_failed("a", 1, [B]) == [Lost("b", (B,))], "c goes on waiting"
    assert seal(directory, "b", A, B) == [Export("b", (B,))]
    assert delivered(export(directory, "b", B)) == [("c", (B,))]


def test_when_nobody_is_left_to_compute_those_who_wait_are_told(split: Directory) -> None:
    admit(split, "r1", A)
    assert split.end_request("r1", 0.0) == [Export("p", (A,))]
    assert split.export_failed("p", 1, [A]) == [Lost("d", (A,))]
    assert len(split.stock.blocks) == 0


def test_whoever_computes_it_first_sends_it(make_directory: MakeDirectory) -> None:
    """Another than the one that was to compute it gave up waiting."""
    directory = make_directory()
    join(directory, "a", Role.MIXED)
    admit(directory, "r1", A)
    join(directory, "b", Role.MIXED)
    join(directory, "c", Role.MIXED)
    directory.stock.blocks[A].awaited(frozenset({"b", "c"}))
    assert seal(directory, "b", A) == [Export("b", (A,))]


def test_blocks_in_a_segment_are_delivered_at_once(split: Directory) -> None:
    export(split, "p", A, B)
    admission, instructions = admit(split, "r", A, B)
    assert admission.prefill_awaited == (A, B)
    assert sorted(delivered(instructions)) == [("d", (A, B)), ("p", (A, B))]


def test_blocks_that_only_workers_hold_are_exported_once(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    join(directory, "d", Role.DECODE, A, B)
    join(directory, "p", Role.PREFILL)
    admission, instructions = admit(directory, "r", A, B, C)
    assert (admission.prefill, admission.decode) == ("p", "d")
    assert admission.decode_awaited == (C,)
    assert instructions == [Export("d", (A, B))]
    assert admit(directory, "r2", A, B)[1] == [], "it was asked already"
    assert delivered(export(directory, "d", A, B)) == [("p", (A, B))]


def test_what_a_worker_holds_behind_a_gap_is_not_sent_to_it(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    join(directory, "w", Role.MIXED, A, C)
    join(directory, "x", Role.DECODE, B)
    admission, instructions = admit(directory, "r", A, B, C)
    assert admission.prefill == "w"
    assert admission.prefill_awaited == (B,)
    assert instructions == [Export("x", (B,))]


def test_a_mixed_worker_exports_what_somebody_turns_out_to_want(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    join(directory, "m1", Role.MIXED)
    first, _ = admit(directory, "r1", A)
    join(directory, "m2", Role.MIXED)
    second, _ = admit(directory, "r2", A)
    assert (first.prefill, second.prefill) == ("m1", "m2")
    assert second.prefill_awaited == (A,)
    assert seal(directory, "m1", A) == [Export("m1", (A,))]
    assert delivered(export(directory, "m1", A)) == [("m2", (A,))]


@pytest.mark.parametrize("evicted_before", [False, True])
def test_an_export_that_fails_is_lost(make_directory: MakeDirectory, evicted_before: bool) -> None:
    directory = make_directory()
    join(directory, "d", Role.DECODE, A)
    join(directory, "p", Role.PREFILL)
    assert admit(directory, "r", A, B)[1] == [Export("d", (A,))]
    if evicted_before:
        assert evict(directory, "d", A) == [], "the answer to the order is still to come"
    assert directory.export_failed("d", 1, [A]) == [Lost("p", (A,))]
    assert directory.stock.blocks[A].producer == "r", "it computes it for everybody"
    directory.check_integrity()
    directory.end_request("r", 0.0)
    directory.export_failed("p", 1, [A, B])
    assert len(directory.stock.blocks) == 0, "nothing is known that nobody has"


def test_an_export_that_nobody_wants_any_more_may_fail(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    join(directory, "d", Role.DECODE)
    assert directory.export_failed("d", 1, [A]) == []
    assert len(directory.stock.blocks) == 0


# Workers come and go


def test_a_dead_workers_promises_are_lost(split: Directory) -> None:
    admit(split, "r", A, B)
    [lost] = split.remove_worker("p", 1)
    assert isinstance(lost, Lost) and lost.worker_id == "d" and set(lost.hashes) == {A, B}
    assert split.remove_worker("p", 1) == []
    assert len(split.stock.blocks) == 0
    assert split.end_request("r", 0.0) == []


def test_an_order_dies_with_its_worker(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    join(directory, "d", Role.DECODE, A)
    join(directory, "p", Role.PREFILL)
    admit(directory, "r", A, B)
    evict(directory, "d", A)
    assert directory.remove_worker("d", 1) == [Lost("p", (A,))]
    directory.end_request("r", 0.0)
    directory.export_failed("p", 1, [A, B])
    assert len(directory.stock.blocks) == 0


def test_segments_outlive_their_worker(split: Directory) -> None:
    export(split, "p", A, B)
    seal(split, "p", A, B)
    split.remove_worker("p", 1)
    assert len(split.stock.blocks) == 2
    admission, instructions = admit(split, "r", A, B)
    assert admission.prefill == "d"
    assert delivered(instructions) == [("d", (A, B))]


def test_segments_of_a_silent_worker_are_out_of_reach(make_directory: MakeDirectory) -> None:
    """Its node may be cut off: a worker that is to get them computes, and later requests find others' segments only."""
    directory = make_directory()
    for worker_id, block in (("a", A), ("c", B)):
        join(directory, worker_id, Role.MIXED)
        export(directory, worker_id, block)
    join(directory, "b", Role.MIXED)
    admission, instructions = directory.admit(AdmitRequest("r", 0, (A, B), 10, avoided=("a", "c")), 0.0)
    assert admission.prefill == "b" and delivered(instructions) == [("b", (A,)), ("b", (B,))]

    assert directory.worker_silent("a", 0.0) == [Lost("b", (A,))]
    assert "a" not in directory.fleet and len(directory.stock.segments) == 1
    directory.check_integrity()
    _, instructions = directory.admit(AdmitRequest("s", 0, (B,), 6, avoided=("c",)), 0.0)
    assert delivered(instructions) == [("b", (B,))]
    for request_id in ("r", "s"):
        directory.end_request(request_id, 0.0)
    directory.check_integrity()


@pytest.mark.parametrize("known", [set(), {AttemptName("r", 0)}], ids=["sent", "under way"])
def test_a_worker_that_registers_again_hands_over_what_is_under_way_there_only(
    split: Directory, known: set[AttemptName]
) -> None:
    """What it had sent before was lost with its stream, if it has not come."""
    for request_id, handed_over in (("r", False), ("s", True)):
        admit(split, request_id, A)
        if handed_over:
            export(split, "p", handover=Handover(request_id, 0, 1, None))
    again = split.register("p", Role.PREFILL, 1, 10, (), attempts=known)
    assert [each for each in again if isinstance(each, HandoverLost)] == [HandoverLost("d", "r")][len(known) :]
    assert not [each for each in join(split, "p", Role.PREFILL, epoch=2) if isinstance(each, HandoverLost)], "a death"


def test_a_silent_worker_does_not_hand_over(split: Directory) -> None:
    admit(split, "r")
    assert split.worker_silent("p", 0.0) == [HandoverLost("d", "r")]
    admit(split, "s")
    assert split.worker_silent("unknown", 0.0) == []


def test_nothing_is_delivered_to_the_dead(split: Directory) -> None:
    admit(split, "r", A)
    split.remove_worker("d", 1)
    assert export(split, "p", A, handover=Handover("r", 0, 1, None)) == []


def test_an_older_incarnation_is_ignored(split: Directory) -> None:
    join(split, "p", Role.PREFILL, A, epoch=5)
    assert split.fleet.current("p", 1) is None and split.fleet.current("p", 5) is not None
    assert join(split, "p", Role.MIXED, B, epoch=4) == []
    seal(split, "p", B)
    export(split, "p", B)
    evict(split, "p", A)
    assert split.remove_worker("p", 1) == []
    split.fleet.measured("p", 1, WorkerCosts(), 1)
    assert len(split.stock.blocks) == 1 and len(split.stock.segments) == 0
    assert split.fleet["p"].role is Role.PREFILL
    assert split.fleet["p"].num_free_blocks is None


def test_a_new_incarnation_starts_without_the_old_ones_load(split: Directory) -> None:
    admit(split, "r", A, B)
    assert split.fleet["p"].queued_us == 12_000
    [lost] = join(split, "p", Role.PREFILL, epoch=2)
    assert isinstance(lost, Lost) and lost.worker_id == "d" and set(lost.hashes) == {A, B}
    assert split.fleet["p"].queued_us == 0
    split.end_request("r", 0.0)
    assert split.fleet["p"].queued_us == 0


def test_an_incarnation_that_registers_twice_has_no_load_either(split: Directory) -> None:
    admit(split, "r", A, B)
    join(split, "p", Role.PREFILL)
    split.check_integrity()
    split.first_token("r", 0, 0.1)
    split.end_request("r", 0.0)
    assert split.fleet["p"].queued_us == 0


def test_measured_rates_decide(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    for worker_id in ("slow", "fast"):
        join(directory, worker_id, Role.MIXED)
    directory.fleet.measured("fast", 1, WorkerCosts(1e-4, 1e-4, 1e-4), 100)
    directory.fleet.measured("slow", 1, None, 100)
    assert directory.fleet["slow"].costs == directory.fleet["fast"].costs, "not measured: as its peer"
    directory.fleet.measured("slow", 1, WorkerCosts(), 100)
    assert {admit(directory, str(index))[0].prefill for index in range(3)} == {"fast"}


# Requests


def test_blocks_that_cannot_be_sent_are_computed_and_stay_known(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    join(directory, "d", Role.DECODE, A, B)
    join(directory, "p", Role.PREFILL)
    assert admit(directory, "r", A, B)[1] == [Export("d", (A, B))]
    assert directory.blocks_unsent("d", 1, [A, B]) == [Lost("p", (A, B))], "it is not asked again for this request"
    assert seal(directory, "p", A, B) == []
    directory.end_request("r", 0.0)
    directory.remove_worker("p")
    join(directory, "p2", Role.PREFILL)
    assert admit(directory, "s", A, B)[1] == [Export("d", (A, B))], "but for the next one"


def test_who_holds_what_cannot_be_sent_does_not_compute_it_for_others(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    join(directory, "d", Role.DECODE, A)
    join(directory, "p", Role.PREFILL)
    admit(directory, "r", A, B)
    seal(directory, "p", A)
    directory.stock.blocks[A].awaited(frozenset({"x"}))
    join(directory, "x", Role.MIXED)
    assert directory.blocks_unsent("d", 1, [A]) == [Lost("x", (A,))]


def test_without_a_worker_nothing_changes(split: Directory) -> None:
    admit(split, "r", A)
    for worker_id in ("p", "d"):
        split.remove_worker(worker_id, 1)
    with pytest.raises(NoWorkerError):
        admit(split, "r", A, B, attempt=1)
    assert split.num_reservations == 1
    split.end_request("r", 0.0)


def test_load_is_reserved_until_the_first_token(split: Directory) -> None:
    admit(split, "r", A, B)
    worker = split.fleet["p"]
    assert worker.queued_us == 12_000 and worker.requests == {"r"} == split.fleet["d"].requests
    assert worker.decoding == set() and split.fleet["d"].decoding == {"r"}
    split.first_token("r", 0, 0.1)
    assert worker.queued_us == 0 and worker.requests == {"r"}
    split.first_token("r", 0, 0.1)
    split.first_token("unknown", 0, 0.1)
    split.end_request("r", 0.0)
    assert worker.queued_us == 0 and not worker.requests and not split.fleet["d"].requests


def test_requests_are_spread_by_reserved_load(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    for worker_id in "abc":
        join(directory, worker_id, Role.MIXED, *([A] if worker_id == "a" else []))
    chosen = [admit(directory, str(index), A, str(index).encode())[0].prefill for index in range(9)]
    assert sorted(chosen) == sorted("abc" * 3)


def test_an_admission_that_is_repeated_replaces_the_first(split: Directory) -> None:
    admit(split, "r", A, B)
    admit(split, "r", A, B, attempt=1)
    assert split.num_reservations == 1
    assert split.fleet["p"].queued_us == 4_000, "the load of the second alone, which waits for the first's blocks"
    assert split.export_failed("p", 1, [A, B]) == [Lost("p", (A, B))], "and computes those that do not come"
    split.end_request("r", 0.0)
    split.export_failed("p", 1, [A, B])
    assert len(split.stock.blocks) == 0


# Who was to send blocks is there, and does not send them

PATIENCE_S = 30.0


def silence(directory: Directory, since: float = 0.0) -> list[Instruction]:
    """Nothing happens for as long as anybody is patient; what comes of it."""
    for passed in (0.0, PATIENCE_S / 2, PATIENCE_S - 0.1):
        assert directory.stock.supply.replace_stalled(since + passed, PATIENCE_S) == []
    instructions = directory.stock.supply.replace_stalled(since + PATIENCE_S, PATIENCE_S)
    directory.check_integrity()
    return instructions


def admit_at(directory: Directory, chosen: str, request_id: str, *hashes: BlockHash) -> Admission:
    """Admit a request where only one worker is quick."""
    for worker_id in directory.fleet:
        costs = WorkerCosts() if worker_id == chosen else WorkerCosts(1.0, 1.0, 1.0)
        directory.fleet.measured(worker_id, 1, costs, 100)
    admission, _ = admit(directory, request_id, *hashes)
    assert admission.prefill == chosen
    return admission


@pytest.fixture
def crowd(make_directory: MakeDirectory) -> Directory:
    """Requests "1a", "2b" ... of the same blocks, admitted in this order, each to the worker it names."""
    directory = make_directory()
    for worker_id in "abc":
        join(directory, worker_id, Role.MIXED)
    for request_id in ("1a", "2b", "3c", "4a", "5b"):
        admit_at(directory, request_id[1], request_id, A, B)
    return directory


def test_when_the_one_who_computes_stalls_one_other_takes_over(crowd: Directory) -> None:
    assert silence(crowd) == [Lost("b", (A, B))], "c goes on waiting, and so does a, for 4a"
    assert seal(crowd, "b", A) == [Export("b", (A,))]
    assert delivered(export(crowd, "b", A)) == [("a", (A,)), ("c", (A,))]


def test_who_goes_on_late_does_no_harm(crowd: Directory) -> None:
    silence(crowd)
    assert seal(crowd, "a", A, B) == [Export("a", (A, B))]
    assert seal(crowd, "b", A) == [], "it is under way to those who wait"
    assert delivered(export(crowd, "a", A, B)) == [("c", (A, B))]
    for request_id in ("1a", "2b", "3c", "4a", "5b"):
        assert crowd.end_request(request_id, 0.0) == []


def test_the_next_one_may_stall_too(crowd: Directory) -> None:
    silence(crowd)
    assert admit_at(crowd, "b", "6b", A, B).prefill_awaited == (A, B), "now b waits for what it computes"
    assert silence(crowd, since=PATIENCE_S) == [Lost("c", (A, B))], "not 4a, whose worker has stalled before"
    assert silence(crowd, since=2 * PATIENCE_S) == [], "nobody is left: who waits helps itself"


def test_who_sends_now_and_then_has_not_stalled(crowd: Directory) -> None:
    crowd.stock.supply.replace_stalled(0.0, PATIENCE_S)
    export(crowd, "a", A)
    assert silence(crowd, since=PATIENCE_S) == [Lost("b", (B,))]


def test_an_export_that_does_not_come_is_computed_by_one(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    join(directory, "d", Role.DECODE, A, B)
    for worker_id in ("p", "q"):
        join(directory, worker_id, Role.PREFILL)
    assert {admit(directory, name, A, B, C)[0].prefill for name in ("r", "s")} == {"p", "q"}
    first = directory._reservations["r"].admission.prefill
    assert silence(directory) == [Lost(first, (A, B))]
    assert delivered(export(directory, "d", A, B)) == [("q" if first == "p" else "p", (A, B))]


def test_who_waits_for_its_turn_at_a_busy_worker_has_not_stalled(crowd: Directory) -> None:
    for now in range(4 * int(PATIENCE_S)):
        seal(crowd, "a", b"of another %d" % now)
        assert crowd.stock.supply.replace_stalled(now, PATIENCE_S) == []
    assert silence(crowd, since=4 * PATIENCE_S) == [Lost("b", (A, B))], "it stands still now"


def test_a_worker_that_exports_slowly_has_not_stalled(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    join(directory, "d", Role.DECODE, A, B)
    join(directory, "p", Role.PREFILL)
    assert admit(directory, "r", A, B, C)[1] == [Export("d", (A, B))]
    directory.stock.supply.replace_stalled(0.0, PATIENCE_S)
    export(directory, "d", A)
    assert silence(directory, since=PATIENCE_S) == [Lost("p", (B,))]


def test_where_only_the_stalled_worker_could_compute_nothing_changes(split: Directory) -> None:
    admit(split, "r", A, B)
    admit(split, "s", A, B)
    assert silence(split) == []
    assert split.end_request("r", 0.0) == [Export("p", (A, B))]
    assert split.export_failed("p", 1, [A, B]) == [Lost("p", (A, B))], "s takes over, d waits on"


def test_who_waits_itself_is_not_to_blame(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    for request_id, worker_id, hashes in (("1", "a", (A,)), ("2", "b", (A, B)), ("3", "c", (A, B, C))):
        join(directory, worker_id, Role.MIXED)
        assert admit(directory, request_id, *hashes)[0].prefill == worker_id
    assert silence(directory) == [Lost("b", (A,))], "c waits on for A and B"
    [lost] = silence(directory, since=PATIENCE_S)
    assert isinstance(lost, Lost) and (lost.worker_id, {*lost.hashes}) == ("c", {A, B})


@pytest.fixture
def behind(make_directory: MakeDirectory) -> Directory:
    """2a is to compute B when it has got A, which 1a is to compute."""
    directory = make_directory()
    for worker_id in "abc":
        join(directory, worker_id, Role.MIXED)
    admit_at(directory, "a", "1a", A)
    admit_at(directory, "a", "2a", A, B)
    return directory


def test_nobody_waits_for_those_who_wait_for_a_later_one(behind: Directory) -> None:
    """Otherwise 2a would wait for A of 3b, and 3b for B of 2a."""
    assert admit_at(behind, "b", "3b", A, B, C).prefill_awaited == (A, B)
    assert silence(behind) == [Lost("b", (A, B))]


def test_who_waits_for_them_later_waits_only_so_long(behind: Directory) -> None:
    """4c comes to wait for B of 2a, and 2a, when 3b has left, for A of 4c."""
    admit_at(behind, "b", "3b", A)
    assert silence(behind) == [Lost("b", (A,))]
    assert admit_at(behind, "c", "4c", A, B, C).prefill_awaited == (A, B)
    behind.end_request("3b", 0.0)
    assert behind.export_failed("b", 1, [A]) == [Lost("c", (A,))]
    assert silence(behind, since=PATIENCE_S) == [Lost("c", (B,))]


def test_a_decode_worker_waits_on_for_its_own_request(split: Directory) -> None:
    admit(split, "r", A, B)
    assert silence(split) == []
    assert delivered(export(split, "p", A, B)) == [("d", (A, B))]


def test_a_decode_worker_may_take_over_from_the_prefill_worker(make_directory: MakeDirectory) -> None:
    """What is not shared is too short to be handed over."""
    directory = make_directory(piggyback_tokens=4)
    join(directory, "p", Role.PREFILL)
    join(directory, "d", Role.DECODE)
    assert admit(directory, "r", A, B)[0].prefill == "p"
    directory.fleet.measured("p", 1, WorkerCosts(1.0, 1.0, 1.0), 100)
    assert admit(directory, "s", A, B)[0].prefill == "d"
    assert silence(directory) == [Lost("d", (A, B))]


# The budget of exported bytes


def test_the_least_recently_used_segment_goes_first(make_directory: MakeDirectory) -> None:
    directory = make_directory(segment_budget_bytes=30)
    join(directory, "p", Role.PREFILL)
    for block in (A, b"x", b"y"):
        export(directory, "p", block)
    admit(directory, "r", A)
    directory.end_request("r", 0.0)
    export(directory, "p", b"z")
    assert directory.stock.segments.store_bytes == 30
    assert delivered(admit(directory, "r", A)[1]) == [("p", (A,))]
    assert admit(directory, "r2", b"x")[1] == [], "dropped, and known to nobody"


def test_a_leased_segment_stays_over_the_budget(make_directory: MakeDirectory) -> None:
    directory = make_directory(segment_budget_bytes=20)
    join(directory, "p", Role.PREFILL)
    export(directory, "p", A, B)
    admit(directory, "r", A, B)
    export(directory, "p", b"x", b"y")
    assert directory.stock.segments.store_bytes == 20, "the one that nobody leases went"
    assert delivered(admit(directory, "r2", A, B)[1]) == [("p", (A, B))]
    directory.end_request("r", 0.0)
    directory.end_request("r2", 0.0)
    export(directory, "p", b"x", b"y")
    assert admit(directory, "r3", A, B)[1] == []


def test_without_a_budget_segments_pass_through(make_directory: MakeDirectory) -> None:
    directory = make_directory(segment_budget_bytes=0)
    join(directory, "p", Role.PREFILL)
    join(directory, "d", Role.DECODE)
    admit(directory, "r", A)
    assert delivered(export(directory, "p", A)) == [("d", (A,))]
    assert len(directory.stock.segments) == directory.stock.segments.store_bytes == 0


def test_a_segment_that_cannot_be_read_is_promised_to_nobody(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    join(directory, "p", Role.PREFILL)
    export(directory, "p", A)
    (instruction,) = admit(directory, "r", A)[1]
    assert isinstance(instruction, DeliverSegment)
    directory.stock.lost(instruction.segment.segment_id, 0.0)
    directory.stock.lost(instruction.segment.segment_id, 0.0)
    assert len(directory.stock.segments) == directory.stock.segments.store_bytes == len(directory.stock.blocks) == 0
    assert admit(directory, "r2", A)[1] == []
    assert directory.end_request("r", 0.0) == directory.end_request("r2", 0.0) == []


# What is remembered


def sources(directory: Directory, request_id: str) -> list[BlockSource]:
    ((*_, last),) = directory.decisions.of(request_id).values()
    return [source for source, count in last.runs for _ in range(count)]


def test_hits_and_misses_have_a_source_or_a_reason(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    join(directory, "m", Role.MIXED)
    admit(directory, "new", A, B)
    assert sources(directory, "new") == [BlockSource.NEVER_SEEN] * 2
    assert sources_of_admission(directory, "same", A, B) == [BlockSource.PENDING] * 2
    export(directory, "m", A)
    seal(directory, "m", B)
    assert sources_of_admission(directory, "fork", A, b"ax") == [BlockSource.STORE, BlockSource.DIVERGED]
    seal(directory, "m", A)
    assert sources_of_admission(directory, "again", A, B) == [BlockSource.LOCAL] * 2
    evict(directory, "m", B)
    for request_id in ("new", "same", "fork", "again"):
        directory.end_request(request_id, 0.0)
    assert sources_of_admission(directory, "late", A, B) == [BlockSource.LOCAL, BlockSource.EVICTED]
    assert directory.statistics.sources[BlockSource.LOCAL] == 3
    assert directory.statistics.evicted_blocks[EvictionReason.FULL] == 1


def test_an_eviction_has_its_time_and_the_room_that_would_have_prevented_it(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    join(directory, "m", Role.MIXED)

    def asked(name: str, now: float, *hashes: BlockHash) -> Decision:
        directory.admit(AdmitRequest(name, 0, hashes, len(hashes) * 4 + 2), now)
        directory.end_request(name, now)
        [[decision]] = directory.decisions.of(name).values()
        return decision

    assert asked("first", 100.0, A, B).eviction is None, "nobody has had it"
    seal(directory, "m", A, B)
    assert asked("hit", 150.0, A, B).eviction is None
    evict(directory, "m", B, A)
    asked("other", 180.0, C)
    seal(directory, "m", C)
    evict(directory, "m", C)
    late = asked("late", 200.0, A, B)
    assert late.eviction == Eviction(at=150.0, num_more_blocks=3) and late.evicted_ago_s == 50.0
    assert late.as_json()["evicted"] == {"ago_s": 50.0, "more_blocks": 3}
    assert "50 s before" in str(late.why) and "3 more blocks" in str(late.why)
    only = asked("only", 210.0, C)
    assert only.eviction == Eviction(at=180.0, num_more_blocks=1), "the last one that left"


def test_blocks_that_went_with_their_worker_were_not_evicted(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    join(directory, "m", Role.MIXED)
    seal(directory, "m", A, B)
    directory.remove_worker("m")
    join(directory, "n", Role.MIXED)
    assert sources_of_admission(directory, "r", A, B) == [BlockSource.LOST] * 2
    assert directory.statistics.num_returned_blocks == 0, "more room would not have kept them"


def test_an_earlier_answer_that_may_have_reasoned_is_named_as_the_reason(make_directory: MakeDirectory) -> None:
    """Turns of a chat whose answers reasoned; the second prompt's question begins behind its last full block."""
    directory = make_directory()
    join(directory, "m", Role.MIXED)

    def missed(
        name: str, turn: int | None, *hashes: BlockHash, tenant: str = "t", attempt: int = 0
    ) -> list[BlockSource]:
        request = AdmitRequest(
            name, attempt, hashes, len(hashes) * 4 + 2, cache=CacheHints(tenant), reasoning_turn=turn
        )
        directory.admit(request, 0.0)
        directory.end_request(name, 0.0)
        return sources(directory, name)

    assert missed("first", 0, A) == [BlockSource.NEVER_SEEN]
    seal(directory, "m", A)
    assert missed("another question", 0, A, b"ay") == [BlockSource.LOCAL, BlockSource.NEVER_SEEN]
    assert missed("of another tenant", 1, A, b"az", tenant="u") == [BlockSource.LOCAL, BlockSource.NEVER_SEEN]
    assert missed("no reasoning", None, A, b"aw") == [BlockSource.LOCAL, BlockSource.DIVERGED]
    expected = [BlockSource.LOCAL, BlockSource.REASONING_LEFT_OUT, BlockSource.NEVER_SEEN]
    assert missed("second", 1, A, B, C) == expected
    seal(directory, "m", B, C)
    assert missed("second, asked otherwise", 1, A, B, C, b"abcx") == [BlockSource.LOCAL] * 3 + [BlockSource.NEVER_SEEN]
    assert missed("third", 2, A, B, C, D) == [BlockSource.LOCAL] * 3 + [BlockSource.REASONING_LEFT_OUT]
    assert missed("third, failed over", 2, A, B, C, attempt=1) == [BlockSource.LOCAL] * 3
    seal(directory, "m", D)
    evict(directory, "m", D)
    assert missed("again", 2, A, B, C, D) == [BlockSource.LOCAL] * 3 + [BlockSource.EVICTED]
    assert directory.statistics.sources[BlockSource.REASONING_LEFT_OUT] == 2


def test_what_a_pool_loses_counts_once_and_for_its_reason(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    join(directory, "m", Role.MIXED, A, B, C)
    start = directory.stock.blocks.events_since(None).next_sequence
    lost = [(A, EvictionReason.FULL), (B, EvictionReason.EXPIRED), (A, EvictionReason.RESET), (D, EvictionReason.FULL)]
    directory.blocks_changed("m", 1, (), lost)
    assert directory.statistics.evicted_blocks == {"reset": 1, "expired": 1}
    assert [event.block_hash for event in directory.stock.blocks.events_since(start).events] == [A, B]
    report = cache_report(directory, "", is_admin=True)["evicted_blocks"]
    assert json.loads(orjson.dumps(report)) == {"reset": 1, "expired": 1}


def sources_of_admission(directory: Directory, request_id: str, *hashes: BlockHash) -> list[BlockSource]:
    admit(directory, request_id, *hashes)
    return sources(directory, request_id)


def test_a_decision_knows_what_came_of_it(split: Directory) -> None:
    admit(split, "r", A)
    decision = split.first_token("r", 0, 0.5)
    assert decision is not None and decision.ttft_s == 0.5
    assert split.first_token("unknown", 0, 0.5) is None
    assert split.first_token("r", 1, 0.5) is None, "another attempt"
    split.decisions.ended(Ended("r", 1, Outcome.FAILED))
    split.decisions.ended(
        Ended("r", 0, Outcome.FINISHED, num_preemptions=2, drafts=(DraftUse(DraftSource.PAST, 9, 7),))
    )
    shown = decision.as_json()
    assert (shown["prefill_worker"], shown["decode_worker"], shown["preemptions"]) == ("p", "d", 2)
    assert shown["ended"] == "finished" and shown["actual_ttft_s"] == 0.5
    assert shown["drafts"] == {"past": {"drafted": 9, "accepted": 7}}


def test_a_decision_names_the_adapter(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    join(directory, "m", Role.MIXED)
    admit(directory, "plain", A)
    directory.admit(AdmitRequest("adapted", 0, (B,), 6, adapter="org/sql"), 0.0)
    shown = [explained(directory, name, None, 0.0)[0]["attempts"][0]["adapter"] for name in ("plain", "adapted")]  # type: ignore[index]
    assert shown == [None, "org/sql"]


def test_an_attempt_that_is_admitted_again_has_one_decision(split: Directory) -> None:
    admit(split, "r", A)
    split.remove_worker("d")
    admit(split, "r", A)
    admit(split, "r", A, attempt=1)
    [decisions] = split.decisions.of("r").values()
    assert [(each.attempt, each.decode) for each in decisions] == [(0, "p"), (1, "p")]


def test_what_is_stored_and_removed_can_be_followed(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    join(directory, "p", Role.PREFILL)
    join(directory, "d", Role.DECODE)
    start = directory.stock.blocks.events_since(None)
    assert start.snapshot == () and start.next_sequence == 0
    seal(directory, "p", A, B)
    seal(directory, "d", A)
    evict(directory, "p", A, B)
    update = directory.stock.blocks.events_since(start.next_sequence)
    assert [(event.is_stored, event.block_hash) for event in update.events] == [(True, A), (True, B), (False, B)]
    assert [event.sequence for event in update.events] == [0, 1, 2] and update.next_sequence == 3
    seen = directory.stock.blocks.events_since(3)
    assert seen.events == () and seen.snapshot is None
    assert directory.stock.blocks.events_since(99).snapshot == (A,), "another manager's number"


def test_workers_with_other_arithmetic_are_refused(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    assert directory.fleet.fingerprint is None
    directory.register("a", Role.MIXED, 1, 10, (), fingerprint="m/cpu-avx2")
    assert directory.fleet.fingerprint == "m/cpu-avx2"
    assert directory.fleet.refusal("b", "m/cpu-avx2") is None
    refusal = directory.fleet.refusal("b", "m/cpu-avx512")
    assert refusal is not None
    assert "m/cpu-avx2" in refusal and "m/cpu-avx512" in refusal
    assert directory.fleet.refusal("a", "m/cpu-avx512") is None, "the only worker may come back as another"
    directory.remove_worker("a")
    assert directory.fleet.refusal("b", "m/cpu-avx512") is None


def test_avoided_workers_get_a_request_only_if_there_are_no_others(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    for name in ("p", "d1", "d2"):
        join(directory, name, Role.PREFILL if name == "p" else Role.DECODE)
    seal(directory, "d1", A)

    def decode(request_id: str, *avoided: str) -> str:
        return directory.admit(AdmitRequest(request_id, 0, (A,), 6, session="s", avoided=avoided), 0.0)[0].decode

    assert decode("r", "d1") == "d2"
    assert decode("s", "d1", "d2") == "p", "a prefill worker decodes as well, if nobody else can"
    assert decode("t", "d1", "d2", "p") in ("d1", "d2"), "better than nobody"


@pytest.mark.parametrize("is_sealed", [False, True], ids=["computing", "computed"])
def test_a_request_does_not_wait_for_blocks_of_an_avoided_worker(
    make_directory: MakeDirectory, *, is_sealed: bool
) -> None:
    """The worker may stand still in the middle of this very request, and would be waited for until it counts as
    stalled."""
    directory = make_directory()
    for name, role in (("p", Role.PREFILL), ("q", Role.PREFILL), ("d", Role.DECODE)):
        join(directory, name, role)
    first, _ = admit(directory, "r", A, B)
    stands_still, other = first.prefill, "q" if first.prefill == "p" else "p"
    if is_sealed:
        seal(directory, stands_still, A, B)

    again, instructions = directory.admit(AdmitRequest("r", 1, (A, B), 10, avoided=(stands_still,)), 0.0)
    assert again.prefill == other
    assert instructions[-1] == Lost(other, (A, B)), "it computes what it was to wait for"
    assert delivered(export(directory, other, A, B)) == [("d", (A, B))]


def test_a_leaving_worker_gets_no_requests_and_gives_its_blocks_away(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    join(directory, "m", Role.MIXED, A, B)
    join(directory, "n", Role.MIXED, D)
    admission, _ = admit(directory, "before", A)
    assert admission.prefill == "m", "the block is there"

    assert directory.leave("m") == [Export("m", (A, B))]
    assert directory.leave("m") == []
    assert directory.fleet.leaving == {"m"}
    assert not directory.has_left("m"), "the export is under way"
    export(directory, "m", A, B)
    assert directory.leave("m") == []
    assert not directory.has_left("m"), "a request is there"
    directory.end_request("before", 0.0)
    assert directory.has_left("m")

    admission, instructions = admit(directory, "after", A, B, C)
    assert (admission.prefill, admission.decode) == ("n", "n")
    assert delivered(instructions) == [("n", (A, B))]
    directory.remove_worker("m")
    assert directory.fleet.leaving == frozenset() and not directory.has_left("m"), "unknown"
    assert directory.leave("m") == []


def test_a_leaving_prefill_worker_is_needed_up_to_the_handover(split: Directory) -> None:
    join(split, "p2", Role.PREFILL)
    admission, _ = admit(split, "r", A)
    leaving = admission.prefill
    split.leave(leaving)
    assert not split.has_left(leaving)
    split.first_token("r", 0, 0.1)
    assert not split.has_left(leaving), "its KV is still on the way"
    export(split, leaving, A, handover=Handover("r", 0, 7, None))
    assert split.has_left(leaving), "its decode worker does not need it any more"


def test_a_leaving_worker_stays_while_it_sends_blocks_for_requests_that_move(make_directory: MakeDirectory) -> None:
    """Here nothing is exported for the leaving itself: the object store has no room."""
    for answer in (export, fail_export):
        directory = make_directory(segment_budget_bytes=0)
        join(directory, "m", Role.MIXED, A)
        join(directory, "n", Role.MIXED)
        assert directory.leave("m") == [] and directory.has_left("m")
        admission, instructions = admit(directory, "moves", A, B)
        assert admission.prefill == "n" and Export("m", (A,)) in instructions
        assert not directory.has_left("m")
        answer(directory, "m", A)
        assert directory.has_left("m")


def test_the_leaving_of_a_worker_asks_no_other_one(make_directory: MakeDirectory) -> None:
    directory = make_directory(disk_budget_bytes=100)
    join(directory, "m", Role.MIXED, A)
    join(directory, "n", Role.MIXED, B, C)
    assert directory.leave("m") == [Export("m", (A,))]
    assert directory.save() == [Export("n", (B, C))], "at its own pace"


def test_blocks_that_only_leaving_workers_hold_are_given_away_by_the_last(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    join(directory, "m", Role.MIXED, A)
    join(directory, "n", Role.MIXED, A)
    join(directory, "o", Role.MIXED)
    assert directory.leave("m") == []
    assert directory.leave("n") == [Export("n", (A,))]


def test_a_leaving_worker_gives_away_as_much_as_the_store_holds(make_directory: MakeDirectory) -> None:
    directory = make_directory(segment_budget_bytes=20)
    join(directory, "m", Role.MIXED, A, B, C)
    assert directory.leave("m") == [Export("m", (A, B))]


def test_a_leaving_worker_gives_all_to_the_disk_that_was_to_go_there(make_directory: MakeDirectory) -> None:
    directory = make_directory(segment_budget_bytes=20, disk_budget_bytes=100)
    join(directory, "m", Role.MIXED, A, B, C)
    assert directory.leave("m") == [Export("m", (A, B, C))]


def test_requests_go_to_a_leaving_worker_if_there_is_no_other_and_to_an_avoided_one_last(
    make_directory: MakeDirectory,
) -> None:
    directory = make_directory()
    join(directory, "m", Role.MIXED)
    directory.leave("m")
    assert admit(directory, "alone")[0].prefill == "m"
    join(directory, "n", Role.MIXED)
    request = AdmitRequest("silent", 0, (A,), 6, avoided=("n",))
    assert directory.admit(request, 0.0)[0].prefill == "m", "leaving is better than silent"
    assert admit(directory, "other")[0].prefill == "n"


def test_a_worker_that_registers_again_is_not_leaving(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    join(directory, "m", Role.MIXED)
    directory.leave("m")
    join(directory, "m", Role.MIXED, epoch=2)
    assert directory.fleet.leaving == frozenset()
    directory.leave("unknown")
    assert directory.fleet.leaving == frozenset()


def test_a_session_without_room_waits_for_its_turn(make_directory: MakeDirectory) -> None:
    directory = make_directory(turns=TurnLimits(quantum_s=10.0))
    join(directory, "w", Role.MIXED)
    directory.fleet.measured("w", 1, None, 5, 5, num_blocks=5)
    for name in ("a", "b"):
        admit(directory, name, *prompt(name, 2))
        directory.end_request(name, 0.0)
    admit(directory, "a1", *prompt("a", 3))
    admit(directory, "single", *prompt("c", 3))
    with pytest.raises(PausedError) as raised:
        admit(directory, "b1", *prompt("b", 3))
    assert raised.value.paused.num_placed == 1
    assert directory.num_reservations == 2, "who waits holds nothing"

    [choice] = explained(directory, "b1", None, 1.0)
    assert choice["attempts"] == [] and choice["paused"] == {
        "why": PAUSED_WHY,
        "ahead": 0,
        "placed": 1,
        "blocks": 4,
        "paused_s": 1.0,
    }
    assert explained(directory, "b1", "another tenant", 1.0) == []

    directory.sessions.stopped("a1", FinishReason.STOP)
    directory.end_request("a1", 1.0)
    directory.first_token("single", 0, 0.1)
    directory.admit(AdmitRequest("b1", 0, prompt("b", 3), 14), 1.5)
    [choice] = explained(directory, "b1", None, 2.0)
    [attempt] = orjson.loads(orjson.dumps(choice))["attempts"]
    assert choice["paused"] is None
    assert attempt["session"] == {"requests": 2, "blocks": 4, "pauses": 1, "paused_s": 1.5, "branch": None}


def test_a_branch_names_the_answer_that_it_left(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    join(directory, "w", Role.MIXED)
    admit(directory, "chatcmpl-main-0-aa", *prompt("a", 3))
    admit(directory, "chatcmpl-sub-0-aa", *prompt("a", 5))
    [choice] = explained(directory, "chatcmpl-sub", None, 1.0)
    [attempt] = orjson.loads(orjson.dumps(choice))["attempts"]
    assert attempt["session"]["branch"] == {"of": "chatcmpl-main", "blocks": 3}


@pytest.fixture
def waiting(make_directory: MakeDirectory) -> Directory:
    """One session, of the request a1, has its turn; b1 waits for another session's."""
    directory = make_directory(turns=TurnLimits(quantum_s=10.0))
    join(directory, "w", Role.MIXED)
    directory.fleet.measured("w", 1, None, 5, 5, num_blocks=5)
    for name in ("a", "b"):
        admit(directory, name, *prompt(name, 2))
        directory.end_request(name, 0.0)
    admit(directory, "a1", *prompt("a", 3))
    directory.first_token("a1", 0, 0.1)
    with pytest.raises(PausedError):
        admit(directory, "b1", *prompt("b", 3))
    return directory


def test_a_waiting_request_asks_by_its_id_until_it_may_go_on(waiting: Directory) -> None:
    assert waiting.ask_again(["b1", "unknown"], 1.0) == [Paused(0, 1, 4, 1.0), None]
    waiting.sessions.stopped("a1", FinishReason.STOP)
    waiting.end_request("a1", 1.0)
    assert waiting.ask_again(["b1"], 1.5) == [None]
    admit(waiting, "b1", *prompt("b", 3))
    assert waiting.turns.num_paused == 0


def test_sessions_that_wait_keep_their_turn_while_there_is_no_worker(waiting: Directory) -> None:
    """A worker dies, and another one starts half a minute later: whoever has waited longest goes on first."""
    waiting.end_request("a1", 1.0)
    waiting.remove_worker("w")
    for now in (2.0, 15.0, 31.0):
        assert waiting.ask_again(["b1"], now) == [None]
        with pytest.raises(NoWorkerError):
            waiting.admit(AdmitRequest("b1", 0, prompt("b", 3), 14), now)
    [choice] = explained(waiting, "b1", None, 31.0)
    paused = choice["paused"]
    assert isinstance(paused, dict) and paused["paused_s"] == 31.0

    waiting.register("x", Role.MIXED, 1, 10, (), num_blocks=5)
    with pytest.raises(PausedError) as raised:
        waiting.admit(AdmitRequest("a2", 0, prompt("a", 3), 14), 32.0)
    assert raised.value.paused.num_ahead == 1, "its place is gone with the worker, and b1 came before"
    assert waiting.ask_again(["b1", "a2"], 32.5)[0] is None
    waiting.admit(AdmitRequest("b1", 0, prompt("b", 3), 14), 33.0)
    assert waiting.turns.num_paused == 1
    # Who does not ask while there is a worker is forgotten as ever.
    assert waiting.ask_again(["unknown"], 33.0 + SILENT_S) == [None]
    assert waiting.turns.num_paused == 0


def test_a_waiting_request_whose_client_leaves_waits_no_more(waiting: Directory) -> None:
    waiting.end_request("b1", 1.0)
    assert waiting.turns.num_paused == 0 and explained(waiting, "b1", None, 1.0) == []


def test_nobody_waits_once_turns_are_switched_off(waiting: Directory) -> None:
    """No session is tied to the worker of its place any more, either."""
    waiting.change_limits(16, waiting.costs.prior, ())
    assert waiting.turns.num_paused == waiting.turns.num_placed == 0
    assert waiting.ask_again(["b1"], 1.0) == [None]
    admit(waiting, "b1", *prompt("b", 3))


def test_a_failover_a_late_prompt_and_a_worker_of_unknown_size_wait_for_no_turn(make_directory: MakeDirectory) -> None:
    directory = make_directory(turns=TurnLimits(quantum_s=10.0))
    join(directory, "w", Role.MIXED)
    for name in ("a", "b"):
        admit(directory, name, *prompt(name, 2))
        directory.end_request(name, 0.0)
    for name in ("a1", "b1"):
        admit(directory, name, *prompt(name[0], 3))
        directory.end_request(name, 0.0)
    directory.fleet.measured("w", 1, None, 5, 5, num_blocks=5)
    admit(directory, "a2", *prompt("a", 4))
    directory.admit(AdmitRequest("b2", 0, prompt("b", 4), 18, priority=LATE_PRIORITY), 0.0)
    directory.end_request("b2", 0.0)
    admit(directory, "b2", *prompt("b", 4), attempt=1)
    assert directory.num_reservations == 2


def test_a_place_follows_its_session_while_nobody_waits(make_directory: MakeDirectory) -> None:
    directory = make_directory(turns=TurnLimits(quantum_s=10.0))
    for worker_id in ("v", "w"):
        join(directory, worker_id, Role.MIXED)
        directory.fleet.measured(worker_id, 1, None, 20, 20, num_blocks=20)
    admit(directory, "a", *prompt("a", 2))
    directory.end_request("a", 0.0)
    at = admit(directory, "a1", *prompt("a", 3))[0].decode
    [session] = directory.sessions
    assert directory.turns.place_of(session) == at
    directory.end_request("a1", 0.0)
    directory.admit(AdmitRequest("a2", 0, prompt("a", 3), 14, avoided=(at,)), 1.0)
    assert directory.turns.place_of(session) == ({"v", "w"} - {at}).pop()


def test_a_session_stays_at_its_place_while_others_wait(make_directory: MakeDirectory) -> None:
    """The other worker is idle, but its room is another session's."""
    directory = make_directory(turns=TurnLimits(quantum_s=10.0))
    for worker_id in ("v", "w"):
        join(directory, worker_id, Role.MIXED)
        directory.fleet.measured(worker_id, 1, None, 5, 5, num_blocks=5)
    places: dict[str, str] = {}
    for name in ("a", "b", "c"):
        admit(directory, name, *prompt(name, 2))
        directory.end_request(name, 0.0)
    for name in ("a", "b"):
        places[name] = admit(directory, f"{name}1", *prompt(name, 3))[0].prefill
    assert {*places.values()} == {"v", "w"}
    with pytest.raises(PausedError):
        admit(directory, "c1", *prompt("c", 3))
    directory.end_request("a1", 0.0)
    admit(directory, "single", *prompt("d", 40))
    assert admit(directory, "a2", *prompt("a", 3))[0].prefill == places["a"]


STATE_BYTES = 1000


@pytest.fixture
def with_states(make_directory: MakeDirectory) -> Directory:
    """Workers of a model with recurrent states: the one that decodes has blocks, and a state behind the second."""
    directory = make_directory()
    directory.register("p", Role.PREFILL, 1, 10, (), state_bytes=STATE_BYTES)
    directory.register("d", Role.DECODE, 1, 10, (A, B, C, state_hash(B)), state_bytes=STATE_BYTES)
    return directory


def test_a_worker_imports_blocks_and_the_state_behind_them(with_states: Directory) -> None:
    admission, instructions = admit(with_states, "r", A, B, C, D)
    assert (admission.prefill, admission.prefill_awaited, admission.prefill_states) == ("p", (A, B), (state_hash(B),))
    assert admission.decode == "d" and admission.decode_awaited == (D,)
    assert instructions == [Export("d", (A, B, state_hash(B)))]
    [decision] = with_states.decisions.of("r")["r"]
    assert decision.runs == (("worker", 2), ("no_state", 1), ("never_seen", 1))
    # All that is asked for comes in one segment, and goes to the worker that waits; it stays for others.
    header = SegmentHeader("model", (A, B), 1020, 0, states=(Snapshot(state_hash(B), (A, B)),), state_bytes=STATE_BYTES)
    assert delivered(with_states.segment_exported("d", 1, header, "ref", 0.0)) == [("p", (A, B))]
    with_states.remove_worker("d")
    with_states.check_integrity()
    again, _ = admit(with_states, "again", A, B, C, D)
    assert again.prefill_states == (state_hash(B),)
    assert with_states.decisions.of("again")["again"][0].runs[0] == ("store", 2)
    # The pool has the blocks already, and lacks the state alone.
    seal(with_states, "p", A, B)
    with_states.end_request("again", 0.0)
    third, _ = admit(with_states, "third", A, B, C, D)
    assert (third.prefill_awaited, third.prefill_states) == ((), (state_hash(B),))
    assert with_states.decisions.of("third")["third"][0].runs[0] == ("local", 2)
    with_states.check_integrity()


def test_a_state_that_is_lost_is_awaited_no_longer(with_states: Directory) -> None:
    admit(with_states, "r", A, B, C)
    assert fail_export(with_states, "d", state_hash(B)) == [Lost("p", (state_hash(B),))]
    with_states.check_integrity()


def test_a_state_that_costs_more_than_it_saves_stays_where_it_is(with_states: Directory) -> None:
    with_states.costs = replace(with_states.costs, state_bytes=10**12)
    admission, instructions = admit(with_states, "r", A, B, C)
    assert (admission.prefill_awaited, admission.prefill_states, instructions) == ((), (), [])
    assert with_states.decisions.of("r")["r"][0].runs == (("recomputed", 2), ("no_state", 1))
