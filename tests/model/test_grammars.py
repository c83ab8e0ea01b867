"""Grammars over the real tokenizer's vocabulary and random logits: whatever a model would say, finished answers are
valid, and the same bits alone, in a batch and preempted."""

import json
import re
from dataclasses import replace
from functools import cache, partial

import jsonschema
import pytest

from raydix.engine.api.assembler import ChoiceAssembler
from raydix.engine.api.requests import parse_completion
from raydix.engine.api.spec import sampling_params
from raydix.engine.core.answers.lead import Lead
from raydix.engine.core.answers.reasoning_limit import ReasoningLimit
from raydix.engine.core.errors import RequestError, StartupError
from raydix.engine.core.ingress.detokenizer import ByteDetokenizer
from raydix.engine.core.ingress.parsers.reasoning import ReasoningParser
from raydix.engine.core.types import Assignment, FinishReason, Grammar, GrammarKind
from raydix.engine.model.build import make_grammars
from raydix.engine.model.engine import Engine
from raydix.engine.model.grammar_source import canonical
from raydix.engine.model.grammars import Grammars
from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model
from raydix.engine.model.tokenizer import Tokenizer
from raydix.engine.serving.grammar_check import check_grammar
from tests.model.made_schemas import Schema, made_schema
from tests.model.random_logits import RandomModel, assignment, finish_of, make_engine, run, tokens_of

VOCAB = 49152
NUM_SCHEMAS = 500
BATCH = 50
FEW = range(0, 100, BATCH)
REST = range(100, NUM_SCHEMAS, BATCH)


@cache
def tokenizer() -> Tokenizer:
    try:
        return Tokenizer(resolve_model(DEFAULT_MODEL))
    except StartupError as error:
        pytest.skip(str(error))


@cache
def grammars() -> Grammars:
    tokenizer()
    return make_grammars(resolve_model(DEFAULT_MODEL), VOCAB)


@cache
def favoured() -> tuple[int, ...]:
    """Tokens that bring JSON to an end."""
    table = tokenizer().token_bytes(skip_special_tokens=False)
    assert table is not None
    short = [token_id for token_id, token in enumerate(table) if re.fullmatch(rb'["\]}:,]+|[0-9]|true|null', token)]
    return (*tokenizer().eos_token_ids, *short)


def engine(num_blocks: int = 4000) -> Engine:
    return make_engine(grammars(), VOCAB, favoured(), num_blocks=num_blocks)


def schema_grammar(schema: object, **options: object) -> Grammar:
    assert isinstance(schema, dict)
    options = {"whitespace_flexible": False, **options}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({**schema, "x-guidance": options}, ensure_ascii=False))


def text_of(tokens: list[int]) -> str:
    return tokenizer().decode(tokens)


@cache
def made_schemas() -> list[Schema]:
    """`NUM_SCHEMAS` schemas that can be followed."""
    made: list[Schema] = []
    number = 0
    while len(made) < NUM_SCHEMAS:
        schema = made_schema(number)
        number += 1
        try:
            check_grammar(schema_grammar(schema), "schema")
        except RequestError:  # what cannot be followed is refused, not followed badly
            continue
        made.append(schema)
    assert number < 1.2 * NUM_SCHEMAS, "few schemas are refused"
    return made


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("firsts", [FEW, pytest.param(REST, marks=pytest.mark.exhaustive)], ids=["few", "rest"])
def test_every_finished_answer_is_valid(firsts: range) -> None:
    num_finished = 0
    for first in firsts:
        batch = {f"{first + i}": schema for i, schema in enumerate(made_schemas()[first : first + BATCH])}
        answers = run(engine(), [assignment(name, schema_grammar(schema)) for name, schema in batch.items()])
        for name, events in answers.items():
            assert finish_of(events) in (FinishReason.STOP, FinishReason.LENGTH), events[-1]
            if finish_of(events) is FinishReason.STOP:
                num_finished += 1
                value = json.loads(text_of(tokens_of(events)))
                jsonschema.Draft202012Validator(batch[name]).validate(value)
    assert num_finished > 0.7 * BATCH * len(firsts), "the others are long texts and numbers"


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "name": {"type": "string", "maxLength": 30}},
    "required": ["x", "name"],
    "additionalProperties": False,
}
FORMS = {
    "schema": schema_grammar(POINT),
    "regex": Grammar(GrammarKind.REGEX, "[a-z]+@[a-z]+(,[a-z ]{1,20})*"),
    "choice": canonical(Grammar(GrammarKind.CHOICE, json.dumps(["yes", "no 🌊", "maybe"]))),
    "ebnf": canonical(Grammar(GrammarKind.EBNF, 'root ::= "(" root ")" | [0-9]+')),
    "free": None,
}


