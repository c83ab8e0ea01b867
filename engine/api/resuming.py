"""Ids of a stream's events, by which the same request goes on with the stream, at any ingress replica.

| part of an id | |
|---|---|
| `17.1.9c1f22aa:5.2.00aa11bb:0` | the events that the client has: of each choice, then of the stream's end (`Place`) |
| `6921a2b0.1f3a90.` | time of the answer, and the seed of choices without a seed |
| `015d…c0.fp_1234567890.` | seal of the request, and fingerprint of the model |
| `4f2a…` | name of the answer |

`/` stands behind the first part. Nothing is stored: an answer is a function of its request's body and the seed, so a
replica that is given an id generates the answer again, and leaves out the events that the client has. So the events
must be a function of the tokens: each token is rendered alone, however tokens come together in time.

An id is no secret and gives no right. A client can choose everything in an id in other ways, too, and the request's
key decides about the tenant.
"""

import json
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import Enum
from hashlib import blake2b
from typing import Any, NamedTuple
from zlib import crc32

from raydix.engine.api.fields import REQUEST_ID_PATTERN
from raydix.engine.api.reconnecting import BEGINNING, HEADER
from raydix.engine.api.spec import DEFAULT_SAMPLING, FormSpec, GenerationSpec, RetentionSpec, ServiceSpec
from raydix.engine.core.answers.prompt_form import MODEL_TEMPLATE
from raydix.engine.core.errors import AnswerChangedError, RequestError

MAX_CHOICES = 64  # choices of a stream with ids: each id has a place of every choice

_SEAL_BYTES = 12
# First byte of each seal: the rules by which the rest was made. A change of `seal_of` or `by_name` that gives a request
# another seal takes the next number, so that ids of both kinds are told apart.
_SEAL_VERSION = 1
# Fields that only stand in the response (`ResponseTurn.repeated`); the others are parts of the request anyway.
_ONLY_REPEATED = ("instructions", "metadata", "prompt_cache_key", "user")
_PLACE = r"[0-9]{1,9}\.[0-9]{1,9}\.[0-9a-f]{8}"
_ID = re.compile(
    rf"(?P<places>{_PLACE}(?::{_PLACE})*):(?P<closing>[0-9]{{1,4}})"
    r"/(?P<created>[0-9a-f]{1,10})\.(?P<seed>[0-9a-f]{1,16})"
    rf"\.(?P<seal>[0-9a-f]{{{2 * _SEAL_BYTES}}})\.(?P<fingerprint>fp_[0-9a-f]+|)"
    rf"\.(?P<name>{REQUEST_ID_PATTERN.strip('^$')})"
)
_END = b"\n\n"


@dataclass(frozen=True, slots=True)
class Origin:
    """Everything that an answer depends on beside its request's body and the model."""

    name: str
    """Id of the answer without the prefix of its API."""
    created: int
    """Seconds since 1970."""
    seed: int
    """Seed of choices that have none, and of the ids of calls."""
    fingerprint: str | None
    """`system_fingerprint` of the answer; None where the workers were not known yet."""

    def call_id(self, choice: int, number: int) -> str:
        """24 hexadecimal digits for the call of this number in a choice."""
        data = f"{self.seed} {choice} {number}".encode()
        return blake2b(data, digest_size=12, person=b"raydix call").hexdigest()


class Place(NamedTuple):
    """A place in the events of a choice: after the first `num_events` events of the choice's last token."""

    num_tokens: int = 0
    num_events: int = 0
    check: int = 0
    """CRC-32 of the ids of all tokens so far."""

    def __str__(self) -> str:
        return f"{self.num_tokens}.{self.num_events}.{self.check:08x}"


