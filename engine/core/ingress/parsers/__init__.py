"""Parsers of answers: calls of functions by the format in which a model writes them, and reasoning."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from raydix.engine.core.ingress.parsers.events import CallParser
from raydix.engine.core.ingress.parsers.forms import CallForm
from raydix.engine.core.ingress.parsers.harmony import TOKENS, HarmonyMessages, shown
from raydix.engine.core.ingress.parsers.harmony_forms import HarmonyForm
from raydix.engine.core.ingress.parsers.hermes import CLOSE, OPEN, HermesCalls
from raydix.engine.core.ingress.parsers.llama3 import PYTHON_TAG, Llama3Calls
from raydix.engine.core.ingress.parsers.mistral import ARGS, CALL_ID, CALLS, MistralCalls
from raydix.engine.core.ingress.parsers.pythonic import END, START, PythonicCalls


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of calls."""

    name: str
    parser: Callable[[Collection[str]], CallParser]
    """Makes a parser of one answer, given the names of the functions that the request has."""
    markers: tuple[str, ...]
    """Names of special tokens that belong to a call, so that an answer's text has to show them."""
    form: CallForm | HarmonyForm
    """Form of calls that a grammar prescribes."""
    form_parser: Callable[[Collection[str]], CallParser] | None = None
    """Makes a parser of answers in that form, where it is not the family's own."""
    has_short_ids: bool = False
    """True if the family's templates take ids of nine letters and digits only."""
    shown: Callable[[str], str] = str
    """Makes the text of an answer in which the parser finds a marker, of its name."""
    has_channels: bool = False
    """True if whole answers are messages in channels, and reasoning is found with the calls (`HarmonyMessages`)."""


HERMES = ToolFormat(
    "hermes",
    HermesCalls,
    (OPEN, CLOSE),
    CallForm("arguments", marker=OPEN, begin=f"{OPEN}\n", end=f"\n{CLOSE}"),
)
LLAMA3 = ToolFormat("llama3", Llama3Calls, (PYTHON_TAG,), CallForm("parameters", separator="; "))
MISTRAL = ToolFormat(
    "mistral",
    MistralCalls,
    (CALLS, CALL_ID, ARGS),
    CallForm("arguments", marker=CALLS, opening=f"{CALLS} [", separator=", ", closing="]"),
    has_short_ids=True,
)
PYTHONIC = ToolFormat("pythonic", PythonicCalls, (START, END), LLAMA3.form, form_parser=Llama3Calls)
HARMONY = ToolFormat(
    "harmony",
    HarmonyMessages,
    TOKENS,
    HarmonyForm(),
    shown=shown,
    has_channels=True,
)

# Formats by name.
TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {each.name: each for each in (HERMES, LLAMA3, MISTRAL, PYTHONIC, HARMONY)}
)
