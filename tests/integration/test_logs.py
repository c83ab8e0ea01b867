"""What happened can be read from the log files alone, after SIGKILL too, and none of it is anybody's text or key."""

import json
import os
import signal
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from raydix.actors.logs import log_folder
from tests.integration.cluster import paced
from tests.integration.conftest import MODEL, WAIT_S, Server, eventually, random_prompt

Record = dict[str, Any]

QUESTION = "zanzibar-prompt"
KEY = "sk-zanzibar-key"


def log_files() -> list[Path]:
    folder = log_folder()
    assert folder is not None
    return sorted(folder.glob("raydix-*.log*"))


def records(since: float = 0.0) -> list[Record]:
    """Everything that any process has logged since then, in order. Their times are cut off to milliseconds."""
    found = [json.loads(line) for path in log_files() for line in path.read_text().splitlines()]
    return sorted((record for record in found if logged_at(record) >= since - 0.001), key=logged_at)


def logged_at(record: Record) -> float:
    return datetime.fromisoformat(record["time"]).timestamp()


def first(story: list[Record], process: str, event: str, **fields: Any) -> Record:
    """The first record of a process about an event with these fields; KeyError without one."""
    wanted = {"process": process, "event": event, **fields}.items()
    found = [record for record in story if all(record.get(name) == value for name, value in wanted)]
    if not found:
        raise KeyError(f"{process} has logged no {event}")
    return found[0]


def process_of(role: str) -> int:
    """The process id of the worker of a role that started last, as the logs tell."""
    return int(
        [record["pid"] for record in records() if (record["process"], record.get("event")) == (role, "started")][-1]
    )


def test_the_story_of_a_killed_worker(server: Server, tmp_path: Path) -> None:
    epoch = server.workers()["decode"]["epoch"]
    with paced(server, tmp_path / "gate"):
        chunks = server.stream(random_prompt(90, 300), max_tokens=150)
        opening = [next(chunks), next(chunks)]
        request = opening[0]["id"].removeprefix("cmpl-")
        victim, killed_at = process_of("decode"), time.time()
        os.kill(victim, signal.SIGKILL)
    choices = [choice for chunk in [*opening, *chunks] for choice in chunk["choices"]]
    assert sum(len(choice.get("token_ids", ())) for choice in choices) == 150
    eventually(lambda: server.workers()["decode"]["epoch"] > epoch, "the decode worker is back")
    eventually(lambda: first(records(killed_at), "host-decode", "child_started"), "its host knows it, too")

    story = records(killed_at)
    noticed = first(story, "ingress", "worker_lost")
    assert noticed["requests"] == 1
    assert first(story, "kv_cache_manager", "worker_lost")["worker"] == noticed["worker"]
    moved = first(story, "ingress", "failover", attempt=1)
    assert moved["request"].startswith(request)
    assert 0 < moved["tokens"] < 150
    assert first(story, "host-decode", "child_died")["level"] == "WARNING"
    restarted = first(story, "host-decode", "child_started")
    assert restarted["took_s"] > 0
    successor = first(story, "decode", "started")
    assert successor["pid"] not in (victim, restarted["pid"])
    assert first(story, "kv_cache_manager", "registered", role="decode")["epoch"] > epoch
    ended = first(story, "ingress", "request", request=request)
    assert (ended["attempts"], ended["outcome"], ended["completion_tokens"]) == (2, "length", 150)
    assert ended["tenant"] == "anonymous" and ended["workers"]
    assert killed_at <= logged_at(noticed) + 0.001
    assert logged_at(noticed) <= logged_at(moved) <= logged_at(ended)
    assert logged_at(successor) <= logged_at(restarted)
    assert {"time", "level", "process", "pid", "node", "logger", "event", "message"} <= ended.keys()


def test_every_request_leaves_one_line(server: Server, tmp_path: Path) -> None:
    since = time.time()
    names = [f"logged-{number}" for number in range(3)]
    for name in names:
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 2, "stream": name == names[1]}
        assert post(server, body, {"x-request-id": name}) == 200

    def lines() -> list[Record]:
        return [record for record in records(since) if record.get("event") == "request"]

    with paced(server, tmp_path / "gate"):
        left = server.stream("Hello", max_tokens=2000)
        next(left)
        left.close()
        eventually(lambda: len(lines()) == 4, "four requests have ended")
    assert [record["request"] for record in lines()[:3]] == names
    assert lines()[3]["outcome"] == "aborted"


def test_refusals_are_summed_up_and_nobodys_text_or_key_is_logged(server: Server) -> None:
    """Of what is refused in every way that comes to mind, and of what is answered."""
    since = time.time()
    secretive = replace(server, api_key=KEY)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 3}
    completion = {"model": MODEL, "prompt": QUESTION, "max_tokens": 3}
    bad: list[tuple[str, Any]] = [
        ("/v1/chat/completions", chat),
        ("/v1/completions", completion),
        ("/v1/completions", {**completion, "echo": True, "stream": True, "user": QUESTION}),
        ("/v1/completions", {**completion, QUESTION: 1}),
        ("/v1/completions", {**completion, "max_tokens": QUESTION}),
        ("/v1/completions", {**completion, "model": QUESTION}),
        ("/v1/completions", {**completion, "prompt": QUESTION * 4000}),
        ("/v1/chat/completions", {**chat, "messages": [{"role": QUESTION, "content": QUESTION}]}),
        ("/v1/chat/completions", {**chat, "stop": [QUESTION] * 100}),
        ("/v1/completions", b'{"prompt": "' + QUESTION.encode()),
        (f"/v1/{QUESTION}", completion),
        (f"/v1/models/{QUESTION}", completion),
    ]
    answers = [secretive.request("POST", path, body) for path, body in bad]
    assert sum(status == 200 for status, _, _ in answers) >= 2
    answer = json.loads(answers[0][2])["choices"][0]["message"]["content"]
    refused = sum(status >= 400 for status, _, _ in answers)
    assert refused >= 8

    told = [record for record in records(since) if record.get("event") == "refusals"]
    assert len(told) <= 1, "one line a minute at most"
    written = "".join(path.read_text() for path in log_files())
    assert QUESTION not in written
    assert KEY not in written
    assert len(answer) < 8 or answer not in written


def post(server: Server, body: Record, headers: dict[str, str]) -> int:
    import http.client

    connection = http.client.HTTPConnection(server.host, server.port, timeout=WAIT_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {**server.headers, **headers})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()
