"""Drafts change no bit of an answer that follows a grammar, prescribed calls among them, whatever the drafts, and with
the grammar's own; nor do preemption and a hand-over."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest

from raydix.engine.core.answers.lead import Lead
from raydix.engine.core.ingress.parsers import HERMES
from raydix.engine.core.settings import DraftLimits
from raydix.engine.core.types import Assignment, DraftSource, Grammar, GrammarKind, Sampling, Stage, TokenEvent
from raydix.engine.core.worker.drafts.draft import Draft
from raydix.engine.core.worker.drafts.drafter import Drafter
from raydix.engine.core.worker.drafts.form_guesser import FormGuesser, LearntChoices
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.scheduler import Scheduler
from raydix.engine.model.build import make_grammars
from raydix.engine.model.decoder import Decoder
from raydix.engine.model.engine import Engine
from raydix.engine.model.exchange import ExportedSegment
from raydix.engine.model.grammars import TimeShare
from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model
from tests.model import random_logits
from tests.model.random_logits import assignment
from tests.model.test_drafts import (
    CHEAP,
    SPOILT,
    Output,
    Told,
    accepted,
    make_engine,
    mixed,
    right,
    run,
    take,
    wrong,
)
from tests.model.test_exactness import load_decoder
from tests.model.test_grammars import FORMS, VOCAB, favoured, grammars, schema_grammar, text_of, thoughtful, tokenizer
from tests.unit.builders import chain_of

ORDER = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 20},
        "order_number": {"type": "integer", "minimum": 0, "maximum": 9999},
        "state_of_delivery": {"enum": ["delivered", "in transit", "delayed"]},
    },
    "required": ["customer_name", "order_number", "state_of_delivery"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": ORDER, "minItems": 2, "maxItems": 3}
NUM_TOKENS = 30
QUESTION = "Order 17 of Ann is late. Order 18 of Bob has arrived.\nAs JSON:\n"
PARAMS = {
    "greedy": {"temperature": 0.0, "logprobs": 3},
    "sampled": {"temperature": 0.5, "seed": 9, "top_p": 0.9, "logprobs": 0, "presence_penalty": 0.8},
    "bounds": {"temperature": 0.7, "seed": 4, "logprobs": 21, "min_tokens": 9, "stop_token_ids": (2, 198)},
}
Spoil = Callable[[list[int], random.Random], list[int]]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_decoder()


@cache
def prompt() -> tuple[int, ...]:
    return tuple(tokenizer().encode(QUESTION, add_special_tokens=False))


def requests() -> list[Assignment]:
    forms = {
        "list": schema_grammar(LIST),
        "regex": Grammar(GrammarKind.REGEX, "(Ann|Bob)(, (Ann|Bob|[a-z]{1,4})){3,9}"),
        "choice": Grammar(GrammarKind.LARK, 'start: "delivered to Ann" | "delivered to Bob" | "delayed"'),
        "free": None,
        "call": HERMES.form.grammar({"report": ORDER}, {}).required(),
    }
    return [
        Assignment(
            f"{form} {kind}",
            0,
            Stage.WHOLE,
            prompt(),
            len(prompt()),
            Sampling(NUM_TOKENS, grammar=grammar, **changes),  # type: ignore[arg-type]
            "ingress",
        )
        for form, grammar in forms.items()
        for kind, changes in PARAMS.items()
    ]


@pytest.fixture(scope="module")
def plain(decoder: Decoder) -> dict[str, Output]:
    """Each request alone in its turn, without drafts."""
    engine, outputs = make_engine(decoder, grammars=grammars()), dict[str, Output]()
    for each in requests():
        outputs |= run(engine, [each])
        engine.scheduler.reset()
    return outputs


def run_split(prefill: Engine, decode: Engine, assignments: Sequence[Assignment]) -> dict[str, Output]:
    """The answers to requests that one engine prefills and another one decodes."""
    for engine, stage in ((prefill, Stage.PREFILL), (decode, Stage.DECODE)):
        for each in assignments:
            engine.submit(replace(each, stage=stage), 0.0)
        random_logits.wait_for_grammars(engine)
    outputs: dict[str, Output] = {each.request_id: [] for each in assignments}
    while (step := prefill.step(0.0)) is not None:
        take(outputs, step.events)
        for segment in map(ExportedSegment.arrived, step.segments):
            assert decode.exchange.import_segment(segment.header, segment.payload, 0.0)
    assert all(len(output) == 1 for output in outputs.values()), "the rest is the other engine's"
    while (step := decode.step(0.0)) is not None:
        take(outputs, step.events)
    return outputs


def test_requests_that_are_preempted(decoder: Decoder, plain: dict[str, Output]) -> None:
    engine = make_engine(decoder, num_blocks=16, grammars=grammars())
    assert run(engine, requests()) == plain
    assert engine.preemptions.num_recomputed > 0


@pytest.mark.parametrize("spoil", [None, mixed], ids=["plain", "drafts"])
def test_answers_decoded_by_another_engine(decoder: Decoder, plain: dict[str, Output], spoil: Spoil | None) -> None:
    """Nothing of a grammar travels: the other engine compiles it, and takes the first token into account."""
    others = make_grammars(resolve_model(DEFAULT_MODEL), VOCAB)
    drafter = None if spoil is None else Told(plain, spoil)
    prefill, decode = make_engine(decoder, grammars=grammars()), make_engine(decoder, drafter, grammars=others)
    assert run_split(prefill, decode, requests()) == plain
    assert (accepted(decode) > 20) == (spoil is not None)


@pytest.mark.parametrize("spoil", SPOILT)
def test_drafts_of_all_kinds(decoder: Decoder, plain: dict[str, Output], spoil: Spoil) -> None:
    engine = make_engine(decoder, Told(plain, spoil), grammars=grammars())
    for each in requests()[:2]:
        assert run(engine, [each]) == {each.request_id: plain[each.request_id]}
    assert run(engine, requests()) == plain
    assert (accepted(engine) > 60) == (spoil is not wrong)


def test_drafts_of_requests_that_are_preempted(decoder: Decoder, plain: dict[str, Output]) -> None:
    engine = make_engine(decoder, Told(plain, mixed), num_blocks=16, grammars=grammars())
    assert run(engine, requests()) == plain
    assert engine.preemptions.num_recomputed > 0


def test_drafts_that_a_worker_makes_itself(decoder: Decoder, plain: dict[str, Output]) -> None:
    engine = make_engine(decoder, Drafter(DraftLimits(), grammars()), grammars=grammars())
    for each in requests()[:3]:
        assert run(engine, [each]) == {each.request_id: plain[each.request_id]}
    assert run(engine, requests()) == plain
    drafted = engine.scheduler.drafting.counts[DraftSource.GRAMMAR]
    assert drafted.num_drafted >= drafted.num_accepted > 40


def test_forced_tokens_are_never_wrong(decoder: Decoder, plain: dict[str, Output]) -> None:
    """Without the answers of the past no other tokens are drafted of a grammar."""
    drafter = Drafter(DraftLimits(sources=(DraftSource.GRAMMAR,)), grammars())
    engine = make_engine(decoder, drafter, grammars=grammars())
    assert run(engine, requests()) == plain
    drafted = engine.scheduler.drafting.counts[DraftSource.GRAMMAR]
    assert drafted.num_drafted == drafted.num_accepted > 40


def test_choices_of_real_tokens_are_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value can be spelt in many tokens, of which an answer takes few."""
    monkeypatch.setattr(TimeShare, "has_time", lambda share: True)
    monkeypatch.setattr("raydix.engine.model.grammars.MAX_WALK_S", 60.0)
    monkeypatch.setattr("raydix.engine.model.grammars.HARD_S", 60.0)
    schema = {
        "type": "object",
        "properties": {"paid": {"type": "boolean"}, "state": {"enum": ["sent", "kept", "lost"]}, "late": {"const": 1}},
        "required": ["paid", "state", "late"],
        "additionalProperties": False,
    }
    guesser = FormGuesser(grammars(), LearntChoices())
    for is_flexible in (False, True):
        form = schema_grammar(schema, whitespace_flexible=is_flexible)
        grammars().compiler.compile(form)
        answer, drafts = '{"paid":true,"state":"kept","late":1}', list[str]()
        for turn in range(2):
            asked = assignment(f"{is_flexible} {turn}", form, max_tokens=50)
            own = Request(asked, chain_of(), arrival=0)
            for token_id in tokenizer().encode(answer, add_special_tokens=False):
                guesser.follow([own])
                drafts.append(text_of([*guesser.draft(own, None, 40, 1e-6).token_ids]))
                own.token_ids.append(token_id)
            guesser.ended(own)
        num_drafts = len(drafts) // 2
        assert answer not in drafts[:num_drafts] and drafts[num_drafts] == answer


