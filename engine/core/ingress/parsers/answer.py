"""A whole answer: its text, its calls, and what they come to as a message."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from raydix.engine.core.ingress.parsers.events import (
    AnswerEvent,
    AnswerText,
    ArgumentsPart,
    CallBegins,
    CallEnds,
    CallParser,
    InputPart,
    ReasoningPart,
)
from raydix.engine.core.ingress.parsers.harmony import HarmonyMessages
from raydix.engine.core.ingress.parsers.reasoning import ReasoningParser, ReasoningPiece


class AnswerParser:
    """Parses one answer: reasoning first, then text and calls; or `messages`, which are all of these in any order, and
    which `calls` reads. `is_single`: the answer ends with its first call. `has_only_calls`: the beginning of a call at
    the end of the answer is no text. Without `shows_reasoning` there are no events of reasoning."""

    def __init__(
        self,
        calls: CallParser | None,
        reasoning: ReasoningParser | None = None,
        *,
        messages: HarmonyMessages | None = None,
        is_single: bool = False,
        has_only_calls: bool = False,
        shows_reasoning: bool = True,
    ) -> None:
        self._calls = calls
        self._reasoning = reasoning
        self._messages = messages
        self._is_single = is_single
        self._has_only_calls = has_only_calls
        self._shows_reasoning = shows_reasoning
        self.has_called = False
        """True if a whole call has come."""

    @property
    def is_done(self) -> bool:
        """True if the answer ends here, whatever the model would write."""
        return self._is_single and self.has_called

    @property
    def has_reasoning(self) -> bool:
        """True if reasoning is told from the text."""
        return self._reasoning is not None or (self._messages is not None and self._messages.is_separate)

    @property
    def is_reasoning(self) -> bool:
        return any(reader is not None and reader.is_inside for reader in (self._reasoning, self._messages))

    def push(self, text: str) -> Sequence[AnswerEvent]:
        """Take the next text; return the events that are certain now."""
        if self._reasoning is None:
            return self._noted(self._of_text(text))
        part = self._reasoning.push(text)
        return [*self._of_reasoning(part.reasoning), *self._noted(self._of_text(part.text))]

    def finish(self, *, is_cut: bool = False) -> Sequence[AnswerEvent]:
        """End the answer, which the model did not end if it `is_cut`; return the events of its held rest."""
        if self._messages is not None:
            self._messages.is_cut = is_cut
        rest = ReasoningPiece() if self._reasoning is None else self._reasoning.finish()
        events = self._noted(self._of_text(rest.text))
        last = () if self._calls is None else self._noted(self._calls.finish())
        # What the model began and did not end is no text for a user where only calls were asked for.
        if self._has_only_calls:
            last = [event for event in last if not isinstance(event, AnswerText)]
        return [*self._of_reasoning(rest.reasoning), *events, *last]

    def _of_reasoning(self, text: str) -> Sequence[AnswerEvent]:
        return [ReasoningPart(text)] if text and self._shows_reasoning else ()

    def _of_text(self, text: str) -> Sequence[AnswerEvent]:
        if self._calls is not None:
            return self._calls.push(text)
        return [AnswerText(text)] if text else ()

    def _noted(self, events: Sequence[AnswerEvent]) -> Sequence[AnswerEvent]:
        """Note whole calls; returns the events up to the answer's end."""
        if self.is_done:
            return ()
        if not self._shows_reasoning:
            events = [event for event in events if not isinstance(event, ReasoningPart)]
        for index, event in enumerate(events, start=1):
            # A broken call is text, so the answer goes on behind it, and a later call may be the one that ends it.
            if isinstance(event, CallEnds) and event.broken is None:
                self.has_called = True
                if self.is_done:
                    return events[:index]
        return events


@dataclass(slots=True)
class Call:
    """A call in an answer."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)
    broken: str | None = None
    """Reason as `CallEnds.broken`."""
    input: list[str] | None = None
    """Input of a custom tool, which the arguments say."""

    def take_input(self, text: str) -> None:
        """Take more of the input."""
        assert self.input is not None
        self.input.append(text)


@dataclass(slots=True)
class Reasoning:
    """Reasoning in an answer."""

    text: str = ""


class AssembledMessage:
    """The message that an answer's events come to, behind a first `text`. `new_id` makes the ids of calls; `custom` are
    the names of tools whose calls have inputs."""

    def __init__(self, new_id: Callable[[], str], text: str = "", custom: Collection[str] = ()) -> None:
        self._new_id = new_id
        self._custom = custom
        self._parts: list[str | Reasoning | Call] = [text] if text else []  # in their order
        self.begun: list[Call] = []
        """Calls by their index, broken ones too."""
        self.is_cut = False
        """True if the answer ended because it was too long: its last call may be a part of one."""

    def take(self, events: Sequence[AnswerEvent]) -> None:
        """Take the next events."""
        for event in events:
            match event:
                case AnswerText(text):
                    self._parts.append(text)
                case ReasoningPart(text):
                    self._parts.append(Reasoning(text))
                case CallBegins(_, name):
                    self.begun.append(Call(self._new_id(), name, input=[] if name in self._custom else None))
                    self._parts.append(self.begun[-1])
                case ArgumentsPart(index, text):
                    self.begun[index].arguments.append(text)
                case InputPart(index, text):
                    self.begun[index].take_input(text)
                case CallEnds(index, broken):
                    self.begun[index].broken = broken

    @property
    def calls(self) -> list[Call]:
        """The calls. A broken one is text, unless the answer was cut there."""
        return [call for call in self.begun if self._counts(call)]

    @property
    def parts(self) -> list[str | Reasoning | Call]:
        """Texts, reasoning and calls in their order. A broken call is text, and adjacent parts of one kind are one."""
        found: list[str | Reasoning | Call] = []
        for part in self._parts:
            last = found[-1] if found else None
            if isinstance(part, Reasoning):
                if isinstance(last, Reasoning):
                    last.text += part.text
                else:
                    found.append(Reasoning(part.text))
                continue
            # A broken call's raw text takes its place, so that the client sees what the model wrote.
            text = part if isinstance(part, str) else part.broken or ""
            if isinstance(part, Call) and self._counts(part):
                found.append(part)
            elif isinstance(last, str):
                found[-1] = last + text
            else:
                found.append(text)
        return found

    @property
    def content(self) -> str:
        """The text for the user; broken calls are part of it."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def reasoning(self) -> str:
        """All of the reasoning; empty if there is none."""
        return "".join(part.text for part in self._parts if isinstance(part, Reasoning))

    def _counts(self, call: Call) -> bool:
        # A call that the limit cut is shown as one all the same: the finish reason `length` says that it is not whole.
        return call.broken is None or (self.is_cut and call is self._parts[-1])
