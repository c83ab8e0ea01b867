"""Compaction as the Responses API has it: an item `compaction` in the output, which later requests send back."""

import base64
from typing import Annotated

import orjson
from pydantic import Field

from raydix.engine.api.responses import Json
from raydix.engine.api.validation import INTEGRAL, LenientModel

MIN_THRESHOLD = 1000  # OpenAI's lowest threshold
_PREFIX = "raydix.1."  # begins the content of every item that a raydix server has made


class CompactionRule(LenientModel):
    """When a conversation is compacted."""

    type: Annotated[str, Field(max_length=64)] = Field(
        description="`compaction`. A rule of another type has no effect, and is named in the header `x-raydix-ignored`."
    )
    compact_threshold: Annotated[int, Field(ge=MIN_THRESHOLD), INTEGRAL] | None = Field(
        default=None, description="Tokens of the prompt above which a summary takes the conversation's place."
    )


def content_of(text: str) -> str:
    """The content of an item: not secret, since it is the client's own text, but not made to be changed either."""
    return _PREFIX + base64.urlsafe_b64encode(orjson.dumps({"text": text})).decode()


def text_of(content: str) -> str | None:
    """The message in an item's content; None if no raydix server has made the item."""
    if not content.startswith(_PREFIX):
        return None
    try:
        text = orjson.loads(base64.urlsafe_b64decode(content[len(_PREFIX) :]))["text"]
    except (ValueError, TypeError, KeyError):
        return None
    return text if isinstance(text, str) else None


def item(unique: str, text: str) -> Json:
    """The item of the message `text` as a response has it. `unique`: the part of the id that no other item has."""
    return {"id": f"cmp_{unique}", "type": "compaction", "encrypted_content": content_of(text)}
