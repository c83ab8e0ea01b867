"""The whole server is killed and started again on its folders: KV, conversations and batches go on."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from tests.integration.conftest import MODEL, Server, eventually
from tests.integration.local import require_default_model
from tests.integration.test_batches import begin, client_of, ended, lines_in, many, num_completed
from tests.integration.test_disk import LIMITS, PROMPT, ask, config, num_blocks_in
from tests.integration.test_serve_cli import Terminal, assert_killing_frees_its_port

NUM_LINES = 24
LINE_TOKENS = 32
QUESTION: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}


@contextmanager
def serving(file: Path) -> Iterator[tuple[Terminal, Server, openai.OpenAI]]:
    terminal = Terminal("--config", str(file))
    try:
        terminal.until("ready after")
        server = Server("127.0.0.1", terminal.port)
        with client_of(server) as api:
            yield terminal, server, api
    finally:
        terminal.close()  # with SIGKILL


@pytest.mark.slow
def test_everything_on_disk_goes_on_after_a_kill(tmp_path: Path) -> None:
    require_default_model()
    folder, file = tmp_path / "kv", tmp_path / "server.yaml"
    batches = {"folder": str(tmp_path / "batches"), "concurrency": 2}
    file.write_text(yaml.safe_dump({**config(folder, {"mixed": LIMITS}), "batches": batches}))

    def num_stored() -> int:
        return len([*(folder / "responses").glob("*.response")])

    with serving(file) as (_, server, api):
        answer, num_cached = ask(server, PROMPT, 45)
        assert num_cached == 0
        first = api.responses.create(input="Name three rivers of Europe.", **QUESTION)
        expected = api.responses.create(input="Which is longest?", previous_response_id=first.id, **QUESTION)
        deleted = api.responses.create(input="Name three rivers of Europe.", **QUESTION)
        eventually(lambda: num_stored() == 3, "three responses on disk")
        api.responses.delete(deleted.id)
        eventually(lambda: num_stored() == 2, "the deleted one is gone")
        eventually(lambda: num_blocks_in(folder) >= (500 + 44) // 16, "prompt and answer on disk")

        batch = begin(api, many(max_tokens=LINE_TOKENS, count=NUM_LINES))
        eventually(lambda: num_completed(api, batch.id) >= 5, "some lines are answered")
        api.files.delete(batch.input_file_id)
        assert num_completed(api, batch.id) < NUM_LINES, "the batch is not over"

    with serving(file) as (terminal, server, api):
        again, num_cached = ask(server, PROMPT, 45)
        assert again == answer and num_cached >= 500 // 16 * 16
        assert api.responses.retrieve(first.id).output_text == first.output_text
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve(deleted.id)
        repeated = api.responses.create(input="Which is longest?", previous_response_id=first.id, **QUESTION)
        assert repeated.output_text == expected.output_text
        assert repeated.usage is not None and expected.usage is not None
        assert repeated.usage.input_tokens == expected.usage.input_tokens

        batch = ended(api, batch.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", NUM_LINES)
        output = lines_in(api, batch.output_file_id)
        assert [each["custom_id"] for each in output] == [*map(str, range(NUM_LINES))]
        assert all(each["response"]["body"]["usage"]["completion_tokens"] == LINE_TOKENS for each in output)
        events = [json.loads(each) for path in terminal.log_files() for each in path.read_text().splitlines()]
        ends = [event for event in events if event.get("event") == "request" and event["prompt_tokens"] < 10]
        assert 0 < len(ends) < NUM_LINES, "answered lines did not run again"
        assert_killing_frees_its_port(terminal)
