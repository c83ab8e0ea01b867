"""Batches on a running server, with OpenAI's client, through killed processes, and from the command line."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import psutil
import pytest
import yaml
from openai import BadRequestError, NotFoundError, OpenAI

from raydix.engine.core.errors import StartupError
from raydix.engine.model.sources import DEFAULT_MODEL, NULL, resolve_model
from tests.integration.conftest import MODEL, WAIT_S, Server, eventually

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
NUM_MANY = 200
OUTCOMES = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, body: dict[str, Any], url: str = COMPLETION) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode() + b"\n"


def many(max_tokens: int = 32, count: int = NUM_MANY) -> bytes:
    """Lines that take some seconds together."""
    body = {"max_tokens": max_tokens, "ignore_eos": True}
    return b"".join(line(str(number), {"prompt": f"{number} sheep", **body}) for number in range(count))


def client_of(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=server.api_key, max_retries=0)


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with client_of(server) as client:
        yield client


def begin(client: OpenAI, content: bytes, endpoint: Any = COMPLETION, **fields: Any) -> Any:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(content), "in.jsonl", "batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


def ended(client: OpenAI, batch_id: str) -> Any:
    def outcome() -> Any:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status in OUTCOMES else None

    return eventually(outcome, "the batch has ended")


def num_completed(client: OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


def lines_in(client: OpenAI, file_id: str) -> list[Any]:
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


def test_a_batch_gives_the_answers_that_clients_get(server: Server, client: OpenAI) -> None:
    system = {"role": "system", "content": "You list things. " * 30}
    chats = [[system, {"role": "user", "content": f"Name {number} rivers."}] for number in range(6)]
    bodies = [{"model": MODEL, "messages": messages, **GREEDY} for messages in chats]
    content = b"".join(line(f"chat-{number}", body, CHAT) for number, body in enumerate(bodies))
    batch = ended(client, begin(client, content + line("bad", {"messages": []}, CHAT), CHAT, metadata={"k": "v"}).id)

    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 7, 6, 1)
    assert batch.metadata == {"k": "v"} and batch.model == MODEL
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
    output = lines_in(client, batch.output_file_id)
    assert [each["custom_id"] for each in output] == [f"chat-{number}" for number in range(6)]
    for each, body in zip(output, bodies, strict=True):
        status, _, data = server.request("POST", CHAT, body)
        assert status == each["response"]["status_code"] == 200
        assert each["response"]["body"]["choices"] == json.loads(data)["choices"], "the same bits"
    assert sum(each["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"] for each in output) > 0
    [failed] = lines_in(client, batch.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("bad", 400)
    assert failed["response"]["body"]["error"]["param"] == "messages"


def test_lists_and_erasing(client: OpenAI) -> None:
    batches = [begin(client, line("one", {"prompt": "One,", "max_tokens": 1})) for _ in range(3)]
    for batch in batches:
        ended(client, batch.id)
    listed = [batch.id for batch in client.batches.list(limit=2)]
    assert {batch.id for batch in batches} <= set(listed), "the client reads page after page"
    assert listed[0] == batches[-1].id
    assert batches[0].input_file_id in [file.id for file in client.files.list(purpose="batch")]
    assert client.files.delete(batches[0].input_file_id).deleted
    with pytest.raises(NotFoundError):
        client.files.retrieve(batches[0].input_file_id)


def test_lines_that_are_not_valid_are_named(client: OpenAI) -> None:
    content = line("one", {"prompt": "x"}) + b"{\n" + line("one", {"prompt": "y"}) + line("c", {}, CHAT)
    batch = ended(client, begin(client, content).id)
    assert batch.status == "failed" and batch.output_file_id is batch.error_file_id is None
    assert [(error.line, error.code, error.param) for error in batch.errors.data] == [
        (2, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "mismatched_url", "url"),
    ]
    with pytest.raises(BadRequestError, match="cannot be cancelled"):
        client.batches.cancel(batch.id)
    with pytest.raises(BadRequestError, match="purpose"):
        client.files.create(file=("x", b"{}"), purpose="assistants")


def test_a_batch_is_cancelled_and_gives_its_blocks_back(client: OpenAI) -> None:
    batch = begin(client, many(max_tokens=200))
    eventually(lambda: num_completed(client, batch.id) >= 2, "two lines are answered")
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch.id)
    output, errors = lines_in(client, batch.output_file_id), lines_in(client, batch.error_file_id)
    assert batch.status == "cancelled" and len(output) + len(errors) == NUM_MANY and len(output) < NUM_MANY
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}


def test_clients_are_answered_while_a_batch_runs(server: Server, client: OpenAI) -> None:
    batch = begin(client, many(max_tokens=200))
    eventually(lambda: num_completed(client, batch.id) >= 2, "the batch runs")
    answers = [server.complete(f"Question {number}:", max_tokens=8) for number in range(20)]
    assert all(len(answer["choices"][0]["token_ids"]) == 8 for answer in answers), "none was turned away"
    client.batches.cancel(batch.id)
    ended(client, batch.id)


def test_a_batch_goes_on_when_its_ingress_replica_is_killed(server: Server, client: OpenAI) -> None:
    batch = begin(client, many(count=60))
    eventually(lambda: num_completed(client, batch.id) >= 5, "some lines are answered")
    [ingress] = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.is_running() and process.name().startswith("ray::ServeRepli") and "ingress" in process.cmdline()[0]
    ]
    ingress.send_signal(signal.SIGKILL)

    def answers() -> bool:
        with contextlib.suppress(Exception):  # until there is another replica
            return client.batches.retrieve(batch.id).status in OUTCOMES
        return False

    eventually(answers, "another replica has ended the batch")
    batch = ended(client, batch.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 60)
    assert [each["custom_id"] for each in lines_in(client, batch.output_file_id)] == [*map(str, range(60))]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A server that makes its tokens up, with a folder for batches."""
    try:
        resolve_model(DEFAULT_MODEL)
    except StartupError as error:
        pytest.skip(str(error))
    path = tmp_path / "batches.yaml"
    sections = {
        "model": {"source": f"{NULL}{DEFAULT_MODEL}"},
        "cache": {"segment_gib": 0.1, "num_blocks": 600},
        "workers": {"mixed": {"token_budget": 256, "max_requests": 8}},
        "batches": {"folder": str(tmp_path / "batches"), "concurrency": 2},
    }
    path.write_text(yaml.safe_dump(sections))
    return path