@dataclass(frozen=True, slots=True)
class EventId:
    """Id of one event: the events that its reader has, and the answer."""

    origin: Origin
    seal: bytes
    places: tuple[Place, ...]
    """Place of each choice, in the choices' order."""
    num_closing: int = 0
    """Events behind the last choice's end."""

    @classmethod
    def read(cls, text: str) -> "EventId":
        """Parse an id. Raises RequestError for a text that is none."""
        found = _ID.fullmatch(text)
        if found is None:
            raise RequestError(
                f"'{HEADER}' must be the id of an event of this server's stream, or {BEGINNING} for a new stream with "
                f"ids, got '{text[:100]}'.",
                param=HEADER,
            )
        origin = Origin(found["name"], int(found["created"], 16), int(found["seed"], 16), found["fingerprint"] or None)
        places = tuple(map(_place, found["places"].split(":")))
        return cls(origin, bytes.fromhex(found["seal"]), places, int(found["closing"]))

    def require(self, seal: bytes, num_choices: int) -> None:
        """Raise RequestError unless the id is of the request with this seal."""
        if self.seal[0] != seal[0]:
            raise RequestError(
                f"'{HEADER}' is an id of a server of another version, which this server cannot compare with the "
                f"request: begin the stream anew, with {BEGINNING}.",
                param=HEADER,
            )
        if (self.seal, len(self.places)) != (seal, num_choices):
            raise RequestError(
                f"'{HEADER}' is an id of another request: send the body of the first attempt again, to the same route, "
                "with a key of the same tenant.",
                param=HEADER,
            )

    def require_model(self, fingerprint: str | None) -> None:
        """Raise AnswerChangedError if another model is served, where both are known."""
        own = self.origin.fingerprint
        if None not in (own, fingerprint) and own != fingerprint:
            raise AnswerChangedError(
                f"The answer cannot be continued with the same bits: {own} began it, and {fingerprint} is served now.",
                param=HEADER,
            )


def _place(text: str) -> Place:
    num_tokens, num_events, check = text.split(".")
    return Place(int(num_tokens), int(num_events), int(check, 16))


def seal_of(origin: Origin, spec: GenerationSpec, tenant: str, prompts: Iterable[Sequence[int]]) -> bytes:
    """A digest of a request, equal for two that have the same answer in the same events; `prompts` by their ids.

    Only what the client asked for beyond the defaults counts, by the names of the fields: a server that knows more
    fields gives a request that has none of these the same seal, so a stream goes on across an upgrade.

    Who else asks, when and how soon it runs (`priority`, `slo_*`, `session_id`, `cache_*`, drafts) is left out.
    """
    shown = replace(
        spec,
        # The prompts' ids stand for these.
        messages=spec.messages[-1:] if spec.form.echo else (),
        prompts=(),
        given_prompt=None,
        continued=(),
        text_if_missing=False,
        template=MODEL_TEMPLATE,
        turn=None,
        # No part of the answer.
        sampling=replace(spec.sampling, speculation=DEFAULT_SAMPLING.speculation, allowed_token_ids=None),
        prediction=None,
        ignored=(),
        applied=(),
        reasoning=replace(spec.reasoning, is_hint=False),
        form=FormSpec(),
        service=ServiceSpec(),
        retention=RetentionSpec(),
    )
    retention = RetentionSpec(store=spec.retention.store, marks=spec.retention.marks)
    # The fields of the parts stand beside the others, so that a seal does not depend on how they are grouped.
    parts = _chosen(shown) | _chosen(spec.form) | _chosen(retention)
    asked = {"tenant": tenant, "name": origin.name, "created": origin.created, "seed": origin.seed, "spec": parts}
    if spec.turn is not None:
        repeated = {name: spec.turn.repeated.get(name) for name in _ONLY_REPEATED if spec.turn.repeated.get(name)}
        asked |= {"previous": spec.turn.previous, "is_stored": spec.turn.is_stored, "repeated": repeated}
        if spec.turn.conversation is not None:
            asked["conversation"] = spec.turn.conversation
    text = json.dumps(by_name(asked), sort_keys=True, separators=(",", ":"))
    digest = blake2b(digest_size=_SEAL_BYTES - 1, person=b"raydix resume")
    _add(digest, text.encode())
    for token_ids in (spec.sampling.allowed_token_ids or (), *prompts):  # so many that their text would take long
        _add(digest, _bytes_of(token_ids))
    return bytes((_SEAL_VERSION,)) + digest.digest()


def _chosen(value: Any) -> dict[str, object]:
    """The fields of an object of a dataclass that differ from their defaults, by name."""
    shown = {field.name: (getattr(value, field.name), field) for field in fields(value)}
    return {
        name: own
        for name, (own, field) in shown.items()
        if own != (field.default if field.default_factory is MISSING else field.default_factory())
    }


