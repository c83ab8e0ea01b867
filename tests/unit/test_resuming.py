"""Ids of events: what they say, and that a stream generated again goes on exactly behind any of them."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydix.engine.api.requests import parse_chat, parse_completion
from raydix.engine.api.resuming import EventId, EventIds, Origin, Place, by_name, seal_of
from raydix.engine.api.spec import GenerationSpec
from raydix.engine.core.errors import AnswerChangedError, RequestError
from raydix.engine.core.types import Role, Sampling
from tests.unit.ingress import body_of

ORIGIN = Origin("cmpl-1:a.b", 1_700_000_000, 2**62 - 1, "fp_0123456789")
SEAL = bytes(range(1, 13))
TAIL = f"/6553f100.3fffffffffffffff.{SEAL.hex()}.fp_0123456789.cmpl-1:a.b"

Token = tuple[int, int]
"""A token, and the number of events that it comes to."""


def event(text: str) -> bytes:
    return f"data: {text}\n\n".encode()


def last_id(stream: bytes) -> str:
    return stream.rpartition(b"id: ")[2].partition(b"\n")[0].decode()


def datas(stream: bytes) -> list[str]:
    return [line.removeprefix("data: ") for line in stream.decode().splitlines() if line.startswith("data: ")]


def streamed(choices: Sequence[Sequence[Token]], order: Sequence[int], ids: EventIds) -> list[bytes]:
    """Events of a stream of these choices, of which one after the other goes on by a token, as `order` says."""
    found, positions = [], [0] * len(choices)
    for index in [*order, *(index for index, tokens in enumerate(choices) for _ in tokens)]:
        choice = index % len(choices)
        if positions[choice] == len(choices[choice]):
            continue
        token_id, num_events = choices[choice][positions[choice]]
        positions[choice] += 1
        data = b"".join(event(f"{choice}/{positions[choice]}/{number}") for number in range(num_events))
        found += [part + b"\n\n" for part in ids.mark(choice, [token_id], data).split(b"\n\n")[:-1]]
    return [*found, *(part + b"\n\n" for part in ids.mark_end(event("usage") + event("[DONE]")).split(b"\n\n")[:-1])]


def test_an_id_says_where_and_of_which_answer() -> None:
    ids = EventIds(ORIGIN, SEAL, 2)
    assert ids.mark(0, [7], event("a") + event("b")) == (
        f"id: 1.1.bc93e7a5:0.0.00000000:0{TAIL}\ndata: a\n\nid: 1.2.bc93e7a5:0.0.00000000:0{TAIL}\ndata: b\n\n".encode()
    )
    stream = ids.mark(1, [7], event("c")) + ids.mark_end(event("usage") + event("[DONE]"))
    assert stream.endswith(f":1{TAIL}\ndata: usage\n\ndata: [DONE]\n\n".encode()), "the last event has no id"
    found = EventId.read(last_id(stream))
    assert found == EventId(ORIGIN, SEAL, (Place(1, 2, 0xBC93E7A5), Place(1, 1, 0xBC93E7A5)), 1)


def test_workers_that_are_not_known_yet_have_no_fingerprint() -> None:
    origin = replace(ORIGIN, fingerprint=None)
    found = EventId.read(last_id(EventIds(origin, SEAL, 1).mark(0, [7], event("a"))))
    assert found.origin == origin
    found.require_model("fp_1")
    EventId(ORIGIN, SEAL, ()).require_model(None)


@pytest.mark.parametrize(
    "text",
    [
        "1",
        "17",
        "1.1.bc93e7a5:0",
        f"0{TAIL}",
        f"1.1.bc93e7a:0{TAIL}",
        f"1.1.bc93e7a5{TAIL}",
        f"-1.1.bc93e7a5:0{TAIL}",
        f"1.1.bc93e7a5:0{TAIL} ",
        f"1.1.bc93e7a5:0{TAIL}\n",
        f"1.1.bc93e7a5:0{TAIL[:-10]}",
        f"1.1.bc93e7a5:0{TAIL.replace('fp_', 'fp')}",
        f"1.1.bc93e7a5:0{TAIL.replace('cmpl', 'é')}",
        f"1.1.bc93e7a5:0{TAIL.replace('3fff', '3ffff')}",
        "9" * 10_000,
    ],
    ids=lambda text: text[:40],
)
def test_a_text_that_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="'Last-Event-ID' must be the id of an event") as raised:
        EventId.read(text)
    assert (raised.value.status, raised.value.param) == (400, "Last-Event-ID")
    assert len(raised.value.message) < 300


def test_an_id_of_another_request_or_model_is_refused() -> None:
    found = EventId(ORIGIN, SEAL, (Place(),))
    found.require(SEAL, 1)
    for seal, num_choices in ((SEAL[:1] + SEAL[:0:-1], 1), (SEAL, 2)):
        with pytest.raises(RequestError, match="is an id of another request") as raised:
            found.require(seal, num_choices)
        assert raised.value.status == 400
    with pytest.raises(RequestError, match="is an id of a server of another version"):
        found.require(SEAL[::-1], 1)
    found.require_model("fp_0123456789")
    with pytest.raises(AnswerChangedError, match="fp_0123456789 began it, and fp_1 is served now") as changed:
        found.require_model("fp_1")
    assert (changed.value.status, changed.value.code) == (409, "answer_changed")


tokens = st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 3)), max_size=6)


@given(
    st.lists(tokens, min_size=1, max_size=3),
    st.lists(st.integers(0, 2), max_size=18),
    st.lists(st.integers(0, 2), max_size=18),
    st.lists(st.integers(0, 60), max_size=3),
)
def test_a_stream_goes_on_behind_any_event_and_again(
    choices: list[list[Token]], order: list[int], again: list[int], cuts: list[int]
) -> None:
    """Whatever the order in which the choices' tokens come each time."""
    whole = b"".join(streamed(choices, order, EventIds(ORIGIN, SEAL, len(choices))))
    joined, last = b"", None
    for cut in cuts:
        part = b"".join(streamed(choices, order, EventIds(ORIGIN, SEAL, len(choices), last))[:cut])
        if b"[DONE]" in part:
            break
        joined += part
        last = EventId.read(last_id(joined)) if joined else None
        order, again = again, order
    joined += b"".join(streamed(choices, order, EventIds(ORIGIN, SEAL, len(choices), last)))
    assert sorted(datas(joined)) == sorted(datas(whole)), "each event once"
    for choice in range(len(choices)):
        of_choice = [data for data in datas(whole) if data.startswith(f"{choice}/")]
        assert [data for data in datas(joined) if data.startswith(f"{choice}/")] == of_choice, "in their order"
    assert datas(joined)[-2:] == ["usage", "[DONE]"]


