"""Stored responses on disk: there after a restart, whole or not at all, and gone with what the manager forgets."""

import asyncio
import logging
import os
import stat
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

import raydix.actors.manager.client_memory as client_memory
import raydix.actors.manager.response_disk as response_disk
from raydix.actors.manager.client_memory import ClientMemory
from raydix.actors.manager.response_files import FOLDER, KeptResponse, ResponseFiles
from raydix.engine.core.memory.response_store import ENTRY_BYTES
from tests.unit.waits import until

BUDGET, TTL_S = 1 << 20, 1000.0
NOW = time.time()
FIRST = KeptResponse(b"first", None, b"1" * 50, NOW - 20)
SECOND = KeptResponse(b"second", b"first", b"\n2\n", NOW - 10)


@pytest.fixture
def files(tmp_path: Path) -> ResponseFiles:
    """Files of two responses, written in no order."""
    made = ResponseFiles(tmp_path / FOLDER)
    assert made.load(BUDGET) == []
    made.write(SECOND)
    made.write(FIRST)
    return made


def paths(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).iterdir(), key=lambda path: path.stat().st_mtime)


def found(files: ResponseFiles, budget_bytes: int = BUDGET) -> list[tuple[bytes, bytes | None, bytes]]:
    return [(each.name, each.parent, each.data) for each in files.load(budget_bytes)]


BOTH = [(b"first", None, FIRST.data), (b"second", b"first", SECOND.data)]


def test_what_was_written_is_read_in_the_order_of_use(files: ResponseFiles, tmp_path: Path) -> None:
    assert found(files) == BOTH
    assert [each.used_at for each in files.load(BUDGET)] == pytest.approx([NOW - 20, NOW - 10])
    files.touch(b"first", NOW)
    files.touch(b"unknown", NOW)
    assert found(files) == BOTH[::-1]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths(tmp_path)} == {0o600}
    assert stat.S_IMODE((tmp_path / FOLDER).stat().st_mode) == 0o700


def test_erased_and_unfinished_files_are_gone(files: ResponseFiles, tmp_path: Path) -> None:
    files.erase(b"first")
    files.erase(b"unknown")
    (tmp_path / FOLDER / "00.response-unfinished").write_bytes(b"{")
    (tmp_path / FOLDER / "notes").write_bytes(b"of somebody else")
    assert found(files) == BOTH[1:]
    assert [path.suffix for path in paths(tmp_path)] == [".response", ""]


def test_what_does_not_fit_is_removed_the_least_recently_used_first(files: ResponseFiles, tmp_path: Path) -> None:
    size = paths(tmp_path)[1].stat().st_size
    assert found(files, ENTRY_BYTES + size) == BOTH[1:] and len(paths(tmp_path)) == 1
    assert found(files, 10) == [] and not paths(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[:-3] + b"xyz",
        lambda data: data.replace(b"null", b'"aa"'),
        lambda data: data.replace(b"null", b"7"),
        lambda data: data.replace(b"6669727374", b"6669727375"),
        lambda data: data.replace(b"{", b"[", 1),
        lambda data: b"",
        lambda data: b'{"format": 1}\n',
    ],
)
def test_damaged_files_are_skipped_and_removed(
    files: ResponseFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    path = paths(tmp_path)[0]
    path.write_bytes(damage(path.read_bytes()))
    assert found(files) == BOTH[1:]
    assert "is removed" in caplog.text and not path.exists()


def test_files_of_another_format_are_left_alone(
    files: ResponseFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = paths(tmp_path)[0]
    path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 12'))
    assert found(files) == BOTH[1:]
    assert "has format 12" in caplog.text and path.exists()


def test_a_failed_write_leaves_nothing_behind(
    files: ResponseFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: object, times: object) -> None:
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(os, "utime", fail)
        with pytest.raises(OSError, match="no room"):
            files.write(KeptResponse(b"third", None, b"3", NOW))
    assert found(files) == BOTH and len(paths(tmp_path)) == 2


# The manager's memory


async def settled(memory: ClientMemory) -> None:
    """Return when the disk has what the memory has: uses are recorded behind the work, so this waits for work twice."""
    disk, loop = memory._response_disk, asyncio.get_running_loop()
    assert disk is not None
    for done in (asyncio.Event(), asyncio.Event()):
        disk._add(partial(loop.call_soon_threadsafe, done.set))
        await done.wait()


def with_memory(
    folder: Path, use: Callable[[ClientMemory], object], budget: int = BUDGET, ttl_s: float = TTL_S
) -> object:
    """What a use of a new memory gives; the memory ends when the disk has all of it."""

    async def run() -> object:
        memory = ClientMemory(0, budget, ttl_s)
        disk = await memory.keep_on_disk(folder)
        running = [asyncio.create_task(disk.run()), asyncio.create_task(memory.watch_expiry())]
        result = use(memory)
        if isinstance(result, Awaitable):
            result = await result
        await settled(memory)
        memory.statistics()
        for each in running:
            each.cancel()
        return result

    return asyncio.run(run())


def keep_three(memory: ClientMemory) -> None:
    assert memory.keep_response(b"a", None, b"1")
    assert memory.keep_response(b"b", b"a", b"2")
    assert memory.keep_response(b"c", None, b"3")


def find_new(memory: ClientMemory) -> list[bytes]:
    return memory.find_response(b"new", False)


def all_of(memory: ClientMemory) -> list[list[bytes]]:
    return [memory.find_response(name, True) for name in (b"a", b"b", b"c")]


def test_responses_survive_a_restart(tmp_path: Path) -> None:
    with_memory(tmp_path, keep_three)
    assert with_memory(tmp_path, all_of) == [[b"1"], [b"1", b"2"], [b"3"]]
    assert with_memory(tmp_path, lambda memory: memory.delete_response(b"a")) is True
    assert with_memory(tmp_path, all_of) == [[], [b"2"], [b"3"]]
    assert with_memory(tmp_path, lambda memory: memory.keep_response(b"d", b"a", b"4")) is False


def test_the_order_of_use_survives_too(tmp_path: Path) -> None:
    with_memory(tmp_path, keep_three)
    for path in paths(tmp_path):  # files have the time of their last use
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 60))
    with_memory(tmp_path, lambda memory: memory.find_response(b"b", False))
    assert with_memory(tmp_path, all_of, 2 * (ENTRY_BYTES + 1)) == [[b"1"], [b"1", b"2"], []]
    assert len(paths(tmp_path)) == 2


