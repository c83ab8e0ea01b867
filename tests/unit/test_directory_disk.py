"""What the directory puts on disk, finds there, and gives up. Blocks have ten bytes."""

from collections.abc import Callable

import pytest

from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.manager.explain import BlockSource
from raydix.engine.core.manager.instructions import (
    DeliverSegment,
    EraseFile,
    Export,
    Instruction,
    Lost,
    ReadFile,
    WriteFile,
)
from raydix.engine.core.manager.stock import MIN_SAVED_BLOCKS
from raydix.engine.core.types import AdmitRequest, BlockHash, EvictionReason, Handover, Role, SegmentHeader

MakeDirectory = Callable[..., Directory]

A, B, C, D = b"a", b"ab", b"abc", b"abcd"
UNBOUNDED = 10_000


def file_of(*hashes: BlockHash) -> SegmentHeader:
    return SegmentHeader("model", hashes, len(hashes) * 10, 0)


@pytest.fixture
def make(make_directory: MakeDirectory) -> MakeDirectory:
    """Builds directories with a prefill and a decode worker."""

    def make(segment_budget_bytes: int = UNBOUNDED, disk_budget_bytes: int = UNBOUNDED) -> Directory:
        directory = make_directory(segment_budget_bytes, disk_budget_bytes)
        directory.register("p", Role.PREFILL, 1, 10, ())
        directory.register("d", Role.DECODE, 1, 10, ())
        return directory

    return make


def export(directory: Directory, *hashes: BlockHash, tail: bool = False) -> list[Instruction]:
    handover = Handover("r", 0, 7, hashes[-1]) if tail else None
    header = SegmentHeader("model", hashes, len(hashes) * 10, 0, handover)
    return directory.segment_exported("p", 1, header, "ref", 0.0)


def write(directory: Directory, *hashes: BlockHash) -> None:
    """Export blocks and have them on disk."""
    [instruction] = [i for i in export(directory, *hashes) if isinstance(i, WriteFile)]
    assert directory.stock.segments.written(instruction.segment.segment_id, file_of(*hashes), 0.0) == []


def ask(directory: Directory, request_id: str, *hashes: BlockHash) -> list[Instruction]:
    return directory.admit(AdmitRequest(request_id, 0, hashes, len(hashes) * 4 + 2), 0.0)[1]


def source_of_first_block(directory: Directory, request_id: str) -> BlockSource:
    [[decision]] = directory.decisions.of(request_id).values()
    return decision.runs[0][0]


def test_without_a_disk_nothing_is_written(make: MakeDirectory) -> None:
    directory = make(disk_budget_bytes=0)
    assert export(directory, A, B) == []
    directory.blocks_changed("d", 1, [C], ())
    assert directory.save() == []


def test_what_leaves_the_object_store_is_hit_on_disk(make: MakeDirectory) -> None:
    directory = make(segment_budget_bytes=20)
    write(directory, A, B)
    write(directory, C, D)
    assert (directory.stock.segments.store_bytes, directory.stock.segments.disk_bytes) == (20, 40)
    instructions = ask(directory, "r", A, B)
    [read] = instructions
    assert isinstance(read, ReadFile) and read.segment.header == file_of(A, B)
    assert source_of_first_block(directory, "r") is BlockSource.DISK
    delivered = directory.stock.read(read.segment.segment_id, "ref again", 0.0)
    assert {i.worker_id for i in delivered if isinstance(i, DeliverSegment)} == {"p", "d"}
    assert read.segment.ref == "ref again"
    ask(directory, "s", A, B)
    assert source_of_first_block(directory, "s") is BlockSource.STORE


def test_a_segment_that_is_being_written_stays_in_the_store(make: MakeDirectory) -> None:
    directory = make(segment_budget_bytes=0)
    [instruction] = export(directory, A, B)
    assert isinstance(instruction, WriteFile) and directory.stock.segments.store_bytes == 20
    directory.stock.segments.written(instruction.segment.segment_id, file_of(A, B), 0.0)
    assert (directory.stock.segments.store_bytes, len(directory.stock.segments)) == (0, 1)


