"""Stored responses: what is kept of one, and a request that goes on from several."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, Self, TypeAlias

import orjson
from pydantic import Field, ValidationError

from raydix.engine.api.known import Ignored, Unsupported
from raydix.engine.api.openai_responses.items import KeptItems, items_of, lines_of, list_body
from raydix.engine.api.responses import Json
from raydix.engine.api.resuming import Origin
from raydix.engine.api.spec import ChatMessage, ContinuedAnswer, GenerationSpec
from raydix.engine.api.validation import StrictModel, only, request_error
from raydix.engine.core.errors import RequestError
from raydix.engine.core.memory.response_store import UNDER_WAY, Abandoned

State: TypeAlias = Literal["under_way", "ended", "cancelled", "failed"]
MAX_EVENTS = 10**9  # bound of an event's number in a query
REVISION_BYTES = 16  # random bytes by which the data of one response under way is told from other data of the same name


@dataclass(frozen=True, slots=True)
class Run:
    """All that is needed to generate a response in the background again, at any replica and with the same bits."""

    body: bytes
    """Body of the request."""
    session: str | None
    """Session in the request's headers."""
    streams: bool
    origin: Origin
    earlier: bytes = b""
    """The conversation that the request goes on from, as it was."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response, and its part of the conversation. What may have megabytes stays as it is kept, and is read by those
    alone who need it."""

    response: bytes
    """The object of the API as JSON, which nobody here reads: with log-probabilities it has tens of megabytes."""
    previous: str | None
    """Id of the response that it goes on from."""
    items: bytes
    """The input as the API lists it, in lines (`raydix.engine.api.openai_responses.items.lines_of`)."""
    messages: bytes
    """The input as chat templates know it, as JSON."""
    answer: bytes = b"null"
    """The generated text, and its ids in later prompts or null where the text itself stands there, as JSON."""
    conversation: str | None = None
    """Id of the conversation that it belongs to."""
    in_background: bool = False
    state: State = "ended"
    run: Run | None = None
    """The run of a response in the background that is under way, or whose stream may be read again."""

    @classmethod
    def decode(cls, data: bytes) -> "StoredResponse":
        """The response that `encoded` made the bytes of."""
        # Data of a response under way begin with its mark and revision, which the manager compares without reading the
        # rest.
        start = len(UNDER_WAY) + REVISION_BYTES if data.startswith(UNDER_WAY) else 0
        end = data.find(b"\n", start)
        if end < 0:
            end = len(data)  # an older server wrote everything as one object
        fields = orjson.loads(data[start:end])
        sizes, run = fields.pop("sizes", None), fields.pop("run", None)
        place = end + 1
        if sizes is None:
            return _of_older(fields, data[place:])
        parts = []
        for size in sizes:
            parts.append(data[place : place + size])
            place += size
        items, messages, answer, body, earlier = parts
        if run is not None:
            run = Run(
                body=body,
                session=run["session"],
                streams=run["streams"],
                origin=Origin(**run["origin"]),
                earlier=earlier,
            )
        # What is left behind all sized parts is the response: the largest part, which is copied here and nowhere else.
        return cls(data[place:], items=items, messages=messages, answer=answer, run=run, **fields)

    def input_items(self) -> KeptItems:
        """The input as the API lists it."""
        return items_of(self.items.splitlines())

    def turns(self) -> tuple[list[ChatMessage], str, tuple[int, ...] | None]:
        """The input as chat templates know it, the generated text, and its ids in later prompts."""
        text, token_ids = orjson.loads(self.answer)
        return orjson.loads(self.messages), text, None if token_ids is None else tuple(token_ids)


def answer_of(text: str, token_ids: Sequence[int] | None) -> bytes:
    """A generated text with its ids, as `StoredResponse.answer`."""
    return orjson.dumps([text, None if token_ids is None else [*token_ids]])


def encoded(stored: StoredResponse, revision: bytes = b"") -> bytes:
    """A stored response as bytes: a line of JSON with what is always read, and behind it the other parts, the object of
    the API last. Of a response under way the `revision` stands before it, by which its data is told from all others."""
    run = stored.run
    # Always five sizes, so that `decode` need not know whether there is a run before it cuts.
    parts = [stored.items, stored.messages, stored.answer, *((b"", b"") if run is None else (run.body, run.earlier))]
    own: Json = {"previous": stored.previous, "sizes": [*map(len, parts)]}
    if stored.in_background:
        own |= {"in_background": True, "state": stored.state}
    if stored.conversation is not None:
        own["conversation"] = stored.conversation
    if run is not None:
        own["run"] = {"session": run.session, "streams": run.streams, "origin": asdict(run.origin)}
    beginning = beginning_of(revision) if stored.state == "under_way" else b""
    return b"".join((beginning, orjson.dumps(own), b"\n", *parts, stored.response))


