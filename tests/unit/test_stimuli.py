"""Recordings: without prompts and payloads, replayed from files; the machines' own tests replay random runs."""

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from actors.recording import recorded
from configs.schema import LoggingSection
from engine.core.hashing import hash_block
from engine.core.manager.directory import Directory
from engine.core.manager.notes import NOTES
from engine.core.manager.placement import CostModel
from engine.core.settings import SchedulerLimits
from engine.core.stimuli import HIDDEN, Notes, Record, Stimulus, replay, stimulus
from engine.core.types import AdmitRequest, Grammar, GrammarKind, Handover, Role, Salt, SegmentHeader, Stage
from engine.core.worker.block_pool import BlockPool
from engine.core.worker.notes import SchedulerNotes
from engine.core.worker.replaying import RecordedChain
from engine.core.worker.scheduler import Scheduler
from engine.core.worker.step import RunnerOutput, SampledToken
from tests.unit.builders import ROOT, hashes_of, make_assignment
from tests.unit.replaying import Recording, check_directory, check_scheduler, spelled

A, B = b"a", b"b"


class Counter:
    """A machine that counts letters."""

    def __init__(self, total: int = 0) -> None:
        self.total = total

    @stimulus
    def add(self, word: str, payload: object = None) -> int:
        self.total += len(word)
        return self.total

    @stimulus
    def add_all(self, words: list[str]) -> int:
        return [self.add(word) for word in words][-1]

    @stimulus
    def add_tokens(self, token_ids: list[int]) -> None:
        self.total += len(token_ids)

    @stimulus
    def fail(self) -> None:
        raise ValueError("no")


@pytest.fixture
def settings(tmp_path: Path) -> LoggingSection:
    return LoggingSection(stimuli=str(tmp_path / "new"), stimuli_mib=1)


def file_of(settings: LoggingSection) -> Path:
    assert settings.stimuli is not None
    return Path(settings.stimuli) / f"stimuli-counter-{os.getpid()}.log"


def test_calls_from_outside_are_noted_as_they_were() -> None:
    counter, words = Counter(), ["x", "y"]
    recording = Recording(counter, Notes())
    counter.add_all(words)
    words.append("z")
    counter.add("four", payload=bytearray(b"KV"))
    counter.add_tokens([77, 78])
    with pytest.raises(ValueError):
        counter.fail()
    assert recording.stimuli == (
        ("add_all", (("x", "y"),), {}),
        ("add", ("four",), {"payload": HIDDEN}),
        ("add_tokens", ((0, 0),), {}),
        ("fail", (), {}),
    )
    fresh = Counter()
    *results, error = replay(recording.stimuli, fresh)
    assert (results, fresh.total) == ([2, 6, None], 8) and isinstance(error, ValueError)


def test_a_file_begins_with_the_making_of_its_machine(settings: LoggingSection) -> None:
    counter = recorded("counter", settings, Notes(), Counter, total=5)
    counter.add("x")
    dumped = file_of(settings).read_bytes()
    record = Record.load(dumped)
    assert record == Record(Stimulus("Counter", (), {"total": 5}), (Stimulus("add", ("x",), {}),))
    fresh = Counter(*record.made.args, **record.made.kwargs)  # type: ignore[arg-type]
    assert replay(record.stimuli, fresh) == [counter.total]

    begun = len(record.made.dump())
    for num_bytes in range(begun, len(dumped)):
        assert Record.load(dumped[:num_bytes]) == Record(record.made, ()), "the process died in the middle of a write"


def test_by_default_a_machine_is_left_alone() -> None:
    assert vars(recorded("counter", LoggingSection(), Notes(), Counter)) == {"total": 0}


def test_a_full_file_is_written_no_further(settings: LoggingSection, caplog: pytest.LogCaptureFixture) -> None:
    counter = recorded("counter", settings, Notes(), Counter)
    for _ in range(4):
        counter.add("x" * 300_000)
    assert len(Record.load(file_of(settings).read_bytes()).stimuli) == 3
    assert vars(counter) == {"total": 1_200_000}, "the machine is not recorded any more"
    [warning] = caplog.records
    assert warning.levelno == logging.WARNING and "full" in warning.getMessage()


