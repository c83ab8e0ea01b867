"""Masks of the rows behind drafts, and grammars asked about drafts."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple

import pytest
from llguidance import LLExecutor, LLMatcher

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.settings import DraftLimits
from raydix.engine.core.types import DraftSource, Grammar, GrammarKind, Sampling
from raydix.engine.core.worker.drafts.drafter import Drafter
from raydix.engine.core.worker.drafts.forms import Choose, FormToken
from raydix.engine.core.worker.drafts.rows import DraftedRow, Row
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.scheduler import Scheduler
from raydix.engine.model.grammars import GrammarCompiler, Grammars, StepMasks
from raydix.engine.model.matcher import Matcher
from tests.unit.builders import chain_of
from tests.unit.test_drafts import CHEAP, repeating
from tests.unit.test_grammars import (
    ABC,
    EOS,
    LED,
    LIKE_A_LEAD,
    OPENED,
    OTHER_EOS,
    VOCAB,
    allowed,
    ids,
    make_grammars,
    masks_of,
    request,
)

AB = Grammar(GrammarKind.REGEX, "ab")
ENDS = {EOS, OTHER_EOS}


def rows_behind(own: Request, draft: str | Sequence[int]) -> list[Row]:
    token_ids = tuple(ids(draft) if isinstance(draft, str) else draft)
    return [own, *(DraftedRow(own, token_ids[: count + 1]) for count in range(len(token_ids)))]


def step_masks(grammars: Grammars, rows: Sequence[Row]) -> StepMasks:
    masking = grammars.begin(rows)
    assert masking is not None
    return masking.result()


def alone(own: Request, answer: str | Sequence[int]) -> set[int]:
    """The tokens allowed behind an answer, by a grammar that has seen no draft."""
    token_ids = (*own.assignment.token_ids, *(ids(answer) if isinstance(answer, str) else answer))
    again = Request(replace(own.assignment, token_ids=token_ids), chain_of(), arrival=0)
    return allowed(masks_of(make_grammars(), again).bits[0])


@pytest.mark.parametrize(
    ("grammar", "answer", "draft"),
    [
        (ABC, "", "abcb"),
        (ABC, "ab", "c"),
        (OPENED, "x", "yz</t>abc"),
        (OPENED, "x</t", ">ab"),
        (LED, "<t>", "ab</t>a"),
        (LED, "a", "bcb"),
        (LED, "<t>x</t>", "ab"),
    ],
)
def test_each_row_has_the_mask_of_its_own_place(grammar: Grammar, answer: str, draft: str) -> None:
    grammars, own, other = make_grammars(), request("r", grammar, answer), request("other", ABC, "a")
    rows = [other, *rows_behind(own, draft), request("free", None), *rows_behind(request("last"), "a")]
    masks = step_masks(grammars, rows)
    assert not masks.ended and not masks.dead_ends
    assert masks.rows[0] >= 0 and masks.rows[len(draft) + 2] == -1
    for count in range(len(draft) + 1):
        assert allowed(masks.bits[masks.rows[1 + count]]) == alone(own, draft[:count])
    assert allowed(masks.bits[masks.rows[-1]]) == alone(request("last"), "a")

    again = step_masks(grammars, rows)
    assert again.rows == masks.rows and (again.bits == masks.bits).all(), "the draft left nothing"


@pytest.mark.parametrize(
    ("grammar", "answer", "draft", "num_rows"),
    [
        (ABC, "a", "bxb", 2),
        (ABC, "", "x", 1),
        (LED, "", "ab", 1),
        (LED, "<", "t>x", 1),
        (LIKE_A_LEAD, "<t", "a", 1),
        (OPENED, "", "</t>x", 5),
        (OPENED, "", "</t>abxb", 7),
    ],
)
def test_a_token_that_is_not_allowed_ends_the_draft(grammar: Grammar, answer: str, draft: str, num_rows: int) -> None:
    own = request("r", grammar, answer)
    masks = step_masks(make_grammars(), [*rows_behind(own, draft), request("other")])
    assert masks.ended == set(range(num_rows, 1 + len(draft))) and not masks.dead_ends
    assert [row for row, at in enumerate(masks.rows) if at == -1] == sorted(masks.ended)
    for count in range(num_rows):
        assert allowed(masks.bits[masks.rows[count]]) == alone(own, draft[:count])


def test_nothing_follows_the_end_of_a_sequence() -> None:
    grammars = make_grammars()
    masks = step_masks(grammars, rows_behind(request("r", ABC, "a"), [*ids("b"), EOS, *ids("c")]))
    assert allowed(masks.bits[1]) == {*ids("bc")} | ENDS
    assert 3 in masks.ended, "row 2 is not looked at: the answer has ended"
    assert step_masks(grammars, rows_behind(request("r", ABC, "a"), "b")).rows == [0, 1]


def test_a_dead_end_behind_a_draft_is_found_when_the_request_is_there() -> None:
    """Of the two tokens only the first is to be chosen from, so nothing may follow."""
    own = request("r", AB, allowed_token_ids=tuple(ids("a")))
    masks = step_masks(make_grammars(), rows_behind(own, "ab"))
    assert masks.ended == {1, 2} and not masks.dead_ends
    masks = step_masks(make_grammars(), rows_behind(request("r", AB, "a", allowed_token_ids=tuple(ids("a"))), "b"))
    assert masks.ended == {1} and masks.dead_ends == {0: "the grammar allows none of 'allowed_token_ids'"}


def test_parameters_count_the_draft() -> None:
    own = request("r", ABC, "a", min_tokens=3, bad_words=(tuple(ids("bc")),))
    masks = step_masks(make_grammars(), rows_behind(own, "bb"))
    assert [allowed(mask) for mask in masks.bits] == [{*ids("bc")}, {*ids("b")}, {*ids("b")} | ENDS]


def test_a_lost_place_ends_its_request_and_its_draft_alone() -> None:
    rows = [*rows_behind(request("lost", ABC, "xy"), "b"), *rows_behind(request("fine"), "a")]
    masks = step_masks(make_grammars(), rows)
    assert list(masks.dead_ends) == [0] and masks.ended == {1} and masks.rows == [-1, -1, 0, 1]


def test_a_draft_that_breaks_its_matcher_costs_the_draft_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaking:
        def __init__(self) -> None:
            self._executor = LLExecutor()

        def unsafe_compute_mask_ptr(self, *arguments: Any) -> None:
            self._executor.unsafe_compute_mask_ptr(*arguments)

        def unsafe_compute_mask_ptr_with_draft_token(self, jobs: list[Any], *memory: int) -> None:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(jobs, *memory)
            jobs[0][0].consume_tokens(ids("!"))

    monkeypatch.setattr("llguidance.LLExecutor", Breaking)
    grammars, own = make_grammars(), request("r", ABC, "a")
    masks = step_masks(grammars, [request("other"), *rows_behind(own, "bb"), *rows_behind(request("third"), "a")])
    assert not masks.dead_ends and masks.ended == {2, 3}
    assert allowed(masks.bits[masks.rows[1]]) == alone(own, "")
    assert allowed(masks.bits[masks.rows[5]]) == {*ids("bc")} | ENDS
    assert allowed(step_masks(grammars, [own]).bits[0]) == alone(own, "")


def test_masks_that_fail_leave_no_matcher_behind_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    grammars, own = make_grammars(), request("r", OPENED, "x")
    step_masks(grammars, [own])
    with monkeypatch.context() as patched:
        patched.setattr(grammars, "_compute", fail)
        with pytest.raises(RuntimeError):
            step_masks(grammars, rows_behind(own, "yz</t>a"))
    assert allowed(step_masks(grammars, [own]).bits[0]) == alone(own, "")


@pytest.mark.parametrize(("grammar", "draft"), [(ABC, [VOCAB]), (LED, [VOCAB]), (OPENED, [*ids("a"), VOCAB])])
def test_a_token_that_no_grammar_knows_costs_the_draft_alone(grammar: Grammar, draft: list[int]) -> None:
    grammars, own = make_grammars(), request("r", grammar)
    rows = [request("other"), *rows_behind(own, draft), *rows_behind(request("third"), "a")]
    for _ in range(2):
        masks = step_masks(grammars, rows)
        assert not masks.dead_ends and len(draft) + 1 in masks.ended
        assert allowed(masks.bits[masks.rows[1]]) == alone(own, "")
        assert allowed(masks.bits[masks.rows[0]]) == {*ids("a")}
    assert allowed(step_masks(grammars, [own]).bits[0]) == alone(own, "")


# Guesses


def compiled(*known: Grammar) -> Grammars:
    grammars = make_grammars()
    for grammar in known:
        grammars.compiler.compile(grammar)
    return grammars


@pytest.mark.parametrize(
    ("grammar", "answer", "guess", "count"),
    [(ABC, "a", "bcb", 3), (ABC, "", "abxb", 2), (ABC, "", "x", 0), (OPENED, "", "x</t>abx", 7), (LED, "<t>", "x<", 2)],
)
def test_the_allowed_part_of_a_guess(grammar: Grammar, answer: str, guess: str, count: int) -> None:
    grammars, own = compiled(grammar), request("r", grammar, answer)
    assert grammars.num_allowed(own, ids(guess)) == count
    assert grammars.num_allowed(own, ids(guess)) == count, "nothing of the guess is left"
    assert allowed(step_masks(grammars, [own]).bits[0]) == alone(own, "")


@pytest.mark.parametrize(
    ("grammar", "answer", "expected"),
    [
        (ABC, "", "a"),
        (ABC, "a", ""),
        (Grammar(GrammarKind.LARK, 'start: "alpha" | "alps"'), "", "alp"),
        (Grammar(GrammarKind.LARK, 'start: "alpha" | "alps"'), "alpha"[:4], "a"),
        (OPENED, "x", ""),
        (OPENED, "x</t>", "a"),
        (LED, "", ""),
    ],
)
def test_forced_tokens_are_the_only_ones_in_their_places(grammar: Grammar, answer: str, expected: str) -> None:
    grammars, own = compiled(grammar), request("r", grammar, answer)
    assert grammars.forced(own) == ids(expected)
    for count, token_id in enumerate(ids(expected)):
        assert alone(own, expected[:count]) == {token_id}
    assert compiled(ABC).forced(request("lost", ABC, "xy")) == ()


@pytest.mark.parametrize(
    ("grammar", "answer"),
    [
        (Grammar(GrammarKind.REGEX, "a(b{20000})|c"), "a"),
        (Grammar(GrammarKind.REGEX, "a((b{100}){200})|c"), "a"),
        (Grammar(GrammarKind.REGEX, f"a{'b' * 20_000}|c"), "a"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "string", "pattern": "^a{20000}$"}'), '"'),
        (
            Grammar(
                GrammarKind.LARK,
                "\n".join(['start: "a" L0 | "c"', *(f"L{n}: L{n + 1} L{n + 1}" for n in range(15)), 'L15: "b"']),
            ),
            "a",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_no_token_of_a_long_forced_text_is_looked_for(
    grammar: Grammar, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance would hold the interpreter's lock while it cuts the text into tokens, at each place."""
    calls = list[str]()

    class Watched:
        def __init__(self, state: LLMatcher) -> None:
            self._state = state

        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(self._state, name)

    grammars, own = compiled(grammar), request("r", grammar, answer)
    matcher = grammars._followed(own)
    monkeypatch.setattr(matcher, "state", Watched(matcher.state))
    assert not grammars.forced(own)
    names = [name for name in calls if name.startswith("compute")]
    assert names == ["compute_bitmask", "compute_ff_bytes"], "the mask first: it holds no lock"
    assert grammars.walk(own, 8, 0.05, lambda place: None) == []
    assert [name for name in calls if name.startswith("compute")] == names

    other = request("other", grammar, answer)
    assert not grammars.forced(other) and grammars._followed(other).forces_long_texts
    assert not step_masks(grammars, [other]).dead_ends