def by_name(value: object) -> object:
    """A value as JSON has it. An object of a class is its fields by name, without those that have their defaults."""
    if is_dataclass(value) and not isinstance(value, type):
        return by_name(_chosen(value))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(name): by_name(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [by_name(each) for each in value]
    if isinstance(value, bytes):
        return value.hex()
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise TypeError(f"{type(value).__name__} has no canonical form")


def _add(digest: blake2b, data: bytes) -> None:
    """Hash a part with its length before it, so that parts cannot run into each other."""
    digest.update(len(data).to_bytes(8, "little") + data)


def _bytes_of(token_ids: Sequence[int]) -> bytes:
    return array("I", token_ids).tobytes()


class _Choice:
    """Events of one choice: `at` as generated by this replica, `shown` as far as the client has them."""

    def __init__(self, delivered: Place) -> None:
        self.at = Place()
        self.shown = delivered
        self._delivered = delivered
        self.is_checked = not delivered.num_tokens

    @property
    def is_delivered(self) -> bool:
        """True if the client has the last event."""
        return self.at[:2] <= self._delivered[:2]

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Go on to the next token. Raises AnswerChangedError if the client has got other tokens."""
        if not token_ids:
            return
        # Events are counted anew from each token on, since the number of events of a token is a function of it.
        self.at = Place(self.at.num_tokens + len(token_ids), 0, crc32(_bytes_of(token_ids), self.at.check))
        # One comparison, at the client's last token: the checksum covers all tokens before.
        if not self.is_checked and self.at.num_tokens >= self._delivered.num_tokens:
            if (self.at.num_tokens, self.at.check) != (self._delivered.num_tokens, self._delivered.check):
                raise _changed()
            self.is_checked = True

    def add_event(self) -> None:
        self.at = self.at._replace(num_events=self.at.num_events + 1)
        if not self.is_delivered:
            self.shown = self.at


class EventIds:
    """Gives the events of one stream their ids, and leaves out those that the client has (`last`). The stream's last
    event has no id: a client that has got it does not come back."""

    def __init__(self, origin: Origin, seal: bytes, num_choices: int, last: EventId | None = None) -> None:
        places = (Place(),) * num_choices if last is None else last.places
        self._choices = [_Choice(place) for place in places]
        self._num_closing = 0
        # Events behind the last choice's end that the client has.
        self._num_delivered = 0 if last is None else last.num_closing
        head = f"{origin.created:x}.{origin.seed:x}.{seal.hex()}.{origin.fingerprint or ''}.{origin.name}"
        self._head = head.encode()

    def mark(self, choice: int, token_ids: Sequence[int], data: bytes) -> bytes:
        """Gives each event of the next tokens of a choice an id, and leaves out the events that the client has.
        Raises AnswerChangedError if the client has got other tokens."""
        state = self._choices[choice]
        state.add_tokens(token_ids)
        marked = b""
        for event in data.split(_END)[:-1]:
            state.add_event()
            if not state.is_delivered:
                marked += self._with_id(event)
        return marked

    def mark_end(self, data: bytes) -> bytes:
        """Mark the events behind all choices. Raises AnswerChangedError if the client has got more tokens than
        there are."""
        if not all(choice.is_checked for choice in self._choices):
            raise _changed()
        *events, last = data.split(_END)[:-1]
        marked = b""
        for event in events:
            self._num_closing += 1
            if self._num_closing > self._num_delivered:
                marked += self._with_id(event)
        return marked + last + _END

    def _with_id(self, event: bytes) -> bytes:
        """The id comes first, so that no client has an event without its id."""
        places = ":".join([str(choice.shown) for choice in self._choices])
        closing = max(self._num_closing, self._num_delivered)
        return b"id: %s:%d/%s\n%s%s" % (places.encode(), closing, self._head, event, _END)


def _changed() -> AnswerChangedError:
    return AnswerChangedError(
        "The answer cannot be continued with the same bits: generated again, it has other tokens than those that were "
        "delivered.",
        param=HEADER,
    )