def crowd() -> list[tuple[str, Grammar | None]]:
    return [(f"{form}-{number}", grammar) for number in range(4) for form, grammar in FORMS.items()]


def test_equal_bits_alone_in_a_batch_and_preempted() -> None:
    requests = [assignment(name, grammar, max_tokens=60, logprobs=3) for name, grammar in crowd()]
    together = run(engine(), requests)
    for each in requests[:5]:
        alone = run(engine(), [each])[each.request_id]
        assert [(event.token_id, event.logprobs) for event in alone] == [
            (event.token_id, event.logprobs) for event in together[each.request_id]
        ]

    small = engine(num_blocks=30)
    squeezed = run(small, requests)
    assert small.preemptions.num_recomputed > 0
    for name, events in squeezed.items():
        assert tokens_of(events) == tokens_of(together[name])


def test_a_request_goes_on_elsewhere() -> None:
    """A failover: a new attempt with the tokens delivered so far, in another engine."""
    whole = assignment("r", FORMS["schema"], max_tokens=60)
    tokens = tokens_of(run(engine(), [whole])["r"])
    for cut in (1, len(tokens) // 2, len(tokens) - 1):
        begun = (*whole.token_ids, *tokens[:cut])
        resumed = type(whole)("r", 1, whole.stage, begun, whole.num_prompt_tokens, whole.sampling, whole.reply_to)
        assert tokens_of(run(engine(), [resumed])["r"]) == tokens[cut:]


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {"top_p": 0.3, "min_p": 0.01},
        {"top_k": 2},
        {"presence_penalty": 2.0, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
        {"logit_bias": ((2, 100.0), (5, -100.0))},
        {"logprobs": 5},
        {"min_tokens": 20},
        {"stop_token_ids": ()},
        {"min_tokens": 20, "stop_token_ids": (), "logprobs": 0, "top_k": 3, "presence_penalty": 1.0},
    ],
    ids=str,
)
def test_grammars_together_with_other_parameters(changes: dict[str, object]) -> None:
    events = run(engine(), [assignment(name, FORMS[name], **changes) for name in ("schema", "choice", "regex")])
    for name, found in events.items():
        assert finish_of(found) in (FinishReason.STOP, FinishReason.LENGTH)
        text = text_of(tokens_of(found))
        if finish_of(found) is FinishReason.STOP and name == "schema":
            jsonschema.validate(json.loads(text), POINT)
        if name == "choice":
            assert text in ("yes", "no 🌊", "maybe") and finish_of(found) is FinishReason.STOP
        if changes.get("logprobs") is not None:
            assert all(event.logprobs is not None and event.logprobs.chosen > -100 for event in found)
    if changes.get("min_tokens"):
        assert len(tokens_of(events["regex"])) >= 20, "a longer answer was possible"


WORDS = "(red|green|blue)( (red|green|blue)){30,50}"
PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}


def choices(**fields: object) -> list[Assignment]:
    """The requests of a completion's choices under a grammar, as the API makes them."""
    body = {"prompt": "x", "seed": 5, "max_tokens": 300, "temperature": 1, "structured_outputs": {"regex": WORDS}}
    spec = parse_completion(json.dumps({**body, **fields}).encode())
    params = partial(sampling_params, spec, prompt_len=3, max_model_len=1000, vocab_size=VOCAB, default_seed=0)
    eos = tokenizer().eos_token_ids
    return [
        replace(assignment(f"choice-{index}", None), sampling=params(eos_token_ids=eos, choice=index))
        for index in range(spec.num_samples)
    ]


def test_several_choices_with_stop_strings_penalties_and_a_shortest_length() -> None:
    requests = choices(n=3, logprobs=2, min_tokens=12, stop=[" blue"], **PENALTIES)
    together = run(engine(), requests)
    table = tokenizer().token_bytes(skip_special_tokens=True)
    assert table is not None
    texts = []
    for each in requests:
        events = together[each.request_id]
        alone = run(engine(), [each])[each.request_id]
        assert [(event.token_id, event.logprobs) for event in alone] == [
            (event.token_id, event.logprobs) for event in events
        ]
        piece = ChoiceAssembler(ByteDetokenizer(table), (" blue",), min_tokens=12).push(events)
        assert (piece.finish, piece.stop_reason) == (FinishReason.STOP, " blue")
        assert 12 <= len(piece.token_ids) == len(piece.logprobs) < len(events)
        assert re.fullmatch("(red|green|blue)( (red|green|blue))*", piece.text)
        texts.append(piece.text)
    assert len(set(texts)) == 3

    free = run(engine(), choices(n=3, logprobs=2, min_tokens=12))
    assert all(tokens_of(free[name]) != tokens_of(events) for name, events in together.items()), "penalties count"