@pytest.mark.parametrize("grammar", [ABC, LED])
def test_a_guess_that_breaks_its_matcher_costs_the_matcher_alone(grammar: Grammar) -> None:
    grammars, own = compiled(grammar), request("r", grammar)
    assert grammars.num_allowed(own, [*ids("a"), VOCAB]) == 0 == grammars.num_allowed(own, [VOCAB])
    assert grammars.num_matchers == 0
    masks = step_masks(grammars, [own])
    assert not masks.dead_ends and allowed(masks.bits[0]) == alone(own, "")


def test_a_broken_look_at_forced_tokens_costs_the_matcher_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking(matcher: Matcher) -> list[int]:
        matcher.state.consume_tokens(ids("!"))
        return [1]

    grammars, own = compiled(ABC), request("r")
    with monkeypatch.context() as patched:
        patched.setattr(Matcher, "forced", breaking)
        assert grammars.forced(own) == () and grammars.num_matchers == 0
    assert grammars.forced(own) == ids("a")


@pytest.mark.parametrize("grammar", [ABC, LED])
def test_no_guess_has_a_grammar_compiled(grammar: Grammar, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have pushed the grammar of a running request out: the next masks have it compiled, in their thread."""
    compiling, compile_it = list[str](), GrammarCompiler.compile

    def watched(compiler: GrammarCompiler, grammar: Grammar) -> LLMatcher:
        compiling.append(threading.current_thread().name.partition("_")[0])
        return compile_it(compiler, grammar)

    grammars, own = make_grammars(), request("r", grammar)
    compile_it(grammars.compiler, ABC)
    monkeypatch.setattr(GrammarCompiler, "compile", watched)
    if grammar is not LED:
        grammars.compiler._compiled.clear()
    assert grammars.forced(own) == () and grammars.num_allowed(own, ids("a")) == 0 and not compiling
    assert allowed(step_masks(grammars, [own]).bits[0]) == alone(own, "") and compiling[0] == "mask"
    assert grammars.num_allowed(own, ids("a")) == 1, "there is a matcher now"


class Form(NamedTuple):
    """A grammar that forces some tokens, and behind these allows the tokens below a limit."""

    must: tuple[int, ...]
    limit: int

    def num_allowed(self, request: Row, token_ids: Sequence[int]) -> int:
        count = 0
        for token_id, must in zip_longest(token_ids, self.must[: len(token_ids)]):
            if token_id >= self.limit or must not in (None, token_id):
                break
            count += 1
        return count

    def forced(self, request: Row) -> Sequence[int]:
        return self.must

    def walk(self, request: Row, count: int, least: float, choose: Choose) -> Sequence[FormToken]:
        return [FormToken(token_id) for token_id in self.must[:count]]


@pytest.mark.parametrize(
    ("form", "source", "expected"),
    [
        (Form((), 7), DraftSource.REQUEST, (4, 5, 6)),
        (Form((), 4), None, ()),
        (Form((4, 5), 9), DraftSource.REQUEST, (4, 5, 6, 7, 8)),
        (Form((4, 5), 6), DraftSource.GRAMMAR, (4, 5)),
        (Form((4, 5, 6, 7, 8, 1, 2), 9), DraftSource.GRAMMAR, (4, 5, 6, 7, 8)),
        (Form((4, 3), 9), DraftSource.GRAMMAR, (4, 3)),
        (Form((1,), 9), DraftSource.GRAMMAR, (1,)),
    ],
)
def test_a_draft_has_what_the_grammar_forces(
    make_scheduler: Callable[..., Scheduler], form: Form, source: DraftSource | None, expected: tuple[int, ...]
) -> None:
    scheduler, own = decoding(make_scheduler)
    drafts = Drafter(DraftLimits(depth=5), form).propose(scheduler)
    assert [(draft.source, draft.token_ids) for draft in drafts] == ([] if source is None else [(source, expected)])
    free = Drafter(DraftLimits(depth=5)).propose(scheduler)[0].chances
    for draft in drafts:
        num_forced = min(len(form.must), len(expected)) if form.must else 0
        assert draft.chances[:num_forced] == (1.0,) * num_forced
        assert list(draft.chances) == sorted(draft.chances, reverse=True)
        assert all(chance >= plain for chance, plain in zip(draft.chances, free, strict=False))
    scheduler.abort(own.request_id, 0.0)


def test_where_only_certain_tokens_pay_the_grammar_alone_is_asked(make_scheduler: Callable[..., Scheduler]) -> None:
    scheduler, own = decoding(make_scheduler)
    for cost_s, expected in ((0.85e-3, [(1, 2)]), (0.95e-3, [])):
        scheduler.learn_costs(WorkerCosts(step_s=1e-3, decode_token_s=0.0, draft_token_s=cost_s))
        assert [draft.token_ids for draft in Drafter(DraftLimits(), Form((1, 2), 9)).propose(scheduler)] == expected
        assert own.suffixes is None
    own.assignment = replace(own.assignment, sampling=replace(own.assignment.sampling, stop_token_ids=(2,)))
    scheduler.learn_costs(CHEAP)
    assert [draft.token_ids for draft in Drafter(DraftLimits(), Form((1, 2), 4)).propose(scheduler)] == [(1,)]
    scheduler.abort(own.request_id, 0.0)


def decoding(make_scheduler: Callable[..., Scheduler]) -> tuple[Scheduler, Request]:
    """A scheduler with a request about to decode, in whose text `4 5 6 7 8` stood behind the last tokens."""
    scheduler = make_scheduler()
    scheduler.learn_costs(CHEAP)
    own = repeating(scheduler, [9, 1, 2, 3, 4, 5, 6, 7, 8, 0], [1, 2, 3])
    own.assignment = replace(own.assignment, sampling=Sampling(99, grammar=ABC))
    return scheduler, own


def test_a_request_without_a_place_has_no_guess_and_its_masks_have_the_reason() -> None:
    grammars, lost = make_grammars(), request("lost", ABC, "xy")
    assert grammars.num_allowed(lost, ids("b")) == 0
    assert "does not allow" in step_masks(grammars, [lost]).dead_ends[0]
