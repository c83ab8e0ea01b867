"""A batch from a file to a file, as other programs and `raydix batch` run it."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raydix.engine.batches import offline as offline_module
from raydix.engine.batches import runner as runner_module
from raydix.engine.batches.offline import BatchFiles, BatchSummary, look_at, run_batch
from raydix.engine.core.batches.batch_run import Progress
from raydix.engine.core.errors import RequestError
from tests.unit.batch_files import Server, line_of, lines_of, objects_in, prompts_of
from tests.unit.waits import until

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "LOOK_S", 0.005)


@pytest.fixture
def files(tmp_path: Path) -> BatchFiles:
    found = BatchFiles(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    found.source.write_bytes(lines_of("a", "b", "c"))
    return found


def run(files: BatchFiles, server: Server, concurrency: int = 2) -> BatchSummary:
    return asyncio.run(run_batch(files, server.answer, concurrency=concurrency))


def interrupt(files: BatchFiles, server: Server, when: Callable[[], bool]) -> None:
    """Run a batch, and cancel it when a condition holds."""

    async def work() -> None:
        task = asyncio.ensure_future(run_batch(files, server.answer, concurrency=2))
        await until(when)
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(work())


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_answers_and_errors(files: BatchFiles, tmp_path: Path) -> None:
    assert run(files, Server(fails={"b": 400})) == BatchSummary(3, 2, 1)
    assert prompts_of(objects_in(files.output.read_bytes())) == ["a", "c"]
    assert [line["custom_id"] for line in objects_in(files.errors.read_bytes())] == ["b"]
    assert names_in(tmp_path) == ["in.jsonl", "out.errors.jsonl", "out.jsonl"]


def test_without_errors_there_is_no_file_of_them(files: BatchFiles, tmp_path: Path) -> None:
    assert run(files, Server()) == BatchSummary(3, 3, 0)
    assert names_in(tmp_path) == ["in.jsonl", "out.jsonl"]


def test_each_line_has_its_own_route(files: BatchFiles) -> None:
    files.source.write_bytes(line_of("a") + line_of("b", url=CHAT))
    assert run(files, Server()).num_completed == 2


def test_it_goes_on_after_an_interruption(files: BatchFiles, tmp_path: Path) -> None:
    first = Server(hangs={"c"}, fails={"a": 400})
    interrupt(files, first, lambda: files.journal.exists() and files.journal.read_bytes().count(b"\n") == 3)
    assert "out.jsonl.journal" in names_in(tmp_path) and "out.jsonl" not in names_in(tmp_path)
    again = Server()
    assert run(files, again) == BatchSummary(3, 2, 1)
    assert again.asked == ["c"]
    assert names_in(tmp_path) == ["in.jsonl", "out.errors.jsonl", "out.jsonl"]


def test_an_interruption_while_the_outputs_are_written(files: BatchFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("full")

    write = offline_module._write_outputs
    monkeypatch.setattr(offline_module, "_write_outputs", fail)
    with pytest.raises(OSError, match="full"):
        run(files, Server())
    monkeypatch.setattr(offline_module, "_write_outputs", write)
    again = Server()
    assert run(files, again) == BatchSummary(3, 3, 0) and again.asked == []


def test_what_is_done_is_not_done_again(files: BatchFiles) -> None:
    run(files, Server(fails={"b": 400}))
    again = Server()
    assert run(files, again) == look_at(files) == BatchSummary(3, 2, 1) and again.asked == []


def test_an_output_of_something_else_is_left_alone(files: BatchFiles) -> None:
    for content in (b"mine", lines_of("a", "b"), b"[]\n"):
        files.output.write_bytes(content)
        with pytest.raises(RequestError, match="is there already"):
            run(files, Server())
        assert files.output.read_bytes() == content


def test_another_input_does_not_go_on_from_the_journal(files: BatchFiles) -> None:
    first = Server(hangs={"a"})
    interrupt(files, first, lambda: len(first.asked) == 3)
    files.source.write_bytes(lines_of("a", "z"))
    with pytest.raises(RequestError, match="of another input"):
        run(files, Server())


def test_two_processes_do_not_run_the_same_batch(files: BatchFiles) -> None:
    with offline_module._alone(files.journal), pytest.raises(RequestError, match="another process"):
        run(files, Server())
    files.journal.unlink()
    run(files, Server())


def test_a_journal_that_its_writer_has_just_erased_is_not_gone_on_from(files: BatchFiles) -> None:
    import os

    opened = os.open

    def erased(path: Any, *args: Any) -> int:
        handle = opened(path, *args)
        Path(path).unlink()
        return handle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", erased)
        with pytest.raises(RequestError, match="another process"), offline_module._alone(files.journal):
            pass


def test_an_input_that_is_not_valid_names_its_lines(files: BatchFiles) -> None:
    files.source.write_bytes(lines_of("a") + b"{\n" * 12)
    with pytest.raises(RequestError) as refused:
        run(files, Server())
    message = refused.value.message
    assert message.startswith(f"{files.source} is not valid: line 2: This line is not valid JSON")
    assert message.endswith("2 more") and "line 11:" in message
    files.source.write_bytes(b"")
    with pytest.raises(RequestError, match="has no lines"):
        run(files, Server())


def test_progress_is_told(files: BatchFiles) -> None:
    seen: list[Progress] = []
    asyncio.run(run_batch(files, Server(fails={"c": 500}).answer, concurrency=1, on_progress=seen.append))
    assert [(each.num_lines, each.num_completed, each.num_failed) for each in seen][-1] == (3, 2, 1)


def test_an_error_of_the_caller_ends_the_batch(files: BatchFiles) -> None:
    """Such as an unknown tenant: no line would fare better."""

    async def refuse(url: str, body: bytes) -> Any:
        raise RequestError("There is no tenant 'x'.")

    with pytest.raises(RequestError, match="no tenant"):
        asyncio.run(run_batch(files, refuse, concurrency=2))
    assert run(files, Server()).num_completed == 3


def test_ids_of_lines_are_the_same_however_often_it_is_run(files: BatchFiles) -> None:
    run(files, Server())
    first = [json.loads(line)["id"] for line in files.output.read_bytes().splitlines()]
    files.output.unlink()
    run(files, Server())
    assert [json.loads(line)["id"] for line in files.output.read_bytes().splitlines()] == first
