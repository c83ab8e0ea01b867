"""Files and batches on disk: limits, tenants, lives, and what a crash at any step leaves behind."""

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from raydix.engine.api.batches import FileRecord
from raydix.engine.batches.disk import replaced
from raydix.engine.batches.file_store import STALE_S
from raydix.engine.core.batches.batch_run import Progress
from raydix.engine.core.batches.records import Problem, Status
from raydix.engine.core.errors import BodyTooLargeError, NotFoundError, OverloadedError, RequestError
from tests.unit.batch_files import LIMITS, Stores, lines_of

BATCH = lines_of("one", "two")


def test_a_file_is_kept_under_an_id_of_its_tenant(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    file_id = stores.upload(b"content")
    record = stores.files.get("a", file_id)
    assert (record.num_bytes, record.filename, record.purpose) == (7, "in.jsonl", "batch")
    assert stores.files.content("a", file_id).read_bytes() == b"content"
    assert [each.id for each in stores.files.all("a")] == [file_id] and stores.files.all("b") == []
    for tenant, name in (("b", file_id), ("a", "file-0"), ("a", "../../a"), ("a", file_id + "/content")):
        with pytest.raises(NotFoundError):
            stores.files.get(tenant, name)
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.rglob("*")), "for the user's eyes alone"


def test_an_erased_file_is_gone(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    file_id = stores.upload(b"content")
    stores.files.erase("a", file_id)
    with pytest.raises(NotFoundError):
        stores.files.erase("a", file_id)
    assert stores.files.bytes_of("a") == 0


def test_a_file_that_is_discarded_leaves_nothing(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    upload = stores.files.begin("a")
    upload.write(b"content")
    assert stores.files.all("a") == []
    upload.discard()
    assert stores.files.bytes_of("a") == 0


def test_a_file_that_was_let_in_is_not_discarded(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    upload = stores.files.begin("a")
    upload.write(b"content")
    record = stores.files.finish("a", upload, "f", "batch", None)
    upload.discard()
    assert stores.files.content("a", record.id).read_bytes() == b"content"


def test_bytes_are_counted_while_others_erase_files(tmp_path: Path) -> None:
    stores, is_over = Stores(tmp_path), threading.Event()

    def come_and_go() -> None:
        while not is_over.is_set():
            stores.files.begin("a").discard()

    other = threading.Thread(target=come_and_go)
    other.start()
    try:
        assert {stores.files.bytes_of("a") for _ in range(1_000)} == {0}
    finally:
        is_over.set()
        other.join()


def test_limits_of_bytes(tmp_path: Path) -> None:
    stores = Stores(tmp_path, replace(LIMITS, file_bytes=100, tenant_bytes=2000, total_bytes=3000))
    with pytest.raises(BodyTooLargeError, match="100 bytes, which is the limit here"):
        stores.files.begin("a").write(b"x" * 101)
    first = stores.files.begin("a")
    stores.files.put("a", record_of("file-" + "0" * 32), [b"x" * 1900])
    first.write(b"x" * 50)
    with pytest.raises(OverloadedError, match="what a tenant may keep is used up"):
        stores.files.finish("a", first, "f", "batch", None)
    with pytest.raises(OverloadedError, match="what a tenant may keep"):
        stores.files.begin("a")
    stores.files.put("b", record_of("file-" + "1" * 32), [b"x" * 1000])
    with pytest.raises(OverloadedError, match="what the server keeps"):
        stores.files.begin("c")


def test_a_limit_of_files(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    for _ in range(LIMITS.tenant_files):
        stores.upload(b"x")
    with pytest.raises(OverloadedError, match="5 files already"):
        stores.upload(b"x")
    stores.upload(b"x", tenant="b")


def test_files_are_erased_when_their_time_is_over(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    upload = stores.files.begin("a")
    short = stores.files.finish("a", upload, "f", "batch", 3600.0).id
    long = stores.upload(b"x")
    stale = stores.files.begin("a")
    os.utime(stale.folder, (stores.clock.now - STALE_S - 1,) * 2)
    stores.clock.now += 3600
    with pytest.raises(NotFoundError):
        stores.files.get("a", short)
    stores.files.sweep("a")
    assert [each.id for each in stores.files.all("a")] == [long]
    assert not stale.folder.exists() and len([*(tmp_path / "tenants/a/files").iterdir()]) == 1
    stale.discard()


def test_a_file_of_a_known_id_is_made_once(tmp_path: Path) -> None:
    stores, record = Stores(tmp_path), record_of("file-" + "0" * 32)
    stores.files.put("a", record, [b"one\n", b"two\n"])
    stores.files.put("a", record, [b"another\n"])
    assert stores.files.content("a", record.id).read_bytes() == b"one\ntwo\n"
    assert stores.files.get("a", record.id).num_bytes == 8

    def fails() -> list[bytes]:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        stores.files.put("a", record_of("file-" + "1" * 32), (line for line in fails()))
    assert len(stores.files.all("a")) == 1 and not [*(tmp_path / "tenants/a/incoming").iterdir()]


def record_of(file_id: str) -> FileRecord:
    return FileRecord(file_id, "f", "batch_output", 0, 0.0, None)


def test_a_batch_keeps_its_input_when_the_file_is_erased(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    batch = stores.begin(BATCH)
    stores.files.erase("a", batch.record.input_file_id)
    assert (batch.folder / "input").read_bytes() == BATCH


def test_where_links_are_not_to_be_had_the_input_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links")

    monkeypatch.setattr(os, "link", refuse)
    assert (Stores(tmp_path).begin(BATCH).folder / "input").read_bytes() == BATCH


def test_a_batch_is_its_tenants(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    batch = stores.begin(BATCH, metadata={"k": "v"})
    found = stores.batches.get("a", batch.record.id)
    assert found.record == batch.record and found.progress == Progress()
    assert (found.record.expires_at - found.record.created_at, found.record.metadata) == (86_400, {"k": "v"})
    assert [each.record.id for each in stores.batches.all("a")] == [batch.record.id]
    assert stores.batches.all("b") == []
    for tenant, name in (("b", batch.record.id), ("a", "batch_0"), ("a", "../x")):
        with pytest.raises(NotFoundError):
            stores.batches.get(tenant, name)
        with pytest.raises(NotFoundError):
            stores.batches.cancel(tenant, name)


def test_a_tenant_whose_name_begins_another_s_sees_its_own_batches_alone(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    for tenant in ("alice", "al"):
        stores.begin(BATCH, tenant)
    for tenant in ("alice", "al"):
        assert [batch.record.tenant for batch in stores.batches.all(tenant)] == [tenant]


def test_an_input_must_be_one(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    with pytest.raises(NotFoundError) as missing:
        stores.begin(BATCH, input_file_id="file-" + "0" * 32)
    assert missing.value.param == "input_file_id"
    stores.files.put("a", record_of("file-" + "1" * 32), [BATCH])
    with pytest.raises(RequestError, match="purpose"):
        stores.begin(BATCH, input_file_id="file-" + "1" * 32)
    with pytest.raises(NotFoundError):
        stores.begin(BATCH, tenant="b", input_file_id=stores.upload(BATCH, "a"))


def test_one_runner_has_a_batch(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    batch = stores.begin(BATCH)
    [found] = stores.batches.open_batches()
    with stores.batches.taken(found) as first, stores.batches.taken(batch) as second:
        assert (first, second) == (True, False)
    with stores.batches.taken(batch) as later:
        assert later
        ended = replace(Progress(), status=Status.COMPLETED, outcome=Status.COMPLETED, ended_at=2.0)
        stores.batches.show(batch, ended)
        stores.batches.retire(batch)
    with stores.batches.taken(batch) as gone:
        assert not gone
    assert stores.batches.open_batches() == []
    assert stores.batches.get("a", batch.record.id).progress == ended
    assert sorted(path.name for path in stores.batches.get("a", batch.record.id).folder.iterdir()) == [
        "batch.json",
        "lock",
        "progress.json",
    ]


def test_progress_is_shown_as_it_is(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    batch = stores.begin(BATCH)
    failed = Progress(Status.FAILED, 2, 1, 0, 1.0, 2.0, 3.0, Status.FAILED, (Problem("code", "message", 1, "url"),))
    for progress in (Progress(Status.IN_PROGRESS, 2, 1), failed):
        stores.batches.show(batch, progress)
        assert stores.batches.get("a", batch.record.id).progress == progress


def test_a_cancelled_batch_says_since_when(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    batch = stores.begin(BATCH)
    assert not stores.batches.is_cancelled(batch)
    cancelled = stores.batches.cancel("a", batch.record.id)
    assert stores.batches.is_cancelled(batch) and cancelled.cancelled_at is not None
    assert stores.batches.cancel("a", batch.record.id).cancelled_at == cancelled.cancelled_at
    stores.batches.show(batch, replace(Progress(), status=Status.CANCELLED, outcome=Status.CANCELLED, ended_at=2.0))
    stores.batches.retire(batch)
    assert stores.batches.cancel("a", batch.record.id).cancelled_at == cancelled.cancelled_at


def test_a_batch_that_has_ended_cannot_be_cancelled(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    batch = stores.begin(BATCH)
    stores.batches.show(batch, replace(Progress(), status=Status.COMPLETED, outcome=Status.COMPLETED, ended_at=2.0))
    with pytest.raises(RequestError, match="completed and cannot be cancelled"):
        stores.batches.cancel("a", batch.record.id)


def test_ended_batches_are_erased_when_their_time_is_over(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    batch, other = stores.begin(BATCH), stores.begin(BATCH)
    ended = replace(Progress(), outcome=Status.COMPLETED, status=Status.COMPLETED, ended_at=stores.clock.now)
    stores.batches.show(batch, ended)
    stores.batches.retire(batch)
    stores.batches.sweep("a")
    assert len(stores.batches.all("a")) == 2
    stores.clock.now += LIMITS.keep_s + 1
    stores.batches.sweep("a")
    assert [each.record.id for each in stores.batches.all("a")] == [other.record.id], "an open one stays"


@pytest.mark.parametrize("is_retired_first", [True, False])
def test_a_batch_is_erased_in_the_moment_of_its_end(is_retired_first: bool, tmp_path: Path) -> None:
    """Clients see the end before the runner has put the batch among the ended."""
    stores = Stores(tmp_path)
    batch = stores.begin(BATCH)
    stores.batches.show(batch, replace(Progress(), status=Status.COMPLETED, outcome=Status.COMPLETED, ended_at=2.0))
    seen = stores.batches.get("a", batch.record.id)
    if is_retired_first:
        stores.batches.retire(batch)
    stores.batches.erase(seen)
    if not is_retired_first:
        stores.batches.retire(batch)
    with pytest.raises(NotFoundError):
        stores.batches.get("a", batch.record.id)
    assert stores.batches.open_batches() == stores.batches.all("a") == []


def test_open_batches_count_as_their_tenants_bytes(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    batch = stores.begin(BATCH)
    before = stores.files.bytes_of("a")
    (batch.folder / "journal").write_bytes(b"x" * 1000)
    assert stores.files.bytes_of("a") == before + 1000 and stores.files.bytes_of("b") == 0
    assert stores.files.room("a")[0] == LIMITS.tenant_bytes - before - 1000


def test_open_batches_of_a_tenant_whose_name_begins_alike_are_not_counted(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    before = stores.files.bytes_of("al")
    stores.begin(BATCH, "alice")
    assert stores.files.bytes_of("alice") > 0 and stores.files.bytes_of("al") == before


def test_what_is_not_whole_is_no_batch(tmp_path: Path) -> None:
    """A folder without its files: of another version, or damaged by hand."""
    stores = Stores(tmp_path)
    batch = stores.begin(BATCH)
    (tmp_path / "open/a~batch_x").mkdir()
    (tmp_path / "open/a~batch_y").mkdir()
    (tmp_path / "open/a~batch_y/batch.json").write_text(json.dumps({"id": 1}))
    assert [each.record.id for each in stores.batches.open_batches()] == [batch.record.id]


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="full"), replaced(path) as file:
        file.write(b"new")
        raise OSError("full")
    assert path.read_bytes() == b"old" and [*tmp_path.iterdir()] == [path]
    with replaced(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new" and [*tmp_path.iterdir()] == [path]