def test_all_but_the_last_event_may_have_come() -> None:
    stream = streamed([[(7, 1)]], [], EventIds(ORIGIN, SEAL, 1))
    last = EventId.read(last_id(b"".join(stream)))
    assert streamed([[(7, 1)]], [], EventIds(ORIGIN, SEAL, 1, last)) == [event("[DONE]")]


def test_an_answer_without_tokens_goes_on_too() -> None:
    """One that only scores the prompt."""
    first = EventIds(ORIGIN, SEAL, 1).mark(0, (), event("a"))
    ids = EventIds(ORIGIN, SEAL, 1, EventId.read(last_id(first)))
    assert datas(ids.mark(0, (), event("a") + event("b"))) == ["b"]
    assert datas(ids.mark_end(event("[DONE]"))) == ["[DONE]"]


@pytest.mark.parametrize(
    "other",
    [[(1, 1), (2, 1), (4, 1), (5, 1)], [(0, 1), (2, 1), (3, 1)], [(1, 1), (2, 1)], []],
    ids=["another last", "another first", "shorter", "none"],
)
def test_an_answer_with_other_tokens_is_not_continued(other: list[Token]) -> None:
    stream = streamed([[(1, 1), (2, 1), (3, 1), (5, 1)]], [], EventIds(ORIGIN, SEAL, 1))
    last = EventId.read(last_id(stream[2]))
    with pytest.raises(AnswerChangedError, match="other tokens than those that were delivered"):
        streamed([other], [], EventIds(ORIGIN, SEAL, 1, last))


def test_tokens_that_come_together_are_checked_too() -> None:
    last = EventId(ORIGIN, SEAL, (Place(2, 1, 0),))
    with pytest.raises(AnswerChangedError):
        EventIds(ORIGIN, SEAL, 1, last).mark(0, [1, 2, 3], event("a"))


def sealed(
    origin: Origin = ORIGIN, tenant: str = "t", prompts: Sequence[Sequence[int]] = ((1,),), **fields: Any
) -> Any:
    return seal_of(origin, parse_completion(body_of("completion", stream=True, **fields)), tenant, prompts)


