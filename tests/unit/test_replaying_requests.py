"""Recordings of requests: everything that entered is in the file, and is sent again with the same answers."""

import asyncio
import contextlib
import io
import json
import logging
import os
import stat
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raydix.actors.ingress.recorder import WARNING
from raydix.cli.main import main
from raydix.cli.replay import ComparedAnswer, RecordedRun, read, report, send_again
from raydix.engine.api.answer_digest import LEFT, digest_of, name_in
from raydix.engine.api.routes import ROUTES
from raydix.engine.core.errors import StartupError
from raydix.engine.core.tenants import Tenant, Tenants, key_hash
from tests.unit.ingress import ANSWER, Replica, Reply, Served, body_of, call
from tests.unit.served_app import app

COMPLETIONS, CHATS, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
LONG = "a longer answer, which a recording has as a digest"

Work = Callable[[], Awaitable[object]]


def drawing_replica() -> Replica:
    """A replica whose answers depend on seeds."""
    replica = Replica(max_requests=100)  # a replay may send all at once
    replica.dispatcher.draws = True
    return replica


async def post(path: str, body: bytes | Mapping[str, Any], **options: Any) -> Reply:
    return await call(app, "POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), **options)


def recorded(served: Served, folder: Path, replica: Replica, work: Work, **logging_keys: object) -> Path:
    """The file of a server to which `work` sends requests."""
    served(replica, work, logging={"recording": str(folder), **logging_keys})
    [path] = folder.glob("requests-*.jsonl")
    return path


def replayed(served: Served, path: Path, replica: Replica) -> tuple[RecordedRun, list[ComparedAnswer], str, int]:
    """The recording, the answers of another server, the report and the exit code."""
    recording, shown = read(path), io.StringIO()

    async def send(path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        reply = await call(app, "POST", path, body, headers=dict(headers))
        return reply.status, reply.body

    found = served(replica, lambda: send_again(recording, send, speed=1e6))
    code = report(recording, found, Console(file=shown, width=200))
    return recording, found, shown.getvalue(), code


async def ask_everything() -> None:
    """Every API, whole and as a stream; with a seed and without; in valid bodies and others."""
    for stream in (False, True):
        await call(app, "POST", COMPLETIONS, body_of("completion", stream=stream, n=2))
        await call(app, "POST", COMPLETIONS, body_of("completion", stream=stream, seed=5, logprobs=1))
        await call(app, "POST", CHATS, body_of("chat", stream=stream))
        await post(RESPONSES, {"input": "one", "stream": stream})
        messages = [{"role": "user", "content": "ask"}]
        await post(MESSAGES, {"messages": messages, "max_tokens": 40, "stream": stream})
    await post("/v1/embeddings", {"input": ["a", "b"]})
    await post("/v1/chat/completions/batch", {"messages": [messages, messages], "temperature": 0})
    await post(COMPLETIONS, b"{")
    await post(COMPLETIONS, {"prompt": "a", "model": "other"})
    await post("/tokenize", {"prompt": "not recorded"})


def test_another_server_answers_the_same(served: Served, tmp_path: Path) -> None:
    path = recorded(served, tmp_path, drawing_replica(), ask_everything)
    recording, found, shown, code = replayed(served, path, drawing_replica())
    assert code == 0 and "14 answers the same as then" in shown, shown
    assert len(recording.asked) == 14 and all(asked.then.parts is not None for asked in recording.asked)
    assert {now.status for now in found} == {200, 400, 404}
    drawn = [asked.then.seed for asked in recording.asked if asked.path == COMPLETIONS]
    assert drawn[0] is not None and drawn[1] is None, "only a body without a seed needs one"


def test_the_file_says_what_it_has_and_nobody_else_reads_it(served: Served, tmp_path: Path) -> None:
    replica = Replica(tenants=Tenants([Tenant("alice")], {key_hash("rdx-key"): "alice"}))
    headers = {"authorization": "Bearer rdx-key", "x-session-id": "s"}

    async def ask() -> None:
        await post(COMPLETIONS, {"prompt": "my prompt"}, headers=headers)
        await post(COMPLETIONS, {"prompt": "a stranger's"})

    path = recorded(served, tmp_path / "new", replica, ask)
    first, request, answer = map(json.loads, path.read_text().splitlines())
    assert first["recording"] == WARNING == "contains prompts"
    assert json.loads(request["body"]) == {"prompt": "my prompt"} and request["headers"]["x-session-id"] == "s"
    assert answer["parts"]["0.text"] == ANSWER and request["at"] <= answer["at"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not [secret for secret in ("rdx-key", "alice", "stranger") if secret in path.read_text()]


def test_a_request_is_noted_before_it_is_served(served: Served, tmp_path: Path) -> None:
    """What a server was asked when it died."""
    replica = Replica()
    replica.dispatcher.hangs_after = 1

    async def ask() -> None:
        task = asyncio.create_task(call(app, "POST", COMPLETIONS, [b'{"prompt"', b': "last"}']))
        while not replica.dispatcher.begun:
            await asyncio.sleep(0)
        [asked] = read(next(tmp_path.glob("requests-*"))).asked
        assert json.loads(asked.body) == {"prompt": "last"} and asked.reason_to_skip() == "the recording has no answer"
        task.cancel()

    recorded(served, tmp_path, replica, ask)


def test_other_answers_are_shown(served: Served, tmp_path: Path) -> None:
    async def ask() -> None:
        await call(app, "POST", COMPLETIONS, body_of("completion", max_tokens=60))
        await call(app, "POST", CHATS, body_of("chat"))

    path = recorded(served, tmp_path, Replica(), ask)
    other = Replica()
    other.dispatcher.answer = LONG
    _, _, shown, code = replayed(served, path, other)
    assert code == 1 and "0 answers the same as then" in shown and "2 different" in shown
    assert f"request 0, {COMPLETIONS}" in shown
    assert f"0.text: then '{ANSWER}', now '{len(LONG)} characters, " in shown


def test_a_stored_response_is_gone_on_from_by_its_new_id(served: Served, tmp_path: Path) -> None:
    async def ask() -> None:
        first = (await post(RESPONSES, {"input": "one"})).json["id"]
        await post(RESPONSES, {"input": "two", "previous_response_id": first, "stream": True})

    path = recorded(served, tmp_path, drawing_replica(), ask)
    replica = drawing_replica()
    recording, found, shown, code = replayed(served, path, replica)
    assert (code, [now.status for now in found]) == (0, [200, 200]), shown
    assert found[0].id != recording.asked[0].then.id
    assert bytes(replica.dispatcher.begun[1].prompt).startswith(b"one")


def test_clients_that_left_and_seeds_for_several_prompts_are_not_compared(served: Served, tmp_path: Path) -> None:
    async def ask() -> None:
        await call(
            app, "POST", COMPLETIONS, body_of("completion", stream=True), leaves_at=lambda reply: bool(reply.body)
        )
        await post(COMPLETIONS, {"prompt": ["a", "b"]})
        await post(COMPLETIONS, {"prompt": ["a", "b"], "temperature": 0})

    path = recorded(served, tmp_path, drawing_replica(), ask)
    recording, _, shown, code = replayed(served, path, drawing_replica())
    assert recording.asked[0].then.why == LEFT and recording.asked[0].left_after_s is not None
    assert f"1 not compared: {LEFT}" in shown and "1 not compared: several prompts" in shown
    assert "1 answers the same as then" in shown and code == 0


@pytest.mark.parametrize("stream", [False, True])
def test_unforeseen_errors_are_compared(served: Served, tmp_path: Path, stream: bool) -> None:
    async def ask() -> None:
        with contextlib.suppress(LookupError):
            await call(app, "POST", COMPLETIONS, body_of("completion", stream=stream))

    replica = Replica()
    replica.dispatcher.error = LookupError("a fault")
    path = recorded(served, tmp_path, replica, ask)
    [asked] = read(path).asked
    assert (asked.then.status, asked.reason_to_skip()) == (500, None)
    _, _, shown, code = replayed(served, path, Replica())
    assert code == 1 and "status: then 500, now 200" in shown
    assert (
        report(read(path), [ComparedAnswer(500, parts={"code": "service_unavailable"})], Console(file=io.StringIO()))
        == 0
    )


def test_a_client_that_leaves_a_whole_answer_is_no_answer(served: Served, tmp_path: Path) -> None:
    replica = Replica()
    replica.dispatcher.hangs_after = 1
    path = recorded(
        served,
        tmp_path,
        replica,
        lambda: call(app, "POST", COMPLETIONS, body_of("completion"), leaves_at=lambda _: True),
    )
    [asked] = read(path).asked
    assert asked.then.why == LEFT and asked.reason_to_skip() == LEFT


def test_a_full_file_ends_the_recording_and_not_the_server(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask() -> None:
        for _ in range(4):
            assert (await post(COMPLETIONS, {"prompt": "x" * 400_000})).status == 400

    path = recorded(served, tmp_path, Replica(), ask, recording_mib=1)
    assert len(read(path).asked) == 2 and path.stat().st_size < 1 << 20
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "the file is full" in warning.getMessage()


def test_a_folder_that_cannot_be_made_stops_nothing(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    reply = served(
        Replica(),
        lambda: call(app, "POST", COMPLETIONS, body_of("completion")),
        logging={"recording": str(tmp_path / "file" / "folder")},
    )
    assert reply.status == 200 and "nothing is recorded" in caplog.text


def test_what_the_disk_does_not_take_ends_the_recording(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask() -> None:
        monkeypatch.setattr(os, "write", lambda file, data: 1)
        assert (await call(app, "POST", COMPLETIONS, body_of("completion"))).status == 200
        monkeypatch.undo()

    recorded(served, tmp_path, Replica(), ask)
    assert "the disk is full" in caplog.text


def test_requests_for_answers_are_recorded_and_no_others() -> None:
    recorded = {route.path for route in ROUTES if route.is_answer}
    assert {"/v1/chat/completions/batch", "/v1/embeddings", "/invocations"} < recorded
    assert not {"/tokenize", "/v1/messages/count_tokens", "/v1/files"} & recorded


def test_a_stream_has_the_same_digest_however_its_text_is_divided() -> None:
    def stream(*texts: str) -> bytes:
        chunks = [{"id": texts[0], "choices": [{"index": 1, "delta": {"content": text}}]} for text in texts]
        return b"".join(b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"

    whole = digest_of(stream(LONG))
    assert whole == digest_of(stream(LONG[:7], LONG[7:])) != digest_of(stream(LONG[1:]))
    assert whole["1.content"].startswith(f"{len(LONG)} characters")
    assert name_in(stream("ab", "c")) == "ab"


@pytest.mark.parametrize("content", [None, b"", b"{}\n", b"[1]\n", b"no JSON\n", b'{"began": "", "model": {}}\n1\n'])
def test_other_files_are_refused(content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recording"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StartupError, match="recording"):
        read(path)
    assert main(["replay", str(path)]) == 2
    assert "recording" in capsys.readouterr().err


def test_no_server_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recording"
    path.write_text('{"began": "", "model": {}}\n')
    assert main(["replay", str(path), "--url", "http://127.0.0.1:1"]) == 2
    assert "there is no server at http://127.0.0.1:1" in capsys.readouterr().err
    assert main(["replay", str(path), "--speed", "0"]) == 2
