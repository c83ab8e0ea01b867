"""Calls with the tokenizers of families whose tags are tokens that were added to the vocabulary without being special,
as `<tool_call>` of Qwen 2.5 and 3."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from raydix.engine.core.types import Grammar
from raydix.engine.model import grammar_tokenizer
from raydix.engine.model.grammar_source import canonical, native_source
from raydix.engine.model.grammar_tokenizer import load_tokenizer
from raydix.engine.model.grammar_tokens import regex_with_tokens
from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model
from raydix.engine.model.tokenizer import Tokenizer
from raydix.engine.serving.reader_work import GrammarQuestion, ReadingFacts
from raydix.engine.serving.reading import Reader
from raydix.engine.serving.served_model import ServedModel

TAGS = ("<tool_call>", "</tool_call>")
CLOCK = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'


@pytest.fixture(scope="module", params=[False, True], ids=["added", "special"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the default model's tokenizer, to which the tags were added."""
    known = Tokenizer(resolve_model(DEFAULT_MODEL))
    backend = Backend.from_str(known.to_json())
    backend.add_tokens([AddedToken(tag, special=request.param, normalized=False) for tag in TAGS])
    folder = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": known.chat_template}
    end = backend.id_to_token(known.eos_token_ids[0])
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": end}))
    return folder


@cache
def tokenizer_in(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@cache
def vocabulary_in(folder: Path) -> Any:
    return load_tokenizer(folder, tokenizer_in(folder).vocab_size)


@pytest.mark.parametrize(
    ("change", "is_whole"),
    [
        ({}, True),
        ({"pad_token": "<|im_end|>"}, True),
        ({"pad_token": "<pad>"}, False),
        ({"extra_special_tokens": ["<image>"]}, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, False),
    ],
    ids=str,
)
def test_a_tokenizer_that_a_folder_has_whole_is_read_as_transformers_builds_it(
    tmp_path: Path, change: dict[str, object], is_whole: bool
) -> None:
    known = resolve_model(DEFAULT_MODEL)
    for name in ("tokenizer.json", "generation_config.json"):
        (tmp_path / name).write_bytes((known / name).read_bytes())
    config = json.loads((known / "tokenizer_config.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | change))
    saved = grammar_tokenizer._saved(tmp_path)
    assert (saved is not None) == is_whole
    assert saved is None or saved == grammar_tokenizer._built(tmp_path)


def grammar_of(folder: Path, tool: dict[str, Any], choice: object) -> Grammar:
    """The grammar of an answer to a chat with one function."""
    tokenizer = tokenizer_in(folder)
    facts = ReadingFacts(ServedModel("m", 4096, tokenizer.vocab_size), folder, special_tokens_in_messages=False)
    body = {"messages": [{"role": "user", "content": "when?"}], "tool_choice": choice}
    tools = [{"type": "function", "function": {"name": "clock", "parameters": CLOCK, **tool}}]
    grammar = Reader(facts, tokenizer).read_body("chat", json.dumps({**body, "tools": tools}).encode()).spec.sampling
    assert grammar.grammar is not None
    return grammar.grammar


def takes(folder: Path, grammar: Grammar, text: str) -> bool:
    """True if the tokens that the model writes for a text follow the grammar, with each in its mask."""
    tokenizer = tokenizer_in(folder)
    matcher = LLMatcher(vocabulary_in(folder), native_source(canonical(grammar)))
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        mask = matcher.compute_bitmask()
        if not mask[token_id // 8] >> token_id % 8 & 1 or not matcher.consume_token(token_id):
            return False
    return bool(matcher.is_accepting())


def test_the_tags_are_one_token_each(folder: Path) -> None:
    tokenizer = tokenizer_in(folder)
    assert [tokenizer.encode(tag, add_special_tokens=False) for tag in TAGS] == [
        [tokenizer.added_id(tag)] for tag in TAGS
    ]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "clock"}}], ids=str)
def test_a_prescribed_call_can_be_written(folder: Path, choice: object) -> None:
    grammar = grammar_of(folder, {}, choice)
    assert takes(folder, grammar, CALL)
    assert not takes(folder, grammar, "It is noon.")


def test_a_strict_call_among_text_can_be_written(folder: Path) -> None:
    strict = {"strict": True, "parameters": {**CLOCK, "additionalProperties": False}}
    grammar = grammar_of(folder, strict, "auto")
    assert takes(folder, grammar, f"Let me look. {CALL}") and takes(folder, grammar, "It is noon.")
    assert not takes(folder, grammar, CALL.replace("zone", "place"))