def test_a_disk_that_cannot_be_written_stops_nothing(
    settings: LoggingSection, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = recorded("counter", settings, Notes(), Counter)
    recorded("counter", settings, Notes(), Counter)
    assert "File exists" in caplog.text, "an earlier recording is not lost"

    def fail(file: int, data: bytes) -> int:
        raise OSError("no space left")

    monkeypatch.setattr(os, "write", fail)
    assert counter.add("x") == 1 and vars(counter) == {"total": 1} and "no space" in caplog.text


def test_a_directory_s_recording_has_neither_prompts_nor_payloads() -> None:
    directory, fresh = (Directory(CostModel(4), segment_budget_bytes=100) for _ in range(2))
    recording = Recording(directory, NOTES)
    directory.register("w", Role.MIXED, 1, 10, [A])
    directory.admit(AdmitRequest("r", 0, (A, B), 9, preview=(77, 78)), 0.0)
    header = SegmentHeader("m", (A,), 10, 0, Handover("r", 0, 77, None))
    directory.segment_exported("w", 1, header, bytearray(b"KV"), 1.0)
    _, admitted, exported = recording.stimuli
    assert "preview" not in repr(admitted) and "77" not in repr(admitted) + repr(exported)
    assert exported.args[3] is HIDDEN

    replayed = replay(recording.stimuli, fresh)
    assert len(replayed) == len(recording.results) and fresh.num_blocks == directory.num_blocks == 1


def test_a_recording_brings_a_fresh_directory_into_the_same_state() -> None:
    directory, fresh = (Directory(CostModel(4), segment_budget_bytes=100) for _ in range(2))
    recording = Recording(directory, NOTES)
    directory.register("w", Role.MIXED, 1, 10, [A])
    directory.admit(AdmitRequest("r", 0, (A, B), 9), 0.0)
    directory.segment_exported("w", 1, SegmentHeader("m", (A,), 10, 0), None, 1.0)
    directory.end_request("r", 2.0)
    check_directory(recording, directory, fresh)


SECRET = range(7_000_001, 7_000_009)
"""Tokens easy to find in a file."""


GRAMMAR = Grammar(GrammarKind.REGEX, "7000 secrets")


def record_a_scheduler(key: bytes) -> tuple[Scheduler, Recording, SchedulerNotes]:
    """Two prompts with a beginning in common, an answer, a handover ahead of its request, and an answer that a grammar
    ends."""
    scheduler = Scheduler(BlockPool(16, 4), SchedulerLimits(64, 4), 64)
    notes = SchedulerNotes(scheduler, ROOT, key)
    recording = Recording(scheduler, notes.notes())
    sampled = {"whole": (SampledToken(SECRET[0]),), "late": (SampledToken(SECRET[0]),)}
    scheduler.submit(make_assignment("whole", SECRET[:7], max_tokens=9, stop=[SECRET[3]]), ROOT, 0.0)
    for _ in range(3):
        scheduler.update(scheduler.schedule(0.0), RunnerOutput(sampled), 0.0)
    scheduler.handed_over(Handover("late", 0, SECRET[3], None), 1.0)
    decode = make_assignment("late", SECRET[:7], stage=Stage.DECODE, stop=[SECRET[0]], salt=Salt(b"tenant"))
    scheduler.submit(decode, ROOT, 1.0)
    scheduler.update(scheduler.schedule(1.0), RunnerOutput(sampled), 1.0)
    formed = make_assignment("formed", SECRET[:3], min_tokens=3)
    sampling = replace(formed.sampling, max_tokens=9, grammar=GRAMMAR)
    scheduler.submit(replace(formed, sampling=sampling), ROOT, 2.0)
    scheduler.update(scheduler.schedule(2.0), RunnerOutput(sampled), 2.0)
    scheduler.grammar_settled(GRAMMAR.digest)
    sampled["formed"] = (SampledToken(SECRET[4], is_last=True),)
    scheduler.update(scheduler.schedule(3.0), RunnerOutput(sampled, refused={"other": GRAMMAR.source}), 3.0)
    return scheduler, recording, notes


def test_a_scheduler_s_recording_has_no_tokens() -> None:
    _, recording, notes = record_a_scheduler(b"one")
    text = repr(recording.stimuli)
    assert "7000" not in text and "b'tenant'" not in text
    dumped = b"".join(stimulus.dump() for stimulus in recording.stimuli)
    assert not [token for token in SECRET if token.to_bytes(4, "little") in dumped or token.to_bytes(4) in dumped]
    assert GRAMMAR.source.encode() not in dumped and GRAMMAR.digest in dumped
    partial_name = hash_block(hashes_of(SECRET[:7])[0], SECRET[4:7])
    assert partial_name not in dumped and notes.partial_name(partial_name) in dumped
    _, another, _ = record_a_scheduler(b"another")
    assert another.stimuli != recording.stimuli, "nobody can compute the notes of tokens without the key"


def test_a_recording_brings_a_fresh_scheduler_into_the_same_state() -> None:
    scheduler, recording, notes = record_a_scheduler(b"one")
    assert list(scheduler.running) == ["whole"], "the others have ended with a stop token, and by a grammar"
    assert scheduler.num_requests == 1
    fresh = Scheduler(BlockPool(16, 4), SchedulerLimits(64, 4), 64, chain=RecordedChain)
    check_scheduler(recording, notes, scheduler, fresh)
    fresh.check_integrity()


def test_tokens_that_bring_no_names_are_no_blocks() -> None:
    with pytest.raises(AssertionError, match="no name"):
        RecordedChain(ROOT, Salt(), 4).hashes([1, 2, 3, 4])


def results_of_a_directory() -> list[object]:
    """Of events after which several blocks and workers are equally good."""
    directory = Directory(CostModel(4, block_bytes=1), segment_budget_bytes=100)
    recording, hashes = Recording(directory, NOTES), [bytes([number]) * 16 for number in range(20)]
    for worker_id, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
        directory.register(worker_id, role, 1, 1, hashes if worker_id == "p0" else [])
    for number in range(8):
        directory.admit(AdmitRequest(f"r{number}", 0, tuple(hashes), 90, avoided=("p0",)), 0.0)
        directory.first_token(f"r{number}", 0, 0.1)
        directory.end_request(f"r{number}", 1.0)
    directory.admit(AdmitRequest("last", 0, tuple(hashes), 90, avoided=("p0",)), 0.0)
    directory.remove_worker("p0")
    return [spelled(each) for each in recording.results]


def test_another_process_decides_in_the_same_order() -> None:
    """The order of sets, of strings and of bytes, differs between processes."""
    code = "from tests.unit.test_stimuli import *; print(results_of_a_directory())"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    [output] = outputs
    assert b"Lost" in output and b"Decision" in output
