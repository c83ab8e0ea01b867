"""Conversations that the server keeps: items, which clients list, add and delete, and which responses add to.

A conversation is bytes: `CONVERSATION`, a revision by which changes at several replicas are told apart, and lines: one
of JSON with what the API shows of the conversation, one for each item as the API lists it, and one for each answer with
the generated text and its token ids. As long as all items of an answer are there, it stands in later prompts with
exactly these ids, and the prompt before it is found in the cache.

Items and answers are lines so that a conversation of a megabyte is listed and changed without being read, on the event
loop. It is read where prompts are made (`resolved`).
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Self

import orjson
from pydantic import BeforeValidator, FailFast, Field, StringConstraints, WithJsonSchema

from raydix.engine.api.openai_responses.items import (
    Item,
    KeptItems,
    as_items,
    items_of,
    lines_of,
    messages_of,
    with_ids,
)
from raydix.engine.api.prompts import MAX_LABEL_LEN
from raydix.engine.api.responses import Json
from raydix.engine.api.spec import ChatMessage, ContinuedAnswer, GenerationSpec
from raydix.engine.api.validation import LenientModel, describe, parse_body, problem
from raydix.engine.core.errors import NotFoundError, RequestError

CONVERSATION = b"@"  # begins the data of a conversation
REVISION_BYTES = 16
ID_PREFIX = "conv_"
# Bytes of a conversation above which nothing is added to it: it is read as a whole for each request. The text of
# 131,072 tokens has some 0.6 MB.
MAX_BYTES = 1 << 20
MAX_ADDED = 20  # items that a client adds at a time, as at OpenAI
MAX_METADATA = 16


def _few_entries(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise problem(f"must have at most {MAX_METADATA} elements, got {len(value)}")
    return value


def _few_items(value: object) -> object:
    if value is None:
        return []
    if not isinstance(value, list):
        raise problem(f"must be a list of items, got {describe(value)}")
    if len(value) > MAX_ADDED:
        raise problem(f"must have at most {MAX_ADDED} items, got {len(value)}")
    return as_items(value)


Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    BeforeValidator(_few_entries),
]
ConversationName = Annotated[
    str,
    BeforeValidator(lambda value: value["id"] if isinstance(value, dict) and "id" in value else value),
    StringConstraints(max_length=MAX_LABEL_LEN, pattern=f"^{ID_PREFIX}"),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object", "properties": {"id": {"type": "string"}}}]}),
]
"""An id, or an object with one."""
Items = Annotated[list[Item], FailFast(), BeforeValidator(_few_items, json_schema_input_type=list[Item])]


# Requests


class CreateConversation(LenientModel):
    """Body of `POST /v1/conversations`."""

    items: Items = Field(default=[], description="The first items, up to 20: as those of a response's `input`.")
    metadata: Metadata | None = Field(default=None, description="Up to 16 texts by name.")


class UpdateConversation(LenientModel):
    """Body of `POST /v1/conversations/{id}`."""

    metadata: Metadata | None = Field(description="Takes the place of the metadata so far.")


class AddItems(LenientModel):
    """Body of `POST /v1/conversations/{id}/items`."""

    items: Annotated[Items, Field(min_length=1)] = Field(description="Items behind the others, up to 20 at a time.")


def parse_create(body: bytes) -> "Conversation":
    """The conversation that a body asks for, of this moment's `created_at`. Raises RequestError naming the field."""
    asked = parse_body(CreateConversation, _small(body) or b"{}")
    return Conversation(0, {**(asked.metadata or {})}, _listed(asked.items))


def parse_update(body: bytes) -> Json:
    """The metadata in a body. Raises RequestError naming the field."""
    return dict(parse_body(UpdateConversation, _small(body)).metadata or {})


def parse_added(body: bytes) -> KeptItems:
    """The items in a body, with ids. Raises RequestError naming the field."""
    return _listed(parse_body(AddItems, _small(body)).items)


def _small(body: bytes) -> bytes:
    if len(body) > MAX_BYTES:
        raise RequestError(f"The items of a conversation have at most {MAX_BYTES:,} bytes together, got {len(body):,}.")
    return body


def _listed(items: Sequence[Item]) -> KeptItems:
    return with_ids((item.listed() for item in items), uuid.uuid4().hex)