def raydix_batch(config: Path, source: Path, output: Path) -> subprocess.Popen[bytes]:
    raydix = Path(sys.executable).with_name("raydix")
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [str(raydix), "batch", str(source), "-o", str(output), "--config", str(config), "--concurrency", "2"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, env=own, start_new_session=True)


def num_answered(command: subprocess.Popen[bytes] | None, journal: Path) -> int:
    """Lines of the journal; fails if the command has ended."""
    assert command is None or command.poll() is None, command.communicate()
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def test_the_command_goes_on_where_it_was_interrupted_and_killed(config: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    journal = output.with_name("out.jsonl.journal")
    source.write_bytes(many(max_tokens=128) + line("bad", {"prompt": 7}))

    first = raydix_batch(config, source, output)
    eventually(lambda: num_answered(first, journal) > 0, "some are answered")
    first.send_signal(signal.SIGINT)
    _, shown = first.communicate(timeout=WAIT_S)
    assert first.returncode == 130, shown
    assert b"the same command goes on" in shown and not output.exists()

    num_before = num_answered(None, journal)
    second = raydix_batch(config, source, output)
    eventually(lambda: num_answered(second, journal) > num_before, "more are answered")
    second.kill()
    second.communicate(timeout=WAIT_S)
    assert not output.exists()

    third = raydix_batch(config, source, output)
    _, shown = third.communicate(timeout=WAIT_S)
    assert third.returncode == 1, shown
    assert f"{NUM_MANY} of {NUM_MANY + 1} lines answered".encode() in shown.replace(b"\n", b" ")
    ids = [json.loads(each)["custom_id"] for each in output.read_bytes().splitlines()]
    assert ids == [*map(str, range(NUM_MANY))]
    [failed] = (tmp_path / "out.errors.jsonl").read_bytes().splitlines()
    assert json.loads(failed)["custom_id"] == "bad"
    assert not journal.exists()

    config.write_text(yaml.safe_dump({"model": {"source": f"{NULL}/nowhere"}}))
    fourth = raydix_batch(config, source, output)
    _, shown = fourth.communicate(timeout=WAIT_S)
    assert fourth.returncode == 1 and f"{NUM_MANY} of {NUM_MANY + 1} lines answered".encode() in shown, (
        "nothing is left to do, so no model is loaded"
    )


def test_the_command_uses_a_running_server(server: Server, tmp_path: Path) -> None:
    import ray

    import raydix

    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"".join(line(str(number), {"prompt": f"{number},", **GREEDY}) for number in range(5)))
    address = ray.get_runtime_context().gcs_address
    raydix_command = str(Path(sys.executable).with_name("raydix"))
    command = [raydix_command, "batch", str(source), "-o", str(output), "--address", str(address)]
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    texts = [json.loads(each)["response"]["body"]["choices"][0]["text"] for each in output.read_bytes().splitlines()]

    summary = raydix.connect().batch(source, tmp_path / "again.jsonl")
    assert summary == raydix.BatchSummary(5, 5, 0)
    again = (tmp_path / "again.jsonl").read_bytes().splitlines()
    assert [json.loads(each)["response"]["body"]["choices"][0]["text"] for each in again] == texts
    with pytest.raises(raydix.RequestError, match="no tenant"):
        raydix.connect().batch(source, tmp_path / "x.jsonl", tenant="nobody")


def test_a_batch_of_messages(server: Server) -> None:
    """With Anthropic's client: the answers are those of the same requests one by one."""

    def asked(name: str) -> Any:
        question = [{"role": "user", "content": f"Name three {name} of Europe."}]
        return {"model": MODEL, "max_tokens": 12, "messages": question, "temperature": 0}

    names = ("rivers", "lakes", "mountains")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=WAIT_S) as client:
        requests: Any = [{"custom_id": name, "params": asked(name)} for name in names]
        requests.append({"custom_id": "bad", "params": {"max_tokens": 0}})
        made = client.messages.batches.create(requests=requests)
        assert (made.processing_status, made.request_counts.processing) == ("in_progress", 4)
        eventually(lambda: client.messages.batches.retrieve(made.id).processing_status == "ended", "the end")
        batch = client.messages.batches.retrieve(made.id)
        assert (batch.request_counts.succeeded, batch.request_counts.errored) == (3, 1)
        results: Any = {line.custom_id: line.result for line in client.messages.batches.results(made.id)}
        assert results.pop("bad").error.error.type == "invalid_request_error"
        for name in names:
            status, _, data = server.request("POST", "/v1/messages", asked(name))
            assert status == 200
            assert results[name].message.content[0].text == json.loads(data)["content"][0]["text"]
        assert made.id in [each.id for each in client.messages.batches.list(limit=2)]
        client.messages.batches.delete(made.id)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.batches.retrieve(made.id)
