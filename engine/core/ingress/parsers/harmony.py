"""Answers in harmony, gpt-oss' format: messages in channels, each with a header before its content.

<|channel|>analysis<|message|>Let me see.<|end|>
<|start|>assistant<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{"zone": "UTC"}<|call|>

(one line in truth). The message's channel says whether it is reasoning (`analysis`) or text for the user (`final`, and
`commentary` without a recipient); with a recipient it is a call. A special token of the format is told from its name as
text by the mark before it (`shown`), so that an answer may speak of the format.
"""

import re
from collections.abc import Collection, Sequence
from enum import Enum

from raydix.engine.core.ingress.parsers.events import WHITESPACE, AnswerEvent, Collector
from raydix.engine.core.ingress.parsers.json_call import MAX_NAME, JsonArguments, name_in
from raydix.engine.core.ingress.parsers.json_value import Step

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
TOKENS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
REASONING_TAGS = f"{CHANNEL}{ANALYSIS}{MESSAGE}", END  # around a message of reasoning
NAMESPACE = "functions."  # before the names of a request's functions

# Unicode's noncharacters are for a program's own use: no text has this one before the name of a special token.
MARK = "\ufdd0"
MAX_HEAD = 2 * MAX_NAME  # characters of a header; a longer one is text
# Recipients that are no function: the message is for the conversation.
_NOBODY = frozenset(("all", "assistant", "user"))
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w*)(?!.*{re.escape(CHANNEL)})", re.DOTALL)
# Beginnings of a header that no special token opens: behind the prompt's `<|start|>assistant`, or where the model has
# left `<|start|>` out.
_BARE_HEADS = ("to=", "assistant")
_BETWEEN_MESSAGES = "\n\n"  # between the texts of two messages, which clients show as one


def shown(name: str) -> str:
    """The text that stands for a special token of the format in what `HarmonyMessages` reads."""
    return MARK + name


def opening(prompt: str) -> str:
    """Return the beginning of the answer to a rendered prompt that stands in the prompt itself: a message's header, or
    the part of it that has come, without any content; empty behind a whole message."""
    _, found, last = prompt.rpartition(START)
    header, begun, content = last.partition(MESSAGE)
    is_over = any(token in (content if begun else header) for token in (END, RETURN, CALL))
    return "" if not found or is_over else found + header + begun


class _Place(Enum):
    HEAD = "in a header"
    BARE = "where a header may begin without a special token"
    CONTENT = "in a message"


class _Kind(Enum):
    TEXT = "text for the user"
    REASONING = "reasoning"
    CALL = "the arguments of a call"