# Conversations


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """An answer of a response, of which the ids are known."""

    item_ids: tuple[str, ...]
    """Ids of its items, one behind the other; at least one."""
    content: bytes
    """The generated text and its token ids, as JSON."""

    @classmethod
    def of(cls, item_ids: Sequence[str], text: str, token_ids: Sequence[int]) -> Self:
        return cls(tuple(item_ids), orjson.dumps([text, [*token_ids]]))

    def text_and_ids(self) -> tuple[str, tuple[int, ...]]:
        """The generated text, and its token ids."""
        text, token_ids = orjson.loads(self.content)
        return text, tuple(token_ids)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Metadata and items, with what is known of the answers among them."""

    created_at: int
    """Seconds since 1970."""
    metadata: Json
    items: KeptItems = field(default_factory=dict)
    answers: tuple[KnownAnswer, ...] = ()

    @classmethod
    def decode(cls, data: bytes) -> "Conversation":
        """The conversation that `encoded` made the bytes of."""
        # JSON has no line breaks of its own, so a line is one item and needs no reading to be found.
        head, *lines = data[len(CONVERSATION) + REVISION_BYTES :].split(b"\n")
        own = orjson.loads(head)
        # Items come first: `num_items` says where the lines of answers begin.
        border = own["num_items"]
        answers = (line.partition(b" ") for line in lines[border:])
        return cls(
            own["created_at"],
            own["metadata"],
            items_of(lines[:border]),
            tuple(KnownAnswer(tuple(ids.decode().split(",")), content) for ids, _, content in answers),
        )

    def with_items(self, items: KeptItems, answer: KnownAnswer | None = None) -> "Conversation":
        """The conversation with more items, among them those of an answer. Items that it has already stay as they are:
        an answer that was generated a second time after the death of a replica is added once."""
        is_new = answer is not None and all(answer.item_ids != known.item_ids for known in self.answers)
        answers = (*self.answers, answer) if answer is not None and is_new else self.answers
        return replace(self, items={**self.items, **items}, answers=answers)

    def without(self, item_id: str) -> "Conversation":
        """The conversation without an item, and without the ids of the answer that it was a part of. Raises
        NotFoundError if there is none of this id."""
        self.item(item_id)
        # An answer with an item less is another text than its ids stand for: it is tokenized from now on.
        items = {each: item for each, item in self.items.items() if each != item_id}
        return replace(self, items=items, answers=tuple(each for each in self.answers if item_id not in each.item_ids))

    def item(self, item_id: str) -> bytes:
        """The item of an id. Raises NotFoundError."""
        if item_id not in self.items:
            raise NotFoundError(f"The conversation has no item '{item_id[:100]}'.", param="item_id")
        return self.items[item_id]

    def shown(self, conversation_id: str) -> Json:
        """The object of the API."""
        return {
            "id": conversation_id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": self.metadata,
        }


def encoded(conversation: Conversation, revision: bytes) -> bytes:
    """A conversation as bytes. `revision`, of `REVISION_BYTES` random bytes, tells these from all others."""
    assert len(revision) == REVISION_BYTES
    own = {
        "created_at": conversation.created_at,
        "metadata": conversation.metadata,
        "num_items": len(conversation.items),
    }
    answers = [b"%s %s" % (",".join(each.item_ids).encode(), each.content) for each in conversation.answers]
    lines = [orjson.dumps(own), *lines_of(conversation.items), *answers]
    return CONVERSATION + revision + b"\n".join(lines)


def beginning_of(data: bytes) -> bytes:
    """The beginning of a conversation's data, with its revision."""
    return data[: len(CONVERSATION) + REVISION_BYTES]


def own_ids(unique: str) -> str:
    """The part of the ids of a response's input, by which it is known in its conversation; `unique` names the
    response."""
    return f"{unique}_in"


def before_response(data: bytes, unique: str) -> bytes:
    """A conversation's data as it was before the response of this name was added; the same where it was not."""
    conversation = Conversation.decode(data)
    # The first item of the input is named after the response; all items from there on came with it or later.
    ids, first = [*conversation.items], f"msg_{own_ids(unique)}_0"
    if first not in conversation.items:
        return data
    items = {item_id: conversation.items[item_id] for item_id in ids[: ids.index(first)]}
    answers = tuple(answer for answer in conversation.answers if answer.item_ids[0] in items)
    revision = beginning_of(data)[len(CONVERSATION) :]
    return encoded(replace(conversation, items=items, answers=answers), revision)


def new_id() -> str:
    """An id that nobody can guess."""
    return f"{ID_PREFIX}{uuid.uuid4().hex}"


def deleted_body(conversation_id: str) -> bytes:
    """Body of `DELETE /v1/conversations/{id}`."""
    return orjson.dumps({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


# Prompts


def resolved(spec: GenerationSpec) -> GenerationSpec:
    """A request with the messages of the conversation that `ResponseTurn.earlier` has, before its own input."""
    assert spec.turn is not None
    conversation = Conversation.decode(spec.turn.earlier)
    # Instructions stand first; behind them the conversation, and the input of this request last.
    first = len(spec.messages) - spec.turn.num_own
    messages: list[ChatMessage] = [*spec.messages[:first]]
    continued = []
    items = [orjson.loads(item) for item in conversation.items.values()]
    for part in _parts(_since_compaction(items), conversation.answers):
        if isinstance(part, KnownAnswer):
            text, token_ids = part.text_and_ids()
            # The index is that of the message which is added next.
            continued.append(ContinuedAnswer(len(messages), None, token_ids=token_ids))
            messages.append({"role": "assistant", "content": text})
        else:
            read = [Item.model_validate(item) for item in part]
            messages += [message.for_template() for message in messages_of(read)]
    turn = replace(spec.turn, earlier=b"")
    return replace(spec, messages=(*messages, *spec.messages[first:]), continued=tuple(continued), turn=turn)


def _since_compaction(items: Sequence[Json]) -> Sequence[Json]:
    """The items from the last compaction on: before it only the system's messages count."""
    places = [number for number, item in enumerate(items) if item["type"] == "compaction"]
    if not places:
        return items
    before, behind = items[: places[-1]], items[places[-1] :]
    return [*(item for item in before if item.get("role") in ("system", "developer")), *behind]


def _parts(items: Sequence[Json], answers: Sequence[KnownAnswer]) -> Iterator[KnownAnswer | list[Json]]:
    """The answers of which all items are there, and the runs of items between them."""
    known: Mapping[str, KnownAnswer] = {answer.item_ids[0]: answer for answer in answers}
    run, at = list[Json](), 0
    while at < len(items):
        answer = known.get(str(items[at]["id"]))
        there = () if answer is None else tuple(item["id"] for item in items[at : at + len(answer.item_ids)])
        # Only with all its items in their order does an answer stand with its ids: a client may have deleted or moved
        # some.
        if answer is None or there != answer.item_ids:
            run.append(items[at])
            at += 1
            continue
        if run:
            yield run
            run = []
        yield answer
        at += len(there)
    if run:
        yield run