@pytest.mark.parametrize(
    ("regex", "lark"),
    [
        ("a<t>b", "start: /a/ <[5]> /b/"),
        ("(?i:a)<t>(b(?i)c)", "start: /(?i:a)/ <[5]> /(b(?i)c)/"),
        ("[(?i)]<t>c", "start: /[(?i)]/ <[5]> /c/"),
        (r"\(?i<t>c", r"start: /\(?i/ <[5]> /c/"),
        ("(?i)yes<t>no", None),
        ("a(?s-i)b<t>c", None),
        ("(?-u)<t>c", None),
        ("<t>(?i)c", None),
        ("a<t>|b", None),
    ],
)
def test_a_regular_expression_is_cut_at_a_token_only_where_its_parts_mean_the_same(
    regex: str, lark: str | None
) -> None:
    assert regex_with_tokens(regex, {"<t>": 5}) == lark


CITY = {"type": "structural_tag", "triggers": ["<tool_call>"]}
STRUCTURE = {"begin": "<tool_call>city:", "schema": {"enum": ["Rome"]}, "end": "</tool_call>"}
UNTIL = {"type": "tag", "begin": "<tool_call>", "content": {"type": "any_text"}, "end": ["</tool_call>", "!"]}


@pytest.mark.parametrize("folder", [False], ids=["added"], indirect=True)
@pytest.mark.parametrize(
    ("fields", "taken", "refused"),
    [
        (
            {"response_format": {**CITY, "structures": [STRUCTURE]}},
            ['It is <tool_call>city:"Rome"</tool_call>.', '<tool_call>city:"Rome"</tool_call>', "No city."],
            ['<tool_call>city:"Oslo"</tool_call>', "<tool_call>", 'It is <tool_call>city:"Rome"'],
        ),
        (
            {"response_format": {**CITY, "structures": [STRUCTURE], "at_least_one": True, "stop_after_first": True}},
            ['<tool_call>city:"Rome"</tool_call>'],
            ["No city.", '<tool_call>city:"Rome"</tool_call> It is.'],
        ),
        (
            {"response_format": {"type": "structural_tag", "format": UNTIL}},
            ["<tool_call>any\ntext</tool_call>", "<tool_call>any text!", "<tool_call></tool_call>"],
            ["any", "<tool_call>any", "<tool_call>a! b"],
        ),
        (
            {"structured_outputs": {"grammar": 'start: "<tool_call>\\n" word+ "</tool_call>"\nword: /[a-z]+ ?/'}},
            ["<tool_call>\na few words</tool_call>"],
            ["<tool_call>\n</tool_call>", "a few words"],
        ),
        (
            {"structured_outputs": {"grammar": 'root ::= "<tool_call>" [a-z]+ "</tool_call>"'}},
            ["<tool_call>word</tool_call>"],
            ["word"],
        ),
        (
            {"structured_outputs": {"regex": r"[a-z/]*<tool_call>[^|<]+</tool_call>(\n|!)?"}},
            ["a/b<tool_call>c d</tool_call>!", "<tool_call>c</tool_call>"],
            ["abc", "<tool_call></tool_call>"],
        ),
        (
            {"structured_outputs": {"choice": ["<tool_call>yes</tool_call>", "no"]}},
            ["<tool_call>yes</tool_call>", "no"],
            ["yes"],
        ),
    ],
    ids=["triggers", "one structure", "any text", "lark", "ebnf", "regex", "choice"],
)
def test_tags_in_a_request_s_own_grammar_are_their_tokens(
    folder: Path, fields: dict[str, Any], taken: list[str], refused: list[str]
) -> None:
    tokenizer = tokenizer_in(folder)
    facts = ReadingFacts(ServedModel("m", 4096, tokenizer.vocab_size), folder, special_tokens_in_messages=False)
    reader = Reader(facts, tokenizer)
    body = {"messages": [{"role": "user", "content": "where?"}], **fields}
    written = reader.read_body("chat", json.dumps(body).encode()).spec.sampling.grammar
    assert written is not None
    known = reader.check(GrammarQuestion(written, "p"))
    for text in taken:
        assert takes(folder, known, text), text
    for text in refused:
        assert not takes(folder, known, text), text