def test_a_seal_leaves_out_all_that_is_no_part_of_the_answer() -> None:
    own = sealed(seed=1)
    assert own == sealed(
        seed=1,
        prompt="another text, of which the ids are given",
        user="u",
        session_id="s",
        priority=3,
        cache_salt="c",
        cache_priority=1,
        cache_ttl_s=5,
        request_id="r",
        speculation=False,
    )
    assert own == sealed(replace(ORIGIN, fingerprint=None), seed=1)


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 2},
        {"temperature": 0.5},
        {"max_tokens": 3},
        {"stop": "x"},
        {"n": 2},
        {"logprobs": 1},
        {"echo": True},
        {"allowed_token_ids": [3]},
        {"stream_options": {"include_usage": True}},
        {"prompts": ((2,),)},
        {"prompts": ((1,), ())},
        {"tenant": "other"},
        {"origin": replace(ORIGIN, name="x")},
        {"origin": replace(ORIGIN, created=1)},
        {"origin": replace(ORIGIN, seed=1)},
    ],
    ids=str,
)
def test_a_seal_covers_what_changes_the_answer(fields: dict[str, Any]) -> None:
    assert sealed(**{"seed": 1} | fields) != sealed(seed=1)


def test_an_echoed_message_and_tools_are_covered() -> None:
    def seal(text: str, name: str, **fields: Any) -> bytes:
        tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        messages = [{"role": "user", "content": text}]
        return seal_of(ORIGIN, parse_chat(body_of("chat", messages=messages, tools=[tool], **fields)), "t", [[1]])

    assert seal("a", "f") == seal("b", "f") != seal("a", "g")
    assert seal("a", "f", echo=True) != seal("b", "f", echo=True)


def test_a_seal_is_the_same_in_every_process() -> None:
    """Long requests are read in another process, and replicas of a later start read ids of earlier ones."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = body_of(
        "chat", tools=[tool], stream=True, stop=["a"], logit_bias={"3": 1}, response_format={"type": "json_object"}
    )
    spec = parse_chat(body)
    seals = {
        seal_of(ORIGIN, each, "t", [[1, 2]]) for each in (spec, pickle.loads(pickle.dumps(spec)), parse_chat(body))
    }
    assert len(seals) == 1


@dataclass(frozen=True, slots=True)
class NewerSampling(Sampling):
    """Sampling parameters of a later version."""

    typical_p: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NewerSpec(GenerationSpec):
    """A request of a later version."""

    watermark: str | None = None
    styles: tuple[str, ...] = ()
    lists: list[int] = field(default_factory=list)


def newer(value: Any, kind: type, **changes: Any) -> Any:
    return kind(**{each.name: getattr(value, each.name) for each in fields(value)} | changes)


def test_a_seal_is_that_of_a_version_with_fewer_fields() -> None:
    """Unless a request has one of the fields that came later."""
    spec = parse_completion(body_of("completion", stream=True, seed=1, temperature=0.5, stop=["x"]))
    own = seal_of(ORIGIN, spec, "t", [[1]])
    later = newer(spec, NewerSpec, sampling=newer(spec.sampling, NewerSampling))
    assert seal_of(ORIGIN, later, "t", [[1]]) == own
    for changes in (
        {"watermark": "w"},
        {"styles": ("s",)},
        {"lists": [1]},
        {"sampling": newer(spec.sampling, NewerSampling, typical_p=0.9)},
    ):
        assert seal_of(ORIGIN, replace(later, **changes), "t", [[1]]) != own


def test_the_same_request_has_the_same_seal_in_every_version() -> None:
    """These seals were made by earlier versions. A change that needs others takes the next `_SEAL_VERSION`."""
    assert sealed(seed=1, temperature=0.5, stop=["x"], logit_bias={"3": 1}).hex() == "01d340a71e45f095ccf5e683"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    spec = parse_chat(body_of("chat", stream=True, tools=[tool], top_p=0.5, stream_options={"include_usage": True}))
    assert seal_of(ORIGIN, spec, "t", [[1, 2], []]).hex() == "013073f6008326eabce47827"


def test_only_values_with_a_canonical_form_are_sealed() -> None:
    assert by_name({"a": (1, b"\x01", Role.DECODE, None, True, [0.5])}) == {"a": [1, "01", "decode", None, True, [0.5]]}
    with pytest.raises(TypeError, match="object has no canonical form"):
        by_name(object())


def test_ids_of_calls_are_those_of_the_answer() -> None:
    assert len({ORIGIN.call_id(choice, number) for choice in range(3) for number in range(3)}) == 9
    assert ORIGIN.call_id(0, 0) != replace(ORIGIN, seed=1).call_id(0, 0)
    assert len(ORIGIN.call_id(1, 2)) == 24
