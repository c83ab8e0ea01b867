"""Conversations that the server keeps: items, which clients list, add and delete, and which responses add to.

A conversation is bytes: `CONVERSATION`, a revision by which changes at several replicas are told apart, and JSON. It
has the items as the API lists them, and of each answer the generated text with its token ids: as long as all items of
an answer are there, it stands in later prompts with exactly these ids, and the prompt before it is found in the cache.
"""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import orjson
from pydantic import BeforeValidator, FailFast, Field, StringConstraints, WithJsonSchema

from raydix.engine.api.openai_responses.items import Item, as_items, messages_of, with_ids
from raydix.engine.api.prompts import MAX_LABEL_LEN
from raydix.engine.api.responses import Json
from raydix.engine.api.spec import ChatMessage, ContinuedAnswer, GenerationSpec
from raydix.engine.api.validation import LenientModel, describe, parse_body, problem
from raydix.engine.core.errors import NotFoundError, RequestError

CONVERSATION = b"@"
"""Begins the data of a conversation."""
REVISION_BYTES = 16
ID_PREFIX = "conv_"
MAX_BYTES = 1 << 20
"""Bytes of a conversation above which nothing is added to it: it is read as a whole for each request. The text of
131,072 tokens has some 0.6 MB."""
MAX_ADDED = 20
"""Items that a client adds at a time, as at OpenAI."""
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


def parse_added(body: bytes) -> tuple[Json, ...]:
    """The items in a body, with ids. Raises RequestError naming the field."""
    return _listed(parse_body(AddItems, _small(body)).items)


def _small(body: bytes) -> bytes:
    if len(body) > MAX_BYTES:
        raise RequestError(f"The items of a conversation have at most {MAX_BYTES:,} bytes together, got {len(body):,}.")
    return body


def _listed(items: Sequence[Item]) -> tuple[Json, ...]:
    return with_ids([item.listed() for item in items], uuid.uuid4().hex)


# Conversations


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """An answer of a response, of which the ids are known."""

    item_ids: Sequence[str]
    """Ids of its items, one behind the other; at least one."""
    text: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Metadata and items, with what is known of the answers among them."""

    created_at: int
    """Seconds since 1970."""
    metadata: Json
    items: tuple[Json, ...]
    answers: tuple[KnownAnswer, ...] = ()

    @classmethod
    def decode(cls, data: bytes) -> "Conversation":
        """The conversation that `encoded` made the bytes of."""
        fields = orjson.loads(data[len(CONVERSATION) + REVISION_BYTES :])
        answers = tuple(KnownAnswer(**each) for each in fields["answers"])
        return cls(fields["created_at"], fields["metadata"], tuple(fields["items"]), answers)

    def with_items(self, items: Sequence[Json], answer: KnownAnswer | None = None) -> "Conversation":
        """The conversation with more items, among them those of an answer."""
        answers = self.answers if answer is None else (*self.answers, answer)
        return replace(self, items=(*self.items, *items), answers=answers)

    def without(self, item_id: str) -> "Conversation":
        """The conversation without an item, and without the ids of the answer that it was a part of. Raises
        NotFoundError if there is none of this id."""
        self.item(item_id)
        items = tuple(item for item in self.items if item["id"] != item_id)
        return replace(self, items=items, answers=tuple(each for each in self.answers if item_id not in each.item_ids))

    def item(self, item_id: str) -> Json:
        """The item of an id. Raises NotFoundError."""
        for item in self.items:
            if item["id"] == item_id:
                return item
        raise NotFoundError(f"The conversation has no item '{item_id[:100]}'.", param="item_id")

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
    return CONVERSATION + revision + orjson.dumps(asdict(conversation))


def beginning_of(data: bytes) -> bytes:
    """The beginning of a conversation's data, with its revision."""
    return data[: len(CONVERSATION) + REVISION_BYTES]


def new_id() -> str:
    """An id that nobody can guess."""
    return f"{ID_PREFIX}{uuid.uuid4().hex}"


def deleted_body(conversation_id: str) -> bytes:
    """Body of `DELETE /v1/conversations/{id}`."""
    return orjson.dumps({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


def items_body(items: Sequence[Json]) -> bytes:
    """Body with the items that were added."""
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
    return orjson.dumps({"object": "list", "data": items, **ends, "has_more": False})


# Prompts


def resolved(spec: GenerationSpec) -> GenerationSpec:
    """A request with the messages of the conversation that `Turn.earlier` has, before its own input."""
    assert spec.turn is not None
    conversation = Conversation.decode(spec.turn.earlier)
    first = len(spec.messages) - spec.turn.num_own
    messages: list[ChatMessage] = [*spec.messages[:first]]
    continued = []
    for part in _parts(_since_compaction(conversation)):
        if isinstance(part, KnownAnswer):
            continued.append(ContinuedAnswer(len(messages), None, token_ids=tuple(part.token_ids)))
            messages.append({"role": "assistant", "content": part.text})
        else:
            read = [Item.model_validate(item) for item in part]
            messages += [message.for_template() for message in messages_of(read)]
    turn = replace(spec.turn, earlier=b"")
    return replace(spec, messages=(*messages, *spec.messages[first:]), continued=tuple(continued), turn=turn)


def _since_compaction(conversation: Conversation) -> Conversation:
    """The conversation from its last compaction on: before it only the system's messages count."""
    places = [number for number, item in enumerate(conversation.items) if item["type"] == "compaction"]
    if not places:
        return conversation
    before, behind = conversation.items[: places[-1]], conversation.items[places[-1] :]
    kept = (item for item in before if item.get("role") in ("system", "developer"))
    return replace(conversation, items=(*kept, *behind))


def _parts(conversation: Conversation) -> Iterator[KnownAnswer | list[Json]]:
    """The answers of which all items are there, and the runs of items between them."""
    known = {answer.item_ids[0]: answer for answer in conversation.answers}
    items, run, at = conversation.items, list[Json](), 0
    while at < len(items):
        answer = known.get(str(items[at]["id"]))
        there = [] if answer is None else [item["id"] for item in items[at : at + len(answer.item_ids)]]
        if answer is None or there != list(answer.item_ids):
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
