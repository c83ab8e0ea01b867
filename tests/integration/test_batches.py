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
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from tests.integration.cluster import paced, parts
from tests.integration.conftest import MODEL, WAIT_S, Server, eventually

ROOT = Path(__file__).parents[2]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
NUM_MANY, MANY_TOKENS = 200, 8
"""Lines of a long batch, and the tokens of each answer."""
PACE_S = 0.1
"""Least time of a step while something is done to a batch, of whose lines the first takes a second, and all forty."""
OUTCOMES = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, body: dict[str, Any], url: str = COMPLETION) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode() + b"\n"


def many(max_tokens: int = MANY_TOKENS, count: int = NUM_MANY) -> bytes:
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


def test_a_batch_is_cancelled_and_gives_its_blocks_back(server: Server, client: OpenAI, tmp_path: Path) -> None:
    with paced(server, tmp_path / "gate", PACE_S):
        batch = begin(client, many())
        eventually(lambda: num_completed(client, batch.id) >= 2, "two lines are answered")
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch.id)
    output, errors = lines_in(client, batch.output_file_id), lines_in(client, batch.error_file_id)
    assert batch.status == "cancelled" and len(output) + len(errors) == NUM_MANY and len(output) < NUM_MANY
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}


def test_clients_are_answered_while_a_batch_runs(server: Server, client: OpenAI, tmp_path: Path) -> None:
    with paced(server, tmp_path / "gate", PACE_S):
        batch = begin(client, many())
        eventually(lambda: num_completed(client, batch.id) >= 2, "the batch runs")
        answers = [server.complete(f"Question {number}:", max_tokens=4) for number in range(8)]
        assert all(len(answer["choices"][0]["token_ids"]) == 4 for answer in answers), "none was turned away"
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled"), "the batch was not over"
    ended(client, batch.id)


def test_a_batch_goes_on_when_its_ingress_replica_is_killed(server: Server, client: OpenAI, tmp_path: Path) -> None:
    with paced(server, tmp_path / "gate", PACE_S):
        batch = begin(client, many())
        eventually(lambda: num_completed(client, batch.id) >= 5, "some lines are answered")
        [ingress] = [pid for pid, part in parts().items() if part == "ServeReplica:raydix:ingress"]
        os.kill(ingress, signal.SIGKILL)

    def answers() -> bool:
        with contextlib.suppress(Exception):  # until there is another replica
            return client.batches.retrieve(batch.id).status in OUTCOMES
        return False

    eventually(answers, "another replica has ended the batch")
    batch = ended(client, batch.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", NUM_MANY)
    assert [each["custom_id"] for each in lines_in(client, batch.output_file_id)] == [*map(str, range(NUM_MANY))]


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
