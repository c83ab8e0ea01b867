"""Input files: which lines are valid, what is said of others, and the text by which lines are ordered."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any, get_args

import pytest

from raydix.engine.api.batch_models import StatusName
from raydix.engine.api.batches import Line, LineLimits, batch_object, page_body, parse_batch, parse_line, window_s
from raydix.engine.batches import lines as lines_module
from raydix.engine.batches.beside import run_beside
from raydix.engine.batches.lines import MAX_PROBLEMS, Input, read_beside, read_input
from raydix.engine.core.batches.batch_run import Progress
from raydix.engine.core.batches.records import Problem, Status
from raydix.engine.core.errors import RequestError
from tests.unit.batch_files import ENDPOINT, Stores, line_of, lines_of

CHAT = "/v1/chat/completions"


def read(path: Path, content: bytes, **limits: Any) -> Any:
    path.write_bytes(content)
    return read_input(path, ENDPOINT, LineLimits(**limits), rest=None)


def test_lines_are_found_again(tmp_path: Path) -> None:
    found = read(tmp_path / "in", lines_of("one", "two") + b"\n  \n" + line_of("three")[:-1])
    assert isinstance(found, Input)
    assert found.custom_ids == ["one", "two", "three"] and found.order == [0, 1, 2]
    assert [json.loads(found.line(number).body) for number in range(3)] == [
        {"prompt": "one"},
        {"prompt": "two"},
        {"prompt": "three"},
    ]
    assert found.digest == read(tmp_path / "other", (tmp_path / "in").read_bytes()).digest
    assert found.digest != read(tmp_path / "other", lines_of("one")).digest


def test_an_input_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    found = read(tmp_path / "in", lines_of("one", "two"))
    (tmp_path / "in").write_bytes(lines_of("two", "one"))
    with pytest.raises(OSError, match="has changed"):
        found.line(0)


@pytest.mark.parametrize(
    ("content", "code", "message", "param"),
    [
        (b"{", "invalid_json_line", "This line is not valid JSON: EOF while parsing an object at column 1.", None),
        (b"\xff", "invalid_json_line", "This line is not valid JSON: expected value at column 1.", None),
        (b"[]", "invalid_request", "This line must be a JSON object, got a list.", None),
        (b"{}", "invalid_request", "Missing required parameter: 'custom_id'.", "custom_id"),
        (line_of(""), "invalid_request", "'custom_id' must not be empty.", "custom_id"),
        (line_of("x" * 513), "invalid_request", "'custom_id' must have at most 512 characters.", "custom_id"),
        (
            line_of("one", url=CHAT),
            "mismatched_url",
            "'url' must be the batch's endpoint, /v1/completions, got /v1/chat/completions",
            "url",
        ),
        (
            line_of("one", url="/v1/images"),
            "invalid_request",
            "'url' must be one of '/v1/chat/completions', '/v1/completions', '/v1/embeddings' or '/v1/messages', got "
            '"/v1/images".',
            "url",
        ),
        (
            line_of("one").replace(b'"POST"', b'"GET"'),
            "invalid_request",
            "'method' must be one of 'POST', got \"GET\".",
            "method",
        ),
        (
            line_of("one").replace(b'"body"', b'"bodi"'),
            "invalid_request",
            "Missing required parameter: 'body'.",
            "body",
        ),
        (b'{"custom_id": "a", "extra": 1}', "invalid_request", "Missing required parameter: 'method'.", "method"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_line(tmp_path: Path, content: bytes, code: str, message: str, param: str | None) -> None:
    found = read(tmp_path / "in", lines_of("first") + content + b"\n" + lines_of("last"))
    assert found == [Problem(code, message, 2, param)]


def test_unknown_keys_are_refused_by_name(tmp_path: Path) -> None:
    [problem] = read(tmp_path / "in", line_of("one").replace(b'"method"', b'"priority": 1, "method"'))
    assert (problem.param, problem.line) == ("priority", 1)


def test_limits(tmp_path: Path) -> None:
    [twice] = read(tmp_path / "in", lines_of("one", "two", "one"))
    assert (twice.code, twice.line) == ("duplicate_custom_id", 3) and "line 1" in twice.message
    [long] = read(tmp_path / "in", line_of("one", suffix="x" * 100) + lines_of("two"), max_line_bytes=150)
    assert (long.code, long.line) == ("line_too_large", 1)
    [many] = read(tmp_path / "in", lines_of("one", "two", "three"), max_lines=2)
    assert (many.code, many.line) == ("too_many_lines", 3)
    assert isinstance(read(tmp_path / "in", lines_of("one", "two"), max_lines=2), Input)
    assert len(read(tmp_path / "in", b"x\n" * 1000)) == MAX_PROBLEMS
    [empty] = read(tmp_path / "in", b"\n\n")
    assert empty.code == "empty_file"


def test_reading_leaves_time_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").write_bytes(lines_of(*map(str, range(100))))
    monkeypatch.setattr(lines_module, "BUSY_S", 0.0)
    pauses: list[float] = []
    read_input(tmp_path / "in", ENDPOINT, rest=pauses.append)
    assert len(pauses) == 100


def prompt_of(**body: Any) -> str:
    line = parse_line(line_of("one", url=CHAT, **body), 1, None)
    assert isinstance(line, Line)
    return line.prompt


def test_equal_beginnings_of_prompts_are_equal_beginnings_of_texts() -> None:
    system = {"role": "system", "content": "Answer briefly."}
    one, other = ({"role": "user", "content": text} for text in ("One", "Two"))
    first, second = (prompt_of(prompt=None, messages=[system, user]) for user in (one, other))
    shared = first.index("One")
    assert first[:shared] == second[:shared] and "Answer briefly." in first[:shared]
    assert not prompt_of(messages=[system], cache_salt="x").startswith(prompt_of(messages=[system])[:20])
    with_tools = prompt_of(messages=[system], tools=[{"name": "f"}])
    assert with_tools.index('"f"') < with_tools.index("Answer"), "templates render tools first"
    assert prompt_of(prompt=[1, 2, 3], messages=7)  # whatever is wrong is said when the line runs


BODIES = [
    b'{"prompt": "one"}',
    b'{ "text": "\xc3\xa4\\u0000 } \\" body", "list": [null, 1.5, {"body": {}}] }',
    b'{"n": ' + b"7" * 4000 + b"}",
    b'{"x": ' + b"[" * 100 + b"]" * 100 + b', "nan": NaN}',
    b"{}",
]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    "around",
    [
        (b'{"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": ', b"}"),
        (b'{"body":', b',"custom_id":"one","url":"/v1/completions","method":"POST"}'),
        (
            b' {\t"body" : {"a": 1} , "custom_id": "\xc3\xa4\\"", "body" : ',
            b' , "url":"/v1/completions","method":"POST"} ',
        ),
    ],
    ids=["last", "first", "twice"],
)
def test_a_body_reaches_its_route_as_it_was_written(tmp_path: Path, body: bytes, around: tuple[bytes, bytes]) -> None:
    before, after = around
    found = read(tmp_path / "in", lines_of("zero") + before + body + after + b"\n" + lines_of("two"))
    assert isinstance(found, Input), found
    line = found.line(1)
    assert (line.body, line.url) == (body, ENDPOINT)
    parsed = parse_line(before + body + after, 1, ENDPOINT)
    assert isinstance(parsed, Line) and (b"NaN" in body or parsed.body == json.loads(body))


def test_a_large_file_is_read_by_a_process_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found, and what is wrong, is the same as here."""
    monkeypatch.setattr(lines_module, "BESIDE_BYTES", 0)
    path = tmp_path / "in"
    for content in (lines_of("one", "two", "three"), lines_of("one", "one")):
        path.write_bytes(content)
        found = asyncio.run(read_beside(path, ENDPOINT, LineLimits()))
        assert found == read_input(path, ENDPOINT, rest=None)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        asyncio.run(read_beside(path, ENDPOINT, LineLimits()))