def _of_older(own: Json, response: bytes) -> StoredResponse:
    """The response that an older server has stored: as one object, or as all but the response and behind it that."""
    if not response:
        response = orjson.dumps(own["response"])
        own["previous"] = orjson.loads(response)["previous_response_id"]
    fields: Any = own
    items = {item["id"]: orjson.dumps(item) for item in fields["items"]}
    return StoredResponse(
        response,
        fields["previous"],
        items=b"\n".join(lines_of(items)),
        messages=orjson.dumps(fields["messages"]),
        answer=answer_of(fields["text"], fields["token_ids"]),
    )


def beginning_of(revision: bytes) -> bytes:
    """The beginning of the data of a response under way."""
    assert len(revision) == REVISION_BYTES
    return UNDER_WAY + revision


@dataclass(slots=True, eq=False)
class Claim:
    """A response in the background that is generated here."""

    name: bytes
    beginning: bytes
    """Beginning of its data while it is under way."""
    stored: StoredResponse
    tenant: str
    is_over: bool = False
    """The response has ended, and nobody can take it away."""

    @classmethod
    def of(cls, abandoned: Abandoned) -> "Claim":
        """The claim of a response whose runner is gone."""
        name, data, tenant = abandoned
        return cls(name, data[: len(beginning_of(bytes(REVISION_BYTES)))], StoredResponse.decode(data), tenant)


def going_on(spec: GenerationSpec, earlier: Sequence[StoredResponse]) -> GenerationSpec:
    """A request with the messages and answers of the stored responses before it, the first one first."""
    assert spec.turn is not None and earlier
    # Instructions stand before the conversation and count for this response only; the request's own input comes last.
    first = len(spec.messages) - spec.turn.num_own
    messages = [*spec.messages[:first]]
    continued = []
    for each in earlier:
        said, text, token_ids = each.turns()
        messages += said
        if token_ids is not None:
            # The ids that were generated, not those of the text: the next prompt then begins with the same blocks.
            continued.append(ContinuedAnswer(len(messages), None, token_ids=token_ids))
        messages.append({"role": "assistant", "content": text})
    turn = replace(spec.turn, is_whole=True)
    return replace(spec, messages=(*messages, *spec.messages[first:]), continued=tuple(continued), turn=turn)


def deleted_body(response_id: str) -> bytes:
    """Body of `DELETE /v1/responses/{id}`."""
    return orjson.dumps({"id": response_id, "object": "response", "deleted": True})


def not_cancelled() -> RequestError:
    """The answer to a wish to cancel a response that is not in the background."""
    return RequestError(
        "Cannot cancel a synchronous response. Only one that was created with 'background' can be; to end another one, "
        "close its connection.",
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


class StreamQuery(StoredQuery):
    """Query of `/v1/responses/{id}`."""

    stream: Annotated[bool, Field(strict=False)] = False
    """Answer with the events of the response, of one in the background that streams."""
    starting_after: Annotated[int, Field(ge=0, le=MAX_EVENTS, strict=False)] | None = None
    """Number of the last event that the client has."""


class PageQuery(StoredQuery):
    """Query of `/v1/responses/{id}/input_items`."""

    limit: Annotated[int, Field(ge=1, le=100, strict=False)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    before: Unsupported = None

    def page(self, items: KeptItems) -> bytes:
        """The page of some items. Raises RequestError if `after` is no item's id."""
        ids = [*items] if self.order == "asc" else [*reversed([*items])]
        # Looked up among all items, in either order: a page begins behind the item, wherever that is.
        if self.after is not None and self.after not in items:
            raise RequestError(f"'after' names no item: '{self.after[:100]}'.", param="after")

        start = 0 if self.after is None else ids.index(self.after) + 1
        shown = ids[start : start + self.limit]
        return list_body({each: items[each] for each in shown}, has_more=start + self.limit < len(ids))
