"""Checks grammars before their requests are let in, finds the place at fault, and brings them into canonical form.

Checks need no model: special tokens unknown to the model are found by the worker alone.

llguidance compiles and computes masks without the interpreter's lock. It takes one to four microseconds for each byte
of a text that a grammar forces, in masks and, with the lock, where a worker asks for the text. So a grammar that forces
a text of more than `MAX_FORCED_BYTES` is refused here, as far as its values and sample answers show it; a worker does
not ask for texts of this length (`engine/model/matcher.py`).
"""

import json
import random
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from raydix.engine.api.schemas import Schema, children, subschemas
from raydix.engine.core.errors import RequestError
from raydix.engine.core.types import Grammar, GrammarKind
from raydix.engine.model.grammar_source import (
    MAX_FORCED_BYTES,
    NO_TOKENS,
    GrammarError,
    canonical,
    first_words,
    limits,
    native_source,
)
from raydix.engine.model.grammar_tokens import Tokens

SEARCH_S = 0.5  # longest search for the place of a finding; what is found until then is named
_DEFINITIONS = ("$defs", "definitions")

NUM_SAMPLES = 4  # beginnings of answers that are tried for such texts
SAMPLE_STEPS = 64  # choices in each beginning
SAMPLES_S = 0.1  # processor time after which no further one is tried


# Stack of a check, half of that of a worker's threads: llguidance looks into nested rules by recursion, so a grammar
# that is nested too deeply ends the process that checks it, and never a worker.
STACK_BYTES = 4 << 20


def check_in_small_stack(grammar: Grammar, param: str, tokens: Tokens = NO_TOKENS) -> Grammar:
    """Return the outcome of `check_grammar`, or end this process where the grammar is nested too deeply."""
    outcome = Future[Grammar]()

    def check() -> None:
        try:
            outcome.set_result(check_grammar(grammar, param, tokens))
        except Exception as error:  # of any kind: it is the caller's
            outcome.set_exception(error)

    # The size holds for all threads that begin from now on, so it is set back as soon as this one has begun.
    usual = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=check, name="grammar")
        thread.start()
    finally:
        threading.stack_size(usual)
    thread.join()
    return outcome.result()


def check_grammar(grammar: Grammar, param: str, tokens: Tokens = NO_TOKENS) -> Grammar:
    """Return a grammar in canonical form, with `tokens` of the vocabulary by their ids. Raises RequestError naming the
    place below the request's field `param` if the grammar cannot be compiled, or forces too long a text."""
    try:
        known = canonical(grammar, tokens)
        finding = _finding(known)
    except GrammarError as error:
        finding = str(error)
    # Values tell of most long texts at once; the samples find those that parts of a grammar come to together.
    if finding is None:
        is_long = any(len(text.encode()) > MAX_FORCED_BYTES for text in _values_of(grammar))
        # The lot depends on the grammar alone: the same request is refused, or let in, each time.
        if is_long or _forces_long_text(native_source(known), random.Random(known.digest)):
            raise RequestError(
                f"'{param}' prescribes a text of more than {MAX_FORCED_BYTES} bytes without a choice.", param=param
            )
        return known
    place = param
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        place += _place(json.loads(grammar.source), finding)
    if grammar.kind is GrammarKind.STRUCTURAL_TAG:
        place += _structure_place(json.loads(grammar.source))
    # Names of properties are the client's, of any length.
    place = place if len(place) <= 200 else f"{place[:197]}..."
    raise RequestError(f"'{place}' cannot be compiled: {finding}.", param=place)


def _finding(known: Grammar) -> str | None:
    """Return the reason why a grammar in canonical form cannot be compiled."""
    try:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(native_source(known), limits=limits())
    except GrammarError as error:
        return str(error)
    return _in_our_words(first_words(messages[0])) if is_error else None


@cache
def _bytes_as_tokens() -> LLTokenizer:
    return LLTokenizer("byte")