def test_as_many_responses_fit_after_a_restart_as_before(tmp_path: Path) -> None:
    budget = 3 * (ENTRY_BYTES + 1)
    with_memory(tmp_path, keep_three, budget)
    assert with_memory(tmp_path, all_of, budget) == [[b"1"], [b"1", b"2"], [b"3"]]


def test_of_responses_used_together_the_last_is_the_first_to_go(tmp_path: Path) -> None:
    with_memory(tmp_path, keep_three)
    with_memory(tmp_path, lambda memory: memory.find_response(b"b", True))
    times = [(tmp_path / FOLDER / f"{name.hex()}.response").stat().st_mtime_ns for name in (b"b", b"a")]
    assert times[0] < times[1]


def test_uses_wait_for_a_slow_disk_once_for_each_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[bytes] = []
    monkeypatch.setattr(ResponseFiles, "touch", lambda files, name, used_at: touched.append(name))

    def use_often(memory: ClientMemory) -> None:
        keep_three(memory)
        for _ in range(1000):
            memory.find_response(b"b", True)

    with_memory(tmp_path, use_often)
    assert sorted(touched) == [b"a", b"b", b"c"], "nothing is carried out before the memory has been used"


def test_what_newer_responses_push_out_leaves_the_disk(tmp_path: Path) -> None:
    with_memory(tmp_path, keep_three, 2 * (ENTRY_BYTES + 1))
    assert len(paths(tmp_path)) == 2


def test_files_tell_the_tenant(tmp_path: Path) -> None:
    """Kept across a restart: the shares of tenants are the same behind it."""

    def keep(memory: ClientMemory) -> None:
        memory.keep_response(b"a", None, b"1", "alice")

    def flood(memory: ClientMemory) -> None:
        for number in range(20):
            memory.keep_response(b"b%d" % number, None, b"2", "bob")
        assert memory.find_response(b"a", False) == [b"1"]

    with_memory(tmp_path, keep, 3 * (ENTRY_BYTES + 1))
    with_memory(tmp_path, flood, 3 * (ENTRY_BYTES + 1))


def test_responses_expire_on_disk_as_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(tmp_path, keep_three)
    old = NOW - TTL_S - 1
    os.utime(tmp_path / FOLDER / f"{b'c'.hex()}.response", (old, old))
    assert with_memory(tmp_path, all_of) == [[b"1"], [b"1", b"2"], []] and len(paths(tmp_path)) == 2

    async def wait(memory: ClientMemory) -> None:
        await until(lambda: not len(memory._responses))

    monkeypatch.setattr(client_memory, "EXPIRY_S", 0.01)
    with_memory(tmp_path, wait, ttl_s=0.05)
    assert not paths(tmp_path)


def test_a_response_kept_while_the_disk_is_read_is_the_newest(tmp_path: Path) -> None:
    with_memory(tmp_path, keep_three)

    async def run() -> list[list[bytes]]:
        memory = ClientMemory(0, 3 * (ENTRY_BYTES + 1), TTL_S)
        loading = asyncio.create_task(memory.keep_on_disk(tmp_path))
        await asyncio.sleep(0)
        assert memory.keep_response(b"new", None, b"5")
        disk = await loading
        found = [*all_of(memory), find_new(memory)]
        running = asyncio.create_task(disk.run())
        await settled(memory)
        running.cancel()
        memory.statistics()
        return found

    found = asyncio.run(run())
    assert found[-1] == [b"5"] and sum(map(bool, found)) == 3
    assert with_memory(tmp_path, find_new) == [b"5"]


def test_a_disk_that_is_slow_or_fails_costs_the_copy_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(response_disk, "MAX_WAITING_BYTES", 2)

    def keep_a_long_one(memory: ClientMemory) -> list[bytes]:
        assert memory.keep_response(b"a", None, b"too long")
        return memory.find_response(b"a", False)

    assert with_memory(tmp_path, keep_a_long_one) == [b"too long"]
    assert "in memory only" in caplog.text and not paths(tmp_path)

    (tmp_path / FOLDER).rmdir()
    (tmp_path / FOLDER).write_bytes(b"no folder")
    monkeypatch.setattr(response_disk, "MAX_WAITING_BYTES", 100)
    assert with_memory(tmp_path, keep_a_long_one) == [b"too long"]
    assert "are not read" in caplog.text and "could not be changed" in caplog.text