# Random logits, which make the wildest answers


class ToldEvents(Told):
    """Drafts for some of the running requests, made of what their answers are known to be."""

    def __init__(self, events: dict[str, list[TokenEvent]], spoil: Spoil) -> None:
        answers: dict[str, Output] = {
            name: [(event.token_id, event.logprobs, event.finish) for event in found] for name, found in events.items()
        }
        super().__init__(answers, spoil)

    def propose(self, scheduler: Scheduler) -> list[Draft]:
        return [draft for draft in super().propose(scheduler) if self._chance.random() < 0.8]


def bits_of(found: dict[str, list[TokenEvent]]) -> dict[str, Output]:
    return {name: [(each.token_id, each.logprobs, each.finish) for each in events] for name, events in found.items()}


@pytest.fixture(scope="module")
def wild() -> tuple[list[Assignment], dict[str, list[TokenEvent]]]:
    """Requests with and without reasoning before their forms, and their answers without drafts."""
    opened, may = Lead(b"<think>", b"</think>", is_open=True), Lead(b"<think>", b"</think>")
    asked = [assignment(form, FORMS[form], max_tokens=30, logprobs=2) for form in FORMS]
    asked += [thoughtful(f"opened-{n}", opened, max_tokens=50) for n in range(3)]
    asked += [thoughtful(f"may-{n}", may, max_tokens=50) for n in range(3)]
    return asked, random_logits.run(random_logits.make_engine(grammars(), VOCAB, favoured()), asked)


@pytest.mark.parametrize(("spoil", "num_blocks"), [(right, 400), (wrong, 400), (mixed, 400), (mixed, 12)])
def test_wild_answers_with_and_without_reasoning(
    wild: tuple[list[Assignment], dict[str, list[TokenEvent]]], spoil: Spoil, num_blocks: int
) -> None:
    asked, plain = wild
    drafter = ToldEvents(plain, spoil)
    engine = random_logits.make_engine(grammars(), VOCAB, favoured(), num_blocks=num_blocks, drafter=drafter)
    engine.scheduler.learn_costs(CHEAP)
    assert bits_of(random_logits.run(engine, asked)) == bits_of(plain)
    assert (accepted(engine) > 60) == (spoil is not wrong)
    assert (engine.preemptions.num_recomputed > 0) == (num_blocks == 12)
