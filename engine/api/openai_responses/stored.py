"""Stored responses: what is kept of one, and a request that goes on from several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import Field, ValidationError

from raydix.engine.api.known import Ignored, Unsupported
from raydix.engine.api.responses import Json
from raydix.engine.api.spec import ChatMessage, ContinuedAnswer, GenerationSpec
from raydix.engine.api.validation import StrictModel, only, request_error
from raydix.engine.core.errors import RequestError


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response, and its part of the conversation."""

    response: bytes
    """The object of the API as JSON, which nobody here reads: with log-probabilities it has tens of megabytes."""
    previous: str | None
    """Id of the response that it goes on from."""
    items: tuple[Json, ...]
    """The input, as the API lists it."""
    messages: tuple[ChatMessage, ...]
    """The input, as chat templates know it."""
    text: str
    """The generated text."""
    token_ids: tuple[int, ...]
    """Ids of the text in later prompts."""

    @classmethod
    def decode(cls, data: bytes) -> "StoredResponse":
        """The response that `encoded` made the bytes of."""
        own, _, response = data.partition(b"\n")
        fields = orjson.loads(own)
        for name in ("items", "messages", "token_ids"):
            fields[name] = tuple(fields[name])
        if not response:  # an older server wrote everything as one object
            response = orjson.dumps(fields.pop("response"))
            fields["previous"] = orjson.loads(response)["previous_response_id"]
        return cls(response=response, **fields)


def encoded(
    response: bytes,
    *,
    previous: str | None,
    items: Sequence[Json],
    messages: Sequence[ChatMessage],
    text: str,
    token_ids: Sequence[int],
) -> bytes:
    """A `StoredResponse` as bytes: a line with all but the object of the API, and behind it `response`, this object."""
    own = {"previous": previous, "items": items, "messages": messages, "text": text, "token_ids": token_ids}
    return orjson.dumps(own) + b"\n" + response


def going_on(spec: GenerationSpec, earlier: Sequence[StoredResponse]) -> GenerationSpec:
    """A request with the messages and answers of the stored responses before it, the first one first."""
    assert spec.turn is not None and earlier
    first = len(spec.messages) - spec.turn.num_own
    messages = [*spec.messages[:first]]
    continued = []
    for each in earlier:
        messages += each.messages
        continued.append(ContinuedAnswer(len(messages), None, token_ids=each.token_ids))
        messages.append({"role": "assistant", "content": each.text})
    turn = replace(spec.turn, is_whole=True)
    return replace(spec, messages=(*messages, *spec.messages[first:]), continued=tuple(continued), turn=turn)


def deleted_body(response_id: str) -> bytes:
    """Body of `DELETE /v1/responses/{id}`."""
    return orjson.dumps({"id": response_id, "object": "response", "deleted": True})


def not_cancelled() -> RequestError:
    """The answer to any wish to cancel a stored response."""
    return RequestError(
        "Cannot cancel a synchronous response. Only responses in the background can be cancelled, and 'background' is "
        "not supported here: to end a response, close its connection.",
        param="response_id",
    )


class StoredQuery(StrictModel):
    """Query of the routes of one stored response."""

    cache_salt: str | None = None
    """Salt of the response's request."""
    include: Ignored = None
    include_obfuscation: Ignored = None
    stream: Annotated[Any, only("false")] = None
    starting_after: Unsupported = None

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Self:
        """Read a query. Raises RequestError naming the field at fault."""
        try:
            return cls.model_validate({name.removesuffix("[]"): value for name, value in query.items()})
        except ValidationError as error:
            raise request_error(error, cls) from None


class PageQuery(StoredQuery):
    """Query of `/v1/responses/{id}/input_items`."""

    limit: Annotated[int, Field(ge=1, le=100, strict=False)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    before: Unsupported = None

    def of_items(self, items: Sequence[Json]) -> Json:
        """The page. Raises RequestError if `after` is no item's id."""
        ordered = [*items] if self.order == "asc" else [*reversed(items)]
        ids = [str(item["id"]) for item in ordered]
        if self.after is not None and self.after not in ids:
            raise RequestError(f"'after' names no item: '{self.after[:100]}'.", param="after")

        start = 0 if self.after is None else ids.index(self.after) + 1
        data = ordered[start : start + self.limit]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": start + self.limit < len(ordered),
        }
