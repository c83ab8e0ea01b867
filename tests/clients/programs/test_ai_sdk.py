"""Vercel's AI SDK (npm `ai`) with its OpenAI-compatible provider: `ai_sdk/ask.mjs` asks, and prints what it sees."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.clients.cases import River, assert_finish, assert_query
from tests.clients.programs.environment import ENVIRONMENTS, run
from tests.clients.server import MODEL, Server

FOLDER = ENVIRONMENTS / "node"
SCRIPT = Path(__file__).parent / "ai_sdk/ask.mjs"
PACKAGE = FOLDER / "node_modules/ai/package.json"
VERSION = json.loads(PACKAGE.read_text())["version"] if PACKAGE.exists() else ""

pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(not PACKAGE.exists(), reason="not installed: `make test-clients` needs npm for it"),
]


def ask(server: Server, what: str) -> Any:
    """Return what the script prints. The script comes from stdin, so that Node finds packages from its folder."""
    arguments: list[str | Path] = ["node", "--input-type=module", "-", server.url, MODEL, what]
    return json.loads(run(arguments, FOLDER, stdin=SCRIPT.read_text()))


def test_generate_text(server: Server) -> None:
    answer = ask(server, "generateText")
    assert answer["text"]
    assert_finish(answer["finishReason"])
    assert answer["usage"]["inputTokens"] > 0 and answer["usage"]["outputTokens"] > 0


def test_stream_text(server: Server) -> None:
    answer = ask(server, "streamText")
    assert "".join(answer["parts"]) == answer["text"] == ask(server, "generateText")["text"]
    assert_finish(answer["finishReason"])
    assert answer["usage"]["outputTokens"] > 0


def test_generate_text_with_tools(server: Server) -> None:
    answer = ask(server, "tools")
    called, told = answer["steps"]
    assert called["finishReason"] == "tool-calls"
    [query] = called["inputs"]
    assert_query(query)
    assert [output["city"] for output in called["outputs"]] == [query["city"]]
    assert told["inputs"] == [] and answer["text"]


def test_stream_text_with_tools(server: Server) -> None:
    answer = ask(server, "streamTools")
    [query] = answer["inputs"]
    assert_query(query)
    assert {"tool-input-start", "tool-input-delta", "tool-call"} <= set(answer["kinds"])


@pytest.mark.parametrize("what", ["generateObject", "streamObject", "output"])
def test_objects(server: Server, what: str) -> None:
    River.model_validate(ask(server, what)["object"])