def test_what_cannot_be_written_is_as_without_a_disk(make: MakeDirectory) -> None:
    directory = make(segment_budget_bytes=0)
    [instruction] = export(directory, A, B)
    assert isinstance(instruction, WriteFile)
    directory.stock.segments.written(instruction.segment.segment_id, None, 0.0)
    assert (len(directory.stock.segments), len(directory.stock.blocks), directory.stock.segments.disk_bytes) == (
        0,
        0,
        0,
    )


def test_a_tail_is_not_written(make: MakeDirectory) -> None:
    directory = make(segment_budget_bytes=0)
    [instruction] = export(directory, A, b"tail", tail=True)
    assert isinstance(instruction, WriteFile) and directory.stock.segments.disk_bytes == 20
    directory.stock.segments.written(instruction.segment.segment_id, file_of(A), 0.0)
    assert directory.stock.segments.disk_bytes == 10


def test_the_disk_s_budget_holds_and_the_least_recently_used_goes(make: MakeDirectory) -> None:
    directory = make(segment_budget_bytes=0, disk_budget_bytes=20)
    write(directory, A)
    write(directory, B)
    ask(directory, "r", A)
    directory.end_request("r", 0.0)
    assert [type(i) for i in export(directory, C)] == [EraseFile, WriteFile]
    assert directory.stock.segments.disk_bytes == 20
    assert [i for i in ask(directory, "s", B) if isinstance(i, ReadFile)] == []
    assert source_of_first_block(directory, "s") is BlockSource.EVICTED


def test_more_than_the_disk_holds_is_not_written(make: MakeDirectory) -> None:
    directory = make(disk_budget_bytes=10)
    assert export(directory, A, B) == []


def test_the_end_of_a_prompt_goes_before_its_beginning(make: MakeDirectory) -> None:
    directory = make(segment_budget_bytes=20, disk_budget_bytes=0)
    ask(directory, "r", A, B)
    export(directory, A)
    export(directory, B)
    directory.end_request("r", 0.0)
    export(directory, b"x")
    ask(directory, "s", A, B)
    [[decision]] = directory.decisions.of("s").values()
    assert decision.runs == ((BlockSource.STORE, 1), (BlockSource.EVICTED, 1))


def test_a_file_that_cannot_be_read_now_stays_for_the_next_one(make: MakeDirectory) -> None:
    directory = make(segment_budget_bytes=0)
    write(directory, A, B)
    [read] = ask(directory, "r", A, B)
    assert isinstance(read, ReadFile)
    assert directory.stock.unread(read.segment, 0.0) == [Lost("p", (A, B))], "it computes them, d waits for it"
    assert directory.stock.unread(read.segment, 0.0) == []
    assert ask(directory, "s", A, B) == [read]
    delivered = directory.stock.read(read.segment.segment_id, "ref", 0.0)
    assert {type(i) for i in delivered} == {DeliverSegment} and directory.stock.segments.disk_bytes == 20


def test_of_those_who_wait_for_a_file_in_vain_one_computes(make_directory: MakeDirectory) -> None:
    directory = make_directory(0, UNBOUNDED)
    for worker_id in "pqr":
        directory.register(worker_id, Role.MIXED, 1, 10, ())
    write(directory, A, B)
    (read,), *others = (ask(directory, name, A, B) for name in "123")
    assert isinstance(read, ReadFile) and others == [[], []]
    [lost] = directory.stock.unread(read.segment, 0.0)
    assert isinstance(lost, Lost)
    assert directory.blocks_changed(lost.worker_id, 1, [A, B], ()) == [Export(lost.worker_id, (A, B))]
    header = file_of(A, B)
    receivers = {i.worker_id for i in directory.segment_exported(lost.worker_id, 1, header, "ref", 0.0)}  # type: ignore[union-attr]
    assert receivers == {*"pqr"} - {lost.worker_id}


