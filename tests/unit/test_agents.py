"""First requests of coding agents, as these send them by default: each is answered, and nothing is lost."""

import json
import pickle
import re
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

import pytest

from raydix.configs.schema import ModelSection
from raydix.engine.api.anthropic.errors import error_body
from raydix.engine.api.validation import BodyRules
from raydix.engine.core.answers.transcripts import EncodedText
from raydix.engine.core.errors import ContextLengthError
from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model
from raydix.engine.model.tokenizer import Tokenizer
from raydix.engine.serving.reader_work import ReadingFacts
from raydix.engine.serving.reading import Reader
from raydix.engine.serving.served_model import ServedModel
from tests.unit.ingress import MODEL, Replica, Reply, Served, call
from tests.unit.served_app import app

MARK = {"type": "ephemeral"}
READ = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}

CLAUDE_CODE: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 32_000,
    "stream": True,
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday is a day.\n</system-reminder>"},
                {"type": "text", "text": "what is here?", "cache_control": MARK},
            ],
        }
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197; cc_entrypoint=cli; cch=fa690;"},
        {"type": "text", "text": "You write code.", "cache_control": MARK},
        {"type": "text", "text": "You are brief.", "cache_control": MARK},
    ],
    "tools": [
        {"name": "Read", "description": "Reads a file.", "input_schema": READ},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "user_0_account__session_0"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
}
"""Claude Code 2.1.197."""

CODEX: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You write code.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>none</permissions>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "what is here?"}]},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": READ},
        {
            "type": "namespace",
            "name": "mcp__files",
            "description": "Files.",
            "tools": [
                {"type": "function", "name": "read", "description": "Reads.", "strict": False, "parameters": READ}
            ],
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files.",
            "format": {
                "type": "grammar",
                "syntax": "lark",
                "definition": 'start: "*** " /[A-Z]+/ LF\n%import common.LF',
            },
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "019a-session",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "0"},
}
"""Codex CLI 0.169."""


STEP = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}


def tool(name: str, parameters: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A function of a chat."""
    return {"type": "function", "function": {"name": name, "description": "Acts.", "parameters": parameters, **fields}}


def text(words: str) -> list[dict[str, str]]:
    """A content of one part."""
    return [{"type": "text", "text": words}]


SYSTEM = {"role": "system", "content": "You act."}
STREAMED = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
FIRST_CHATS: dict[str, dict[str, Any]] = {
    "opencode 1.18.33": {
        **STREAMED,
        "max_tokens": 8192,
        "messages": [SYSTEM, {"role": "user", "content": "what is here?"}],
        "tools": [
            tool(
                "bash",
                {
                    "$schema": "https://json-schema.org/draft/2020-12/schema",
                    "type": "object",
                    "properties": {
                        "command": {"type": "string", "description": "The command."},
                        "timeout": {
                            "minimum": -9007199254740991,
                            "exclusiveMinimum": 0,
                            "type": "integer",
                            "maximum": 9007199254740991,
                        },
                    },
                    "required": ["command"],
                },
            )
        ],
        "tool_choice": "auto",
    },
    "qwen-code 0.15.10": {
        **STREAMED,
        "max_tokens": 8000,
        "messages": [SYSTEM, {"role": "user", "content": text("what is here?")}],
        "tools": [
            tool(
                "agent",
                {
                    "type": "object",
                    "properties": {
                        "kind": {"type": "string", "enum": ["one", "other"], "minLength": 1},
                        "count": {"type": "integer", "minimum": 1, "maximum": 20, "default": 5},
                    },
                    "required": ["kind"],
                    "additionalProperties": False,
                    "$schema": "http://json-schema.org/draft-07/schema#",
                },
            )
        ],
    },
    "pi 0.73.1": {
        **STREAMED,
        "store": False,
        "max_completion_tokens": 8192,
        "messages": [SYSTEM, {"role": "user", "content": text("what is here?")}],
        "tools": [tool("read", READ, strict=False)],
    },
    "autogen 0.7.5": {
        "model": MODEL,
        "stream": False,
        "messages": [SYSTEM, {"role": "user", "name": "user", "content": "make a step"}],
        "tool_choice": "auto",
        "tools": [tool("step", {**STEP, "additionalProperties": False}, strict=False)],
    },
    "smolagents 1.26.0": {
        "model": MODEL,
        "messages": [{"role": "system", "content": text("You act.")}, {"role": "user", "content": text("make a step")}],
        "stop": ["Observation:", "Calling tools:"],
        "tool_choice": "required",
        "tools": [
            tool("step", STEP),
            tool("final_answer", {"type": "object", "properties": {"answer": {"type": "string"}}}),
        ],
    },
    "deepagents 0.7.32": {
        "model": MODEL,
        "stream": False,
        "messages": [{"role": "system", "content": "You act."}, {"role": "user", "content": "make a step"}],
        "tools": [
            tool(
                "find",
                {
                    "type": "object",
                    "properties": {
                        "pattern": {"type": "string", "description": "A text."},
                        "path": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
                        "mode": {"type": "string", "enum": ["files", "count"], "default": "files"},
                        "most": {"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "null"}]},
                    },
                    "required": ["pattern"],
                },
            )
        ],
    },
    "haystack 3.4.1": {
        "model": MODEL,
        "stream": False,
        "n": 1,
        "messages": [SYSTEM, {"role": "user", "content": "make a step"}],
        "tools": [tool("step", STEP)],
    },
    "semantic-kernel 1.45.0": {
        "model": MODEL,
        "stream": False,
        "messages": [{**SYSTEM, "name": "stepper"}, {"role": "user", "content": "make a step"}],
        "tool_choice": "auto",
        "tools": [tool("Steps-step", STEP)],
    },
    "inspect 0.3.285": {
        "model": MODEL,
        "messages": [{"role": "user", "content": "You act. Make a step."}],
        "tool_choice": "auto",
        "tools": [tool("step", {**STEP, "additionalProperties": False}, strict=True)],
    },
    "aider 0.86.2": {
        "model": MODEL,
        "stream": True,
        "temperature": 0,
        "messages": [
            SYSTEM,
            {"role": "user", "content": "There are no files yet."},
            {"role": "assistant", "content": "Ok."},
            {"role": "user", "content": "make a step\n\n# *SEARCH/REPLACE block* Rules:\n\nBe exact."},
        ],
    },
    "crewai 1.15.30": {
        "model": MODEL,
        "messages": [SYSTEM, {"role": "user", "content": "\nmake a step\n\nSay the steps."}],
        "tool_choice": "auto",
        "tools": [tool("step", {**STEP, "additionalProperties": False}, strict=True)],
    },
    "dspy 3.4.1": {
        "model": MODEL,
        "messages": [
            {
                "role": "system",
                "content": "Your input fields are:\n1. `task` (str): \n\n[[ ## task ## ]]\n{task}\nYou act.",
            },
            {"role": "user", "content": "[[ ## task ## ]]\nmake a step\n\nEnd with `[[ ## completed ## ]]`."},
        ],
        "tools": [
            tool("step", STEP),
            tool("submit", {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}),
        ],
    },
    "promptfoo 0.121.20": {
        "model": MODEL,
        "messages": [SYSTEM, {"role": "user", "content": "make a step"}],
        "max_tokens": 1024,
        "temperature": 0,
        "tools": [tool("step", STEP)],
    },
    "llm 0.36": {
        **STREAMED,
        "messages": [SYSTEM, {"role": "user", "content": "make a step"}],
        "tools": [tool("step", STEP)],
    },
}
"""First requests of other programs, by name and version."""

NAMING = ("autogen 0.7.5", "semantic-kernel 1.45.0")
"""Programs that name who speaks, which the template of the default model does not render."""

OPENAI_AGENTS: dict[str, Any] = {
    "model": MODEL,
    "include": [],
    "input": [{"content": "make a step", "role": "user"}],
    "instructions": "You act.",
    "tools": [
        {
            "name": "step",
            "parameters": {
                "properties": {"number": {"title": "Number", "type": "integer"}},
                "required": ["number"],
                "title": "step_args",
                "type": "object",
                "additionalProperties": False,
            },
            "strict": True,
            "type": "function",
            "description": "Makes a step.",
        }
    ],
}
"""OpenAI's Agents SDK 0.24.0."""


def post(path: str, body: dict[str, Any]) -> Callable[[], Awaitable[Reply]]:
    return lambda: call(app, "POST", path, json.dumps(body).encode(), headers={"anthropic-beta": "a,b"})


@cache
def reader() -> Reader:
    """A reader with the default model's tokenizer, which reads bodies as a replica does."""
    folder = resolve_model(DEFAULT_MODEL)
    rules = BodyRules(volatile_lines=ModelSection(source=DEFAULT_MODEL).volatile_lines)
    facts = ReadingFacts(ServedModel(MODEL, 4096, 49_152), folder, special_tokens_in_messages=False, rules=rules)
    return Reader(facts, Tokenizer(folder))


def read(route: str, body: dict[str, Any]) -> EncodedText:
    """The prompt of a body."""
    chat = reader().read_body(route, json.dumps(body).encode()).chat
    assert chat is not None
    return chat


@pytest.mark.parametrize(("path", "body"), [("/v1/messages?beta=true", CLAUDE_CODE), ("/v1/responses", CODEX)])
def test_a_first_request_is_answered(served: Served, path: str, body: dict[str, Any]) -> None:
    reply = served(Replica(max_model_len=40_000), post(path, body))
    assert reply.status == 200, reply.body
    assert b"data: " in reply.body and reply.headers["x-raydix-ignored"]


@pytest.mark.parametrize("program", FIRST_CHATS)
def test_first_chats_are_answered(served: Served, program: str) -> None:
    reply = served(Replica(max_model_len=40_000), post("/v1/chat/completions", FIRST_CHATS[program]))
    assert reply.status == 200, reply.body
    unlimited = {**FIRST_CHATS[program], "max_tokens": None, "max_completion_tokens": None}  # the context here is short
    reading = reader().read_body("chat", json.dumps(unlimited).encode())
    assert reading.chat is not None and "You act." in reading.chat.text
    assert list(reading.spec.ignored) == (["messages.name"] if program in NAMING else [])


def test_the_first_response_of_the_agents_sdk_is_answered(served: Served) -> None:
    assert served(Replica(max_model_len=40_000), post("/v1/responses", OPENAI_AGENTS)).status == 200
    assert not reader().read_body("responses", json.dumps(OPENAI_AGENTS).encode()).spec.ignored


def test_what_has_no_effect_is_named() -> None:
    reading = reader().read_body("messages", json.dumps(CLAUDE_CODE).encode())
    assert sorted(reading.spec.ignored) == [
        "output_config.effort",
        "system.x-anthropic-billing-header:",
        "tools.web_search_20250305",
    ]
    reading = reader().read_body("responses", json.dumps(CODEX).encode())
    assert sorted(reading.spec.ignored) == [
        "client_metadata",
        "include.reasoning.encrypted_content",
        "reasoning.effort",
        "reasoning.summary",
        "text.verbosity",
        "tools.local_shell",
        "tools.web_search",
    ]


def test_the_changing_line_of_claude_code_changes_no_token() -> None:
    other = json.loads(json.dumps(CLAUDE_CODE).replace("fa690", "0b1c2"))
    assert other != CLAUDE_CODE and read("messages", other).token_ids == read("messages", CLAUDE_CODE).token_ids
    count = reader().read_body("count_tokens", json.dumps({**CLAUDE_CODE, "max_tokens": None}).encode())
    assert count.chat is not None and count.chat.token_ids == read("messages", CLAUDE_CODE).token_ids


@pytest.mark.parametrize("num_words", [4_200, 400_000])
def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_agents_look_for(num_words: int) -> None:
    """Claude Code compacts its conversation by this expression, and by the two numbers."""
    body = json.dumps({**CLAUDE_CODE, "messages": [{"role": "user", "content": "word " * num_words}]}).encode()
    with pytest.raises(ContextLengthError) as caught:
        reader().read_body("messages", body)
    assert caught.value.code == "context_length_exceeded"
    error = json.loads(error_body(pickle.loads(pickle.dumps(caught.value))))["error"]
    assert error["type"] == "invalid_request_error"
    found = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", error["message"], re.IGNORECASE)
    assert found is not None
    num_tokens, limit = map(int, found.groups())
    assert limit in (4095, 4096) and num_words <= num_tokens < 1.1 * num_words + 200


def test_a_call_of_a_function_in_a_namespace_comes_back_by_its_own_name(served: Served) -> None:
    here = Replica(max_model_len=4096)
    here.dispatcher.answer = '<tool_call>\n{"name": "mcp__files__read", "arguments": {"path": "a"}}\n</tool_call>'
    first = served(here, post("/v1/responses", CODEX | {"stream": False}))
    assert first.status == 200, first.body
    [item] = first.json["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "mcp__files", "read")
    assert json.loads(item["arguments"]) == {"path": "a"}

    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "empty"}
    text = read("responses", CODEX | {"input": [*CODEX["input"], item, result]}).text
    assert text.count('"name": "mcp__files__read"') == 2, "among the functions, and as the call"


def test_a_call_without_tags_is_a_call(served: Served) -> None:
    here = Replica(max_model_len=40_000)
    here.dispatcher.answer = '{"name": "Read", "arguments": {"path": "a"}}'
    message = served(here, post("/v1/messages", CLAUDE_CODE | {"stream": False})).json
    [block] = message["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "Read", {"path": "a"})
    assert message["stop_reason"] == "tool_use"

    here.dispatcher.answer = '{"name": "Read", "arguments": {}}'
    message = served(here, post("/v1/messages", CLAUDE_CODE | {"stream": False})).json
    assert message["content"][0]["type"] == "text", "the arguments do not fit"