class HarmonyMessages:
    """A parser of such an answer: of its reasoning and its text, and of its calls if it `may_call`.

    Where it may not, and where its content is no JSON object, a message with a recipient is what its channel says. An
    unknown channel has text. Of a header that is cut off nothing is shown. Without `is_separate` reasoning is text, and
    all text has the headers and ends of its messages. `begun` is the part of the answer that the prompt has
    (`opening`).
    """

    def __init__(
        self,
        names: Collection[str],
        *,
        may_call: bool = True,
        is_separate: bool = True,
        begun: str = "",
    ) -> None:
        self._names = names
        self._may_call = may_call
        self.is_separate = is_separate
        """True if reasoning is told from the text."""
        self._out = Collector()
        self._held = ""  # the part of a special token that has come
        self._place = _Place.BARE
        self._kind = _Kind.TEXT
        self._otherwise = _Kind.TEXT  # what a call is whose content is no JSON object
        self._head = ""  # the header so far, with the names of its special tokens
        self._name = ""  # function of the call
        self._arguments: JsonArguments | None = None
        self._has_text = self._has_reasoning = False  # true behind the first character of either
        self._has_content = False  # true behind the first character of this message
        self.is_cut = False
        """True if the end of the text is no end that the model wrote."""
        if CHANNEL in begun or MESSAGE in begun:
            self._place, self._head = _Place.HEAD, begun.removesuffix(MESSAGE)
        if MESSAGE in begun:
            self._open()
            self._out = Collector()  # the prompt's header is no part of the answer's text

    @property
    def is_inside(self) -> bool:
        """True inside reasoning."""
        return self._place is _Place.CONTENT and self._kind is _Kind.REASONING

    def push(self, text: str) -> Sequence[AnswerEvent]:
        text, self._held = self._held + text, ""
        while text:
            plain, mark, rest = text.partition(MARK)
            if plain:
                self._take(plain)
            if not mark:
                break
            token = next((each for each in TOKENS if rest.startswith(each)), None)
            if token is not None:
                self._special(token)
                text = rest[len(token) :]
            elif any(each.startswith(rest) for each in TOKENS):
                self._held = mark + rest
                break
            else:
                self._take(mark)
                text = rest
        return self._out.take()

    def finish(self) -> Sequence[AnswerEvent]:
        if self._held:
            self._take(self._held)
            self._held = ""
        if self._place is _Place.BARE:
            self._begin_text()
        elif self._place is _Place.CONTENT:
            self._end_content(is_cut=self.is_cut)
        return self._out.finish()

    def _take(self, text: str) -> None:
        """Take text without special tokens."""
        match self._place:
            case _Place.CONTENT:
                self._content(text)
            case _Place.HEAD:
                self._lengthen(text)
            case _Place.BARE:
                self._head += text
                head = self._head.lstrip(WHITESPACE)
                if not any(head.startswith(each) or each.startswith(head) for each in _BARE_HEADS):
                    self._begin_text()
                else:
                    self._lengthen("")

    def _lengthen(self, text: str) -> None:
        """Take more of a header."""
        self._head += text
        if len(self._head) > MAX_HEAD:
            self._begin_text()

    def _begin_text(self) -> None:
        """Take what was held as a header for text, and go on with text."""
        head, self._head = self._head, ""
        self._begin_content(_Kind.TEXT)
        self._content(head)

    def _special(self, token: str) -> None:
        """Take a special token."""
        # No header comes of what has none of the format's tokens before a message begins or ends.
        if self._place is _Place.BARE and token in (START, END, RETURN, CALL) and self._head.strip(WHITESPACE):
            self._begin_text()
        is_head = self._place is not _Place.CONTENT
        if token in (START, CHANNEL, CONSTRAIN) and (is_head or token != CONSTRAIN):
            if not is_head:
                self._end_content(is_cut=False)
                self._head = ""
            # Only `<|start|>` begins another header: the others stand between parts of one.
            self._head = token if token == START else self._head + token
            self._place = _Place.HEAD
            self._lengthen("")
        elif token == MESSAGE and is_head:
            self._open()
        elif token in (END, RETURN, CALL):
            if not is_head:
                self._end_content(is_cut=False)
                if not self.is_separate:
                    self._out.text(token)
            self._place, self._head = _Place.BARE, ""

    def _open(self) -> None:
        """Begin the content of a message, behind its header."""
        head, self._head = self._head, ""
        found = _CHANNEL.search(head)
        is_reasoning = found is not None and found[1] == ANALYSIS and self.is_separate
        self._otherwise = _Kind.REASONING if is_reasoning else _Kind.TEXT
        name = self._called(head)
        if name is not None:
            self._name = name
        elif not self.is_separate:
            self._out.text(head + MESSAGE)
        self._begin_content(self._otherwise if name is None else _Kind.CALL)

    def _called(self, head: str) -> str | None:
        """Name of the function that a header's message calls; None if it calls none."""
        found = _RECIPIENT.search(head.replace(CHANNEL, " ").replace(CONSTRAIN, " "))
        if found is None or not self._may_call or found[1] in _NOBODY:
            return None
        name = found[1] if found[1] in self._names else found[1].removeprefix(NAMESPACE)
        return name_in(name, None)

    def _begin_content(self, kind: _Kind) -> None:
        self._place, self._kind, self._has_content = _Place.CONTENT, kind, False

    def _content(self, text: str) -> None:
        """Take a part of a message's content."""
        if self._kind is _Kind.CALL:
            text = self._in_call(text)
        if not text:
            return
        # Two messages are two paragraphs, but not where their headers stand between them.
        is_first, self._has_content = not self._has_content and self.is_separate, True
        if self._kind is _Kind.REASONING:
            self._out.reasoning(_BETWEEN_MESSAGES * (is_first and self._has_reasoning) + text)
            self._has_reasoning = True
        else:
            self._out.text(_BETWEEN_MESSAGES * (is_first and self._has_text) + text)
            self._has_text = True

    def _in_call(self, text: str) -> str:
        """Take a part of a call's arguments; returns text that is none."""
        if self._arguments is None:
            text = text.lstrip(WHITESPACE)
            if not text:
                return ""
            if text[0] != "{":
                self._kind = self._otherwise
                return text
            self._arguments, self._has_content = JsonArguments(self._out, "", self._name), True
        step, rest = self._arguments.feed(text)
        if step is Step.MORE:
            return ""
        self._arguments, self._kind = None, _Kind.TEXT
        return rest

    def _end_content(self, *, is_cut: bool) -> None:
        """End a message's content."""
        if self._kind is not _Kind.CALL:
            return
        if self._arguments is not None:
            self._arguments.give_up()
            self._arguments = None
        elif not is_cut:
            # A call without content has no arguments; clients parse what they get as JSON.
            self._out.begin(self._name)
            self._out.arguments("{}")
            self._out.end()
        self._kind = _Kind.TEXT