def test_a_file_that_cannot_be_read_has_no_bearing_on_another_segment(make_directory: MakeDirectory) -> None:
    """Both have A. It comes from the first one, which can be read, so nobody is told to compute it."""
    directory = make_directory(0, UNBOUNDED)
    directory.register("p", Role.MIXED, 1, 10, ())
    write(directory, A)
    write(directory, A, B)
    _, unreadable = ask(directory, "r", A, B)
    assert isinstance(unreadable, ReadFile)
    assert directory.stock.unread(unreadable.segment, 0.0) == [Lost("p", (B,))]


def test_who_computes_instead_of_a_file_may_stall_when_others_wait_later(make_directory: MakeDirectory) -> None:
    directory = make_directory(0, UNBOUNDED)
    for worker_id in "pq":
        directory.register(worker_id, Role.MIXED, 1, 10, ())
    write(directory, A, B)
    for name, told in (("1", [Lost("q", (A, B))]), ("2", [])):
        [read] = ask(directory, name, A, B)
        assert isinstance(read, ReadFile) and directory.stock.unread(read.segment, 0.0) == told
        assert directory.stock.supply.replace_stalled(0.0, 30.0) == []
    assert directory.stock.supply.replace_stalled(30.0, 30.0) == [Lost("p", (A, B))]


def test_who_waits_for_a_file_is_not_to_blame_for_what_it_computes(make: MakeDirectory) -> None:
    directory = make(segment_budget_bytes=0)
    write(directory, A)
    [read] = ask(directory, "r", A, B)
    directory.register("p2", Role.PREFILL, 1, 10, ())
    assert directory.admit(AdmitRequest("s", 0, (A, B), 10), 0.0)[0].prefill == "p2"
    assert directory.stock.supply.replace_stalled(0.0, 30.0) == directory.stock.supply.replace_stalled(30.0, 30.0) == []
    assert isinstance(read, ReadFile)
    directory.stock.read(read.segment.segment_id, "ref", 0.0)
    assert directory.stock.supply.replace_stalled(60.0, 30.0) == []
    assert directory.stock.supply.replace_stalled(90.0, 30.0) == [Lost("p2", (B,))]


def test_what_cannot_be_fetched_stays_on_disk(make: MakeDirectory) -> None:
    directory = make()
    write(directory, A, B)
    deliver = ask(directory, "r", A, B)[0]
    assert isinstance(deliver, DeliverSegment)
    directory.stock.segments.undelivered(deliver.segment, 0.0)
    assert (directory.stock.segments.store_bytes, directory.stock.segments.disk_bytes) == (0, 20)
    [read] = ask(directory, "s", A, B)
    assert isinstance(read, ReadFile)
    directory.stock.read(read.segment.segment_id, "ref again", 0.0)
    directory.stock.segments.undelivered(deliver.segment, 0.0)
    assert directory.stock.segments.store_bytes == 20, "that was about the reference of before"
    for request_id in ("r", "s"):
        directory.end_request(request_id, 0.0)


def test_what_cannot_be_fetched_while_it_is_written_is_kept(make: MakeDirectory) -> None:
    directory = make()
    [instruction] = export(directory, A, B)
    assert isinstance(instruction, WriteFile)
    directory.stock.segments.undelivered(instruction.segment, 0.0)
    assert directory.stock.segments.written(instruction.segment.segment_id, file_of(A, B), 0.0) == []
    directory.stock.segments.undelivered(instruction.segment, 0.0)
    assert (
        len(directory.stock.segments),
        directory.stock.segments.store_bytes,
        directory.stock.segments.disk_bytes,
    ) == (1, 0, 20)


def test_a_file_that_is_written_again_is_not_erased(make: MakeDirectory) -> None:
    """Equal blocks have one file."""
    directory = make()
    [first] = export(directory, A, B)
    directory.stock.segments.reset()
    [second] = export(directory, A, B)
    assert isinstance(first, WriteFile) and isinstance(second, WriteFile)
    assert directory.stock.segments.written(first.segment.segment_id, file_of(A, B), 0.0) == []
    assert directory.stock.segments.written(second.segment.segment_id, file_of(A, B), 0.0) == []
    assert directory.stock.segments.disk_bytes == 20
    directory.stock.segments.reset()
    [third] = export(directory, A, B)
    assert isinstance(third, WriteFile)
    directory.stock.segments.reset()
    assert directory.stock.segments.written(third.segment.segment_id, file_of(A, B), 0.0) == [EraseFile(file_of(A, B))]


