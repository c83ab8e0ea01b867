"""The form of a chat's prompt: the template that makes it of the messages, and its end, where the answer begins."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A client's wishes for the template that makes a prompt of its chat."""

    source: str | None = None
    """Template in Jinja in place of the model's own; None for that."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Values of JSON's kinds for further variables of the template."""


MODEL_TEMPLATE = ChatTemplate()


class ChatEnd(StrEnum):
    """End of a chat's prompt, behind its last message."""

    ANSWER = "answer"
    """Beginning of the assistant's answer."""
    CLOSED = "closed"
    """Nothing: the model begins the next message itself."""
    OPEN = "open"
    """The last message is not closed: the model goes on with it."""
