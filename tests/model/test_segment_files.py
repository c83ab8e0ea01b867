"""Segments on disk: whole or not there, and found again by another process."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raydix.engine.core.errors import StartupError
from raydix.engine.core.hashing import state_hash
from raydix.engine.core.manager.instructions import DamagedFileError
from raydix.engine.core.types import Handover, Retention, SegmentHeader, Snapshot
from raydix.engine.model.segment_files import LOCK, SegmentFiles
from raydix.engine.model.segments import Bytes, checksum

BLOCK_BYTES = 32
STATE_BYTES = 48


def segment(*names: bytes, tail: bool = False) -> tuple[SegmentHeader, Bytes]:
    payload = np.random.default_rng(len(names)).integers(0, 256, len(names) * BLOCK_BYTES, np.uint8)
    handover = Handover("r", 0, 7, names[-1]) if tail else None
    return SegmentHeader("model/16", names, payload.nbytes, checksum(payload), handover), payload


@pytest.fixture
def files(tmp_path: Path) -> Iterator[SegmentFiles]:
    files = SegmentFiles(tmp_path / "deeper" / "kv")
    files.open()
    assert files.scan() == []
    yield files
    files.close()


def names(files: SegmentFiles) -> list[str]:
    return sorted(path.name for path in files.folder.iterdir() if path.name != LOCK)


def test_another_process_finds_and_reads_them(files: SegmentFiles) -> None:
    header, payload = segment(b"a", b"b")
    header = replace(header, retention=Retention("tenant", 2, 1e9))
    payload.flags.writeable = False
    assert files.write(header, payload) == header
    [found] = SegmentFiles(files.folder).scan()
    assert found == header
    content = files.read(found)
    assert (content == payload).all() and checksum(content) == found.checksum
    assert files.folder.stat().st_mode & 0o077 == 0
    assert next(files.folder.glob("*.kv*")).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("num_blocks", [0, 1, 3])
def test_recurrent_states_are_behind_the_blocks(files: SegmentFiles, num_blocks: int, *, tail: bool) -> None:
    """A state alone is a file, too. What serves the request of a hand-over only is left out: its partial block and the
    state behind that."""
    hashes = (b"a", b"b", b"c", b"d")[: num_blocks + tail]
    states = [Snapshot(state_hash(path[-1]), path) for path in [(b"x",), (b"x", b"y")]]
    payload = np.random.default_rng(1).integers(0, 256, len(hashes) * BLOCK_BYTES + (2 + tail) * STATE_BYTES, np.uint8)
    if tail:
        states.append(Snapshot(state_hash(hashes[-1]), (b"x", hashes[-1])))
    header = SegmentHeader(
        "model/16",
        hashes,
        payload.nbytes,
        checksum(payload),
        Handover("r", 0, 7, hashes[-1]) if tail else None,
        states=tuple(states),
        state_bytes=STATE_BYTES,
    )
    written = files.write(header, payload)
    assert written.names == header.names == (*hashes[:num_blocks], *map(state_hash, (b"x", b"y")))
    [found] = SegmentFiles(files.folder).scan()
    content = files.read(found)
    assert found == written and checksum(content) == found.checksum and found.states == tuple(states[:2])
    states_at = len(hashes) * BLOCK_BYTES
    kept = [payload[: num_blocks * BLOCK_BYTES], payload[states_at : states_at + 2 * STATE_BYTES]]
    assert (content == np.concatenate(kept)).all()


def test_a_folder_is_one_process_s(files: SegmentFiles) -> None:
    other = SegmentFiles(files.folder)
    with pytest.raises(StartupError, match="is used by another server"):
        other.open()
    files.close()
    other.open()
    other.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match=r"cache\.disk_path: .*file/kv: Not a directory"):
        SegmentFiles(tmp_path / "file" / "kv").open()


def test_what_cannot_be_read_now_is_left_alone(files: SegmentFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    header = files.write(*segment(b"a"))

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fail)
        patch.setattr(np, "fromfile", fail)
        assert files.scan() == []
        with pytest.raises(OSError, match="Input/output"):
            files.read(header)
    assert files.scan() == [header]


def test_what_is_wished_for_it_may_change(files: SegmentFiles) -> None:
    header, payload = segment(b"a")
    first = files.write(header, payload)
    files.write(replace(header, retention=Retention("a longer name")), payload)
    assert (files.read(first) == payload).all()


def test_it_may_change_while_the_file_is_read(files: SegmentFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    header, payload = segment(b"a")
    header = files.write(header, payload)
    longer = replace(header, retention=Retention("a longer name"))
    monkeypatch.setattr(os, "utime", lambda path: files.write(longer, payload))
    assert (files.read(header) == payload).all()


def test_a_tail_is_left_out(files: SegmentFiles) -> None:
    header, payload = segment(b"a", b"b", b"tail", tail=True)
    own = files.write(header, payload)
    assert (own.hashes, own.handover, own.num_bytes) == ((b"a", b"b"), None, 2 * BLOCK_BYTES)
    assert checksum(files.read(own)) == own.checksum == checksum(payload[: 2 * BLOCK_BYTES])


def test_the_least_recently_used_comes_first(files: SegmentFiles) -> None:
    headers = [files.write(*segment(name)) for name in (b"a", b"b", b"c")]
    for age, path in zip((3, 1, 2), (files._path(header) for header in headers), strict=True):
        os.utime(path, (1e9 - age, 1e9 - age))
    assert [header.hashes for header in files.scan()] == [(b"a",), (b"c",), (b"b",)]
    files.read(headers[0])
    assert files.scan()[-1] == headers[0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content + b"x",
        lambda content: b"",
        lambda content: content.replace(b'"format": 3', b'"format": 2'),
        lambda content: content.replace(b'"hashes": ["61"]', b'"hashes": ["62"]'),
        lambda content: b"[]" + content[2:],
        lambda content: content.replace(b'"states": []', b'"states": [[]]'),
        lambda content: content.replace(b'"priority": 0', b'"priority": "0"'),
        lambda content: content.replace(b'"retention"', b'"retain"'),
        lambda content: b"\xff" * len(content),
    ],
)
def test_damaged_files_are_removed(files: SegmentFiles, damage: Callable[[bytes], bytes]) -> None:
    header = files.write(*segment(b"a"))
    [path] = files.folder.glob("*.kv*")
    path.write_bytes(damage(path.read_bytes()))
    assert files.scan() == [] and names(files) == []
    with pytest.raises(DamagedFileError, match="gone"):
        files.read(header)


def test_what_was_not_finished_is_removed_and_others_files_are_not(files: SegmentFiles) -> None:
    (files.folder / "x.kv-unfinished").write_bytes(b"half")
    (files.folder / "notes.txt").write_text("not ours")
    assert files.scan() == [] and names(files) == ["notes.txt"]


def test_a_write_that_fails_leaves_nothing(files: SegmentFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(*segment(b"a"))
    assert names(files) == []


def test_what_is_not_what_it_says_is_not_written(files: SegmentFiles) -> None:
    header, payload = segment(b"a")
    for wrong in (replace(header, checksum=1), replace(header, num_bytes=1)):
        with pytest.raises(ValueError, match="differ"):
            files.write(wrong, payload)
    assert names(files) == []


def test_a_file_that_was_cut_is_not_read(files: SegmentFiles) -> None:
    header = files.write(*segment(b"a"))
    [path] = files.folder.glob("*.kv*")
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(DamagedFileError, match="not what it was"):
        files.read(header)


def test_erasing_twice_does_no_harm(files: SegmentFiles) -> None:
    header = files.write(*segment(b"a"))
    files.erase(header)
    files.erase(header)
    assert files.scan() == []