def _values_of(grammar: Grammar) -> Iterator[str]:
    """The texts that a grammar offers whole, as one of several or as the only one. Behind its first bytes, which others
    may begin with, too, such a text has no choice."""
    schemas: Iterable[tuple[str, Schema]] = ()
    match grammar.kind:
        case GrammarKind.CHOICE:
            yield from json.loads(grammar.source)
        case GrammarKind.JSON_SCHEMA:
            schemas = [("", json.loads(grammar.source))]
        case GrammarKind.STRUCTURAL_TAG:
            schemas = _schemas_of(json.loads(grammar.source))
    for _, schema in schemas:
        for each in subschemas(schema) if isinstance(schema, Mapping) else ():
            values = each.schema.get("enum", [])
            for value in (each.schema.get("const"), *(values if isinstance(values, list) else ())):
                yield json.dumps(value, ensure_ascii=False)


def _forces_long_text(source: str, rng: random.Random) -> bool:
    """True if one of some beginnings of answers, bytes chosen by lot, leads to a text of more than `MAX_FORCED_BYTES`
    without a choice."""
    compiled = LLMatcher(_bytes_as_tokens(), source, log_level=0, limits=limits())
    # Processor time of this thread: on a busy machine as many samples are tried as on an idle one.
    deadline = time.thread_time() + SAMPLES_S
    for _ in range(NUM_SAMPLES):
        # Compiled once; each sample begins with a copy.
        matcher = compiled.deep_copy()
        for _ in range(SAMPLE_STEPS):
            if matcher.is_stopped():  # at the end of an answer, or of llguidance's limits
                break
            forced = matcher.compute_ff_bytes()
            if len(forced) > MAX_FORCED_BYTES:
                return True
            if not matcher.consume_tokens(list(forced)):
                break
            # The first 256 tokens are the bytes; the end of the answer, behind them, is no choice.
            allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:256]
            choices = np.flatnonzero(allowed)
            if not len(choices) or not matcher.consume_token(int(rng.choice(choices))):
                break
            if time.thread_time() > deadline:
                return False
    return False


def _in_our_words(message: str) -> str:
    """Return llguidance's message without its advice to programmers."""
    message = message.partition(" Enable '")[0].rstrip(".")
    if message == "oneOf constraints are not supported":
        return "oneOf is not supported unless the alternatives exclude each other"
    return message.replace("Unimplemented keys:", "these keywords are not supported:")


def _schema_finding(schema: Schema) -> str | None:
    return _finding(canonical(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))))


def _place(root: Schema, finding: str) -> str:
    """Return the place of the innermost subschema with the finding that `root` has."""
    definitions = {name: root[name] for name in _DEFINITIONS if name in root}
    deadline = time.monotonic() + SEARCH_S
    place, schema = "", root
    while True:
        for step, child in children(schema):
            if time.monotonic() > deadline:
                return place
            # The definitions go along: a child may refer to them, and would fail for another reason without.
            if _schema_finding({**definitions, **child}) == finding:
                place, schema = place + step, child
                break
        else:
            return place


def _structure_place(tag: dict[str, Any]) -> str:
    """Return the place of the first schema at fault among a structural tag's; none if it is no schema's fault."""
    for place, schema in _schemas_of(tag):
        finding = _schema_finding(schema)
        if finding is not None:
            return place + _place(schema, finding)
    return ""


def _schemas_of(node: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Schema]]:
    """The schemas of a structural tag or of a part of one, each with its place."""
    for name, value in node.items():
        if name in ("schema", "json_schema"):
            yield f"{place}.{name}", value
        elif isinstance(value, Mapping):
            yield from _schemas_of(value, f"{place}.{name}")
        elif isinstance(value, list):
            for index, each in enumerate(value):
                if isinstance(each, Mapping):
                    yield from _schemas_of(each, f"{place}.{name}[{index}]")