def test_a_file_that_is_being_written_again_is_not_erased_when_it_is_found(make: MakeDirectory) -> None:
    directory = make()
    export(directory, A, B)
    assert directory.stock.segments.files_found([file_of(A, B)], 0.0) == []


def test_a_file_that_another_segment_has_too_is_not_erased(make: MakeDirectory) -> None:
    directory = make(segment_budget_bytes=0, disk_budget_bytes=70)
    write(directory, A)
    write(directory, A, B)
    write(directory, C, D)
    assert directory.stock.lost(0, 0.0) == [EraseFile(file_of(A))]
    write(directory, A, B)
    assert [type(i) for i in export(directory, b"x", b"y")] == [WriteFile], "the older (A, B) has made room"
    assert directory.stock.segments.disk_bytes == 60
    assert directory.stock.segments.reset()[1] == [EraseFile(file_of(C, D)), EraseFile(file_of(A, B))]


def test_a_damaged_file_is_erased_and_its_blocks_are_lost(make: MakeDirectory) -> None:
    directory = make(segment_budget_bytes=0)
    write(directory, A, B)
    [read] = ask(directory, "r", A, B)
    assert isinstance(read, ReadFile)
    erased, *lost = directory.stock.lost(read.segment.segment_id, 0.0)
    assert erased == EraseFile(file_of(A, B))
    assert lost == [Lost("p", (A, B))]
    assert directory.stock.segments.disk_bytes == len(directory.stock.segments) == 0
    assert directory.stock.read(read.segment.segment_id, "ref", 0.0) == []
    assert [(i.worker_id, i.segment.header) for i in export(directory, A, B) if isinstance(i, DeliverSegment)] == [
        ("d", file_of(A, B))
    ]


def test_files_are_known_after_a_restart_and_bounded(make: MakeDirectory) -> None:
    directory = make(disk_budget_bytes=30)
    assert directory.stock.segments.files_found([file_of(A), file_of(B), file_of(C, D)], 0.0) == [EraseFile(file_of(A))]
    assert directory.stock.segments.disk_bytes == 30
    [read] = ask(directory, "r", C, D)
    assert isinstance(read, ReadFile) and source_of_first_block(directory, "r") is BlockSource.DISK


def test_a_file_without_anything_new_is_erased(make: MakeDirectory) -> None:
    assert make().stock.segments.files_found([file_of(A, B), file_of(A)], 0.0) == [EraseFile(file_of(A))]


def test_what_nobody_exports_is_saved_in_batches_or_when_the_worker_is_idle(make: MakeDirectory) -> None:
    directory = make()
    directory.blocks_changed("d", 1, [C, D], ())
    assert directory.save() == [Export("d", (C, D))]
    assert directory.save() == [], "it is under way"
    directory.segment_exported("d", 1, file_of(C, D), "ref", 0.0)
    ask(directory, "r", A)
    many = [bytes([7, number]) for number in range(MIN_SAVED_BLOCKS)]
    directory.blocks_changed("d", 1, many[:-1], ())
    assert directory.save() == []
    directory.blocks_changed("d", 1, many[-1:], ())
    assert directory.save() == [Export("d", tuple(many))]


def test_a_block_of_two_workers_is_saved_once(make: MakeDirectory) -> None:
    directory = make()
    directory.blocks_changed("p", 1, [A, B], ())
    directory.blocks_changed("d", 1, [A, C], ())
    saved = directory.save()
    directory.check_integrity()
    assert saved == [Export("p", (A, B)), Export("d", (C,))]


def test_what_was_evicted_or_exported_meanwhile_is_not_saved(make: MakeDirectory) -> None:
    directory = make()
    directory.blocks_changed("p", 1, [A, B, C], ())
    directory.blocks_changed("p", 1, (), [(A, EvictionReason.FULL)])
    export(directory, B)
    assert directory.save() == [Export("p", (C,))]