def test_a_stop_token_ends_an_answer_before_its_grammar_does() -> None:
    quote = tokenizer().encode('{"', add_special_tokens=False)[0]
    events = run(engine(), [assignment("r", FORMS["schema"], stop_token_ids=(2, quote), top_k=1)])["r"]
    assert finish_of(events) is FinishReason.STOP
    tokens = tokens_of(events)
    assert tokens[-1] in (quote, 2)


def test_structural_tags_constrain_what_stands_behind_triggers() -> None:
    tag = {
        "triggers": ["<f"],
        "structures": [{"begin": "<f=a>", "schema": {"const": [1, 2]}, "end": "</f>"}],
    }
    grammar = canonical(Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag)))
    compiled = grammars().compiler.compile(grammar)
    for text, is_valid in (
        ("some text <f=a>[1,2]</f> and <f=a>[1, 2]</f> more", True),
        ("no call at all", True),
        ("a <b> is fine", True),
        ("some text <f=b>", False),
        ("some text <f=a>[1,3]</f>", False),
    ):
        token_ids = tokenizer().encode(text, add_special_tokens=False)
        matcher = compiled.deep_copy()
        assert (matcher.try_consume_tokens(token_ids) == len(token_ids)) == is_valid, text


CLOSING = ("</", "think", ">")
"""Tokens of the closing tag in the default model's vocabulary."""


def thoughtful(name: str, lead: Lead, **changes: object) -> Assignment:
    """A request whose reasoning ends after some time."""
    ids = [tokenizer().encode(part, add_special_tokens=False) for part in CLOSING]
    likely = tuple((token_id, 14.0) for [token_id] in ids)
    changes = {"max_tokens": 300, "logit_bias": likely, **changes}
    return assignment(name, replace(schema_grammar(POINT), lead=lead), **changes)


def test_a_grammar_begins_behind_the_reasoning() -> None:
    opened = Lead(b"<think>", b"</think>", is_open=True)
    requests = [thoughtful(f"opened-{number}", opened) for number in range(12)]
    requests += [thoughtful(f"may-{number}", Lead(b"<think>", b"</think>")) for number in range(12)]
    together = run(engine(), requests)
    num_finished = 0
    for name, events in together.items():
        text = text_of(tokens_of(events))
        thinking = ReasoningParser(is_inside=name.startswith("opened"))
        answer = thinking.push(text).text + thinking.finish().text
        assert finish_of(events) in (FinishReason.STOP, FinishReason.LENGTH), events[-1]
        if finish_of(events) is FinishReason.STOP:
            num_finished += 1
            jsonschema.validate(json.loads(answer), POINT)
    assert num_finished > 6

    squeezed = run(engine(num_blocks=60), requests)
    assert {name: tokens_of(events) for name, events in squeezed.items()} == {
        name: tokens_of(events) for name, events in together.items()
    }
    for whole in requests[:3]:
        tokens = tokens_of(together[whole.request_id])
        for cut in (1, len(tokens) // 2, len(tokens) - 1):
            begun = (*whole.token_ids, *tokens[:cut])
            resumed = replace(whole, attempt=1, token_ids=begun)
            assert tokens_of(run(engine(), [resumed])[whole.request_id]) == tokens[cut:]


def test_reasoning_without_an_end_is_cut_at_the_limit() -> None:
    grammar = replace(schema_grammar(POINT), lead=Lead(b"<think>", b"</think>", is_open=True))
    events = run(engine(), [assignment("r", grammar, max_tokens=40, logit_bias=((2, 100.0),))])["r"]
    assert finish_of(events) is FinishReason.LENGTH and 2 not in tokens_of(events)


def test_reasoning_that_is_long_enough_ends() -> None:
    closing = 1000
    limit = ReasoningLimit(5, closing, Lead(b"<think>", b"</think>", is_open=True), {closing: b"</think>"})
    requests = [assignment(f"r{number}", None, max_tokens=20, reasoning_limit=limit) for number in range(3)]
    requests.append(assignment("free", None, max_tokens=20))
    found = {name: tokens_of(events) for name, events in run(engine(), requests).items()}
    assert all(tokens[5] == closing and tokens.count(closing) == 1 for name, tokens in found.items() if name != "free")
    assert closing not in found["free"]


def test_unconstrained_steps_do_nothing_for_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = make_grammars(resolve_model(DEFAULT_MODEL), VOCAB)
    free = make_engine(fresh, VOCAB)
    run(free, [assignment("r", None, max_tokens=4)])
    assert isinstance(free.runner, RandomModel) and free.runner.num_steps >= 4
    assert fresh.compiler.tokenizer is None and fresh._masker is None and fresh.compiler._thread is None