def test_a_process_beside_that_dies_is_an_error() -> None:
    assert asyncio.run(run_beside(os.getpid)) != os.getpid()
    with pytest.raises(OSError, match="has ended with 3"):
        asyncio.run(run_beside(os._exit, 3))


@pytest.mark.parametrize(("window", "seconds"), [("24h", 86_400), ("90m", 5400), ("30d", 30 * 86_400)])
def test_windows(window: str, seconds: int) -> None:
    assert window_s(window) == seconds


@pytest.mark.parametrize("window", ["", "h", "24", "0h", "31d", "-1h", "1.5h", "24 h", "9999999m"])
def test_windows_that_are_refused(window: str) -> None:
    body = {"input_file_id": "file-1", "endpoint": ENDPOINT, "completion_window": window}
    with pytest.raises(RequestError, match="completion_window") as refused:
        parse_batch(json.dumps(body).encode())
    assert refused.value.param == "completion_window"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"model": "m"}, "model"),
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any], param: str) -> None:
    body = {"input_file_id": "file-1", "endpoint": ENDPOINT, "completion_window": "24h", **fields}
    with pytest.raises(RequestError) as refused:
        parse_batch(json.dumps(body).encode())
    assert refused.value.param == param


def test_the_object_of_a_batch(tmp_path: Path) -> None:
    batch = Stores(tmp_path).begin(lines_of("one"))
    made = batch_object(batch.record, Progress())
    assert (made["status"], made["output_file_id"], made["errors"]) == ("validating", None, None)
    running = Progress(Status.IN_PROGRESS, 3, 1, 1, opened_at=5.9)
    made = batch_object(batch.record, running)
    assert made["request_counts"] == {"total": 3, "completed": 1, "failed": 1}
    assert (made["status"], made["in_progress_at"], made["error_file_id"]) == ("in_progress", 5, None)
    made = batch_object(batch.record, running, cancelled_at=7.0)
    assert (made["status"], made["cancelling_at"], made["cancelled_at"]) == ("cancelling", 7, None)
    for outcome in (Status.COMPLETED, Status.EXPIRED, Status.FAILED, Status.CANCELLED):
        made = batch_object(batch.record, Progress(outcome, 3, 1, 1, 5.0, 6.0, 7.0, outcome), 5.5)
        ends = {name: made[f"{name}_at"] for name in ("completed", "expired", "failed", "cancelled")}
        assert ends == {name: 7 if name == outcome else None for name in ends}
        assert made["output_file_id"] == batch.record.output_file_id
        assert made["error_file_id"] == batch.record.error_file_id
        assert made["cancelling_at"] == (5 if outcome is Status.CANCELLED else None)
        assert made["finalizing_at"] == (6 if outcome is Status.COMPLETED else None)


def test_every_state_is_described() -> None:
    assert list(get_args(StatusName)) == list(Status)


def test_an_empty_list() -> None:
    assert json.loads(page_body([], has_more=False)) == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }
