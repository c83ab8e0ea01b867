"""The scripted model: its script, and its answers through the whole engine."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from raydix.engine.core.errors import StartupError
from raydix.engine.core.settings import EngineSettings, SchedulerLimits
from raydix.engine.core.types import Assignment, Grammar, GrammarKind, Sampling, Stage, TokenEvent
from raydix.engine.model.build import build_engine
from raydix.engine.model.engine import Engine
from raydix.engine.model.scripted import SCRIPT, Script, ScriptLine, read_script
from raydix.engine.model.sources import SCRIPTED
from raydix.engine.model.tokenizer import Tokenizer
from tests.model.random_logits import run
from tests.model.scripted import scripted_folder

LINES: list[dict[str, object]] = [
    {"after": "", "answer": "What?"},
    {"after": "ping", "answer": "pong"},
    {"after": "look", "answer": "I look.", "calls": [{"name": "ls", "arguments": {"path": "a"}}]},
    {"after": "look", "if": "in French", "answer": "Je regarde."},
]


def test_the_last_text_of_the_prompt_chooses_the_answer() -> None:
    script = Script(
        (
            ScriptLine("", "What?"),
            ScriptLine("ping", "pong"),
            ScriptLine("ping ping", "2"),
            ScriptLine("look", "oui", "French"),
        )
    )
    assert script.answer("ping, look") == "pong", "the other line wants French"
    assert script.answer("French: ping, look") == "oui"
    assert script.answer("look ping ping") == "2"
    assert script.answer("nothing") == "What?"
    assert Script(()).answer("nothing") == ""


@pytest.mark.parametrize(
    "text",
    ["[]", "{", '{"answer": "a"}', '{"after": 1}', '{"after": "", "calls": [{"name": "a"}]}', '{"after": []}'],
)  # fmt: skip
def test_a_line_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / SCRIPT).write_text(f'{{"after": "", "answer": ""}}\n\n{text}\n')
    with pytest.raises(StartupError, match=r"script\.jsonl:3"):
        read_script(tmp_path)
    with pytest.raises(StartupError, match="cannot be read"):
        read_script(tmp_path / "elsewhere")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scripted_folder(tmp_path_factory.mktemp("scripted"), LINES)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return build_engine(
        EngineSettings(
            source=f"{SCRIPTED}{folder}",
            dtype="float32",
            device="cpu",
            max_model_len=1024,
            block_size=16,
            num_blocks=200,
            pool_gib=None,
            limits=SchedulerLimits(64, 8),
        )
    )


Answer = tuple[str, int, str | None]
Ask = Callable[..., list[Answer]]


@pytest.fixture
def ask(engine: Engine, folder: Path) -> Ask:
    """Runs requests to their ends; returns text, cached tokens and error of each."""
    tokenizer = Tokenizer(folder)

    def answer(events: Sequence[TokenEvent]) -> Answer:
        text = tokenizer.decode([event.token_id for event in events if event.token_id is not None])
        return text, events[0].cached_tokens, events[-1].detail

    def ask(*prompts: str, grammar: Grammar | None = None) -> list[Answer]:
        params = Sampling(max_tokens=64, grammar=grammar, stop_token_ids=tuple(tokenizer.eos_token_ids))
        requests = []
        for prompt in prompts:
            ids = tuple(tokenizer.encode(prompt))
            requests.append(Assignment(prompt, 0, Stage.WHOLE, ids, len(ids), params, "ingress"))
        return [answer(events) for events in run(engine, requests).values()]

    return ask


def test_answers_in_a_batch_and_again_from_the_cache(ask: Ask) -> None:
    call = '<tool_call>\n{"name": "ls", "arguments": {"path": "a"}}\n</tool_call>'
    prompts = "a word " * 40 + "ping", "in German: look", "in French: look", "?"
    first = ask(*prompts)
    assert [text for text, _, _ in first] == ["pong", f"I look.\n{call}", "Je regarde.", "What?"]
    again = ask(*prompts)
    assert [text for text, _, _ in again] == [text for text, _, _ in first]
    assert again[0][1] >= 64, "the blocks of the first prompt are hit"


def test_a_grammar_allows_the_script_or_ends_the_request(ask: Ask) -> None:
    allowed = Grammar(GrammarKind.REGEX, "p[a-z]+")
    assert ask("ping", grammar=allowed)[0][0] == "pong"
    [(_, _, error)] = ask("?", grammar=allowed)
    assert error is not None and "script" in error


def test_json_of_a_script_is_what_was_written(folder: Path) -> None:
    assert [json.loads(line) for line in (folder / SCRIPT).read_text().splitlines()] == LINES
