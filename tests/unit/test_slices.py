"""Answers of a size that clients choose: in slices, beside the event loop, the same text as small ones have."""

import asyncio
import json
import math
import pickle
import random
import threading
from array import array
from typing import Any

import orjson
import pytest

from raydix.actors.ingress import frontend
from raydix.engine.api.logprobs import (
    SLICE,
    SMALL,
    CompletionLogprobsWriter,
    TokenNames,
    chat_logprobs,
    prompt_logprobs,
)
from raydix.engine.api.slices import SLICE_IDS, Sliced, array_of, document, ids_of, whole
from raydix.engine.core.ingress.answer_room import AnswerRoom, RoomClaim
from raydix.engine.core.types import TokenLogprobs
from raydix.engine.serving.job import SCORE_BYTES, SHOWN_BYTES, USUAL_TOKENS
from tests.unit.ingress import Replica, Reply, Served, body_of, call, objects_of
from tests.unit.served_app import app

VOCABULARY = 3 * SMALL
"""Tokens, some with the same text, and some with a part of a character."""
WORDS = [b"w%d" % (index // 2) if index % 7 else bytes([0xF0, index % 251]) for index in range(VOCABULARY)]


def test_a_document_in_slices_is_the_document() -> None:
    tree: Any = {"a\0": "x\0y", "ids": ids_of(range(3 * SLICE_IDS)), "none": array_of(lambda: ())}
    nested = array_of(lambda: ({"n": n, "inner": array_of(lambda: range(n))} for n in range(3)))  # noqa: B023
    tree["nested"] = nested
    expected = {
        "a\0": "x\0y",
        "ids": list(range(3 * SLICE_IDS)),
        "none": [],
        "nested": [{"n": n, "inner": list(range(n))} for n in range(3)],
    }
    assert json.loads(b"".join(document(tree))) == expected
    assert json.loads(whole(tree)) == expected, "slices are made anew"
    with pytest.raises(TypeError):
        whole(object())


def listed(count: int, *, has_own: bool = True) -> tuple[list[int], list[TokenLogprobs]]:
    chance = random.Random(count)
    positions = []
    token_ids = [chance.randrange(VOCABULARY) for _ in range(3)]
    for token_id in token_ids:
        ids = [each for each in range(VOCABULARY) if has_own or each != token_id]
        chance.shuffle(ids)
        values = [-float("inf"), *(-chance.random() * 9 for _ in range(count - 1))]
        positions.append(TokenLogprobs(-1.5, array("i", ids[:count]), array("f", values)))
    return token_ids, positions


@pytest.mark.parametrize("names_ids", [False, True])
@pytest.mark.parametrize(("count", "num_top"), [(VOCABULARY, None), (VOCABULARY - 1, None), (SMALL + 9, SMALL + 9)])
def test_long_lists_have_the_text_of_short_ones(names_ids: bool, count: int, num_top: int | None) -> None:
    token_ids, positions = listed(count, has_own=count == VOCABULARY)
    names = TokenNames(WORDS.__getitem__)

    def chat(names: TokenNames | None) -> Any:
        return chat_logprobs(token_ids, positions, WORDS.__getitem__, num_top=num_top, names_ids=names_ids, names=names)

    def completion(names: TokenNames | None) -> Any:
        return CompletionLogprobsWriter(WORDS.__getitem__, num_top, names_ids=names_ids, names=names).add(
            token_ids, positions
        )

    for render in (chat, completion):
        large = render(names)
        assert any(isinstance(value, Sliced) for value in large.values())
        assert json.loads(whole(large)) == json.loads(orjson.dumps(render(None)))


def test_prompt_log_probabilities_in_slices() -> None:
    at = TokenLogprobs(-0.5, (1, 2), (-0.5, -1.0), 1)
    token_ids = [1] * (SMALL + 1)
    large = prompt_logprobs(token_ids, [None, *[at] * SMALL], 2, WORDS.__getitem__)
    small = prompt_logprobs(token_ids[:2], [None, at], 2, WORDS.__getitem__)
    assert isinstance(large, Sliced) and isinstance(small, list)
    assert json.loads(whole(large)) == [None, *[small[1]] * SMALL]


def test_all_candidates_of_a_prompt_in_slices() -> None:
    """The text that is made slice by slice is that of the object at once, in its order, with the token itself once."""
    count = SLICE + SMALL
    at = TokenLogprobs(-2.5, array("i", range(count)), array("f", [-math.inf, *[-2.0] * (count - 1)]), 7)
    words = [f'w"{number}' for number in range(count)]

    def token_bytes(token_id: int) -> bytes:
        return words[token_id].encode() if token_id != 5 else b"\xff"

    small = prompt_logprobs([1, 4], [None, at], None, token_bytes)
    large = prompt_logprobs([1, 4], [None, at], None, token_bytes, TokenNames(token_bytes))
    text = whole(large)
    assert text == whole(small)
    found = json.loads(text)[1]
    assert next(iter(found)) == "4" and found["4"] == {"logprob": -2.5, "rank": 7, "decoded_token": 'w"4'}
    assert found["0"]["logprob"] == -9999 and found["5"]["decoded_token"] == "\ufffd" and len(found) == count
    assert [found[str(number)]["rank"] for number in (0, 1, count - 1)] == [1, 2, count]


def test_arrays_are_passed_on_as_bytes() -> None:
    at = TokenLogprobs(-1.0, array("i", range(100_000)), array("f", bytes(400_000)))
    data = pickle.dumps(at, protocol=5)
    assert len(data) < 801_000 and pickle.loads(data) == at


class Crowd(Replica):
    """A replica whose answers list `count` log-probabilities of each token."""

    def __init__(self, count: int, num_tokens: int) -> None:
        super().__init__(max_model_len=400)
        self.dispatcher.answer = "x" * num_tokens
        self.dispatcher.listed = TokenLogprobs(-1.5, array("i", range(count)), array("f", [-2.0] * count))


ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"logprobs": -1}),
    "chat": ("/v1/chat/completions", {"logprobs": True, "top_logprobs": -1}),
    "n": ("/v1/chat/completions", {"logprobs": True, "top_logprobs": -1, "n": 4}),
    "responses": ("/v1/responses", {"top_logprobs": 20, "include": ["message.output_text.logprobs"]}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ROUTES)
def test_large_answers_leave_the_event_loop_to_others(
    served: Served, name: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop never renders more than a small list: while a long one is rendered, its tokens' names are asked
    for by another thread."""
    path, fields = ROUTES[name]
    route = "responses" if name == "responses" else "completion" if name == "completion" else "chat"
    is_short = name == "responses"
    replica = Crowd(20, 300) if is_short else Crowd(5000, 5)
    loop_thread = threading.get_ident()
    on_loop = 0
    bytes_of = replica.rendering.bytes_of

    def counted(token_id: int) -> bytes:
        nonlocal on_loop
        on_loop += threading.get_ident() == loop_thread
        return bytes_of(token_id) if token_id < 128 else b"w%d" % token_id

    monkeypatch.setattr(replica.rendering, "bytes_of", counted)
    replica.rendering._names._token_bytes = counted
    reply: Reply = served(replica, lambda: call(app, "POST", path, body_of(route, stream=stream, **fields)))
    assert reply.status == 200, reply.body[:500]
    assert len(reply.body) > 9 * 5000
    assert on_loop == 0 or (is_short and stream), "pieces of a few log-probabilities stay on the loop"
    if stream:
        assert all(objects_of(reply.body))
    else:
        json.loads(reply.body)
    assert not replica.answer_room.num_bytes


def test_a_stream_that_is_left_while_it_waits_for_memory_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend, "SMALL_BYTES", 1)

    async def run() -> None:
        replica = Replica()
        replica.answer_room.ask(RoomClaim("another", 64 << 20, lambda: None))
        first = asyncio.ensure_future(anext(replica.frontend.stream({"prompt": "hi", "prompt_logprobs": 1})))
        while not replica.answer_room.num_waiting:
            assert not first.done(), "the answer did not wait"
            await asyncio.sleep(0)
        assert replica.room.num_held == 1
        first.cancel()
        await asyncio.wait([first])
        assert not replica.answer_room.num_waiting and replica.room.num_held == 0

    asyncio.run(run())


def test_the_memory_of_an_answer_counts_its_log_probabilities() -> None:
    """Of a stream only long lists count, and without a limit of the client's as many tokens as answers usually have."""

    def held(route: str = "chat", **fields: Any) -> int:
        job = asyncio.run(Replica(max_model_len=4000).closed_job(route, **fields))
        return int(job.held_bytes(0))

    ten: dict[str, Any] = {"logprobs": True, "top_logprobs": 10}
    shown = SHOWN_BYTES * 10
    assert held(**ten, max_tokens=3000) == 3000 * 11 * SCORE_BYTES + shown > frontend.SMALL_BYTES
    assert held(**ten, max_tokens=3000, n=3) == 3 * 3000 * 11 * SCORE_BYTES + shown
    assert held(**ten, max_tokens=None) == USUAL_TOKENS * 11 * SCORE_BYTES + shown < frontend.SMALL_BYTES
    assert held(**ten, max_tokens=3000, stream=True) == shown
    assert held("completion", logprobs=0, max_tokens=50) == 50 * SCORE_BYTES
    assert held("completion", logprobs=0, logprob_token_ids=[5, 6, 7], max_tokens=50) == 50 * 4 * SCORE_BYTES
    assert held(max_tokens=3000) == 0


def test_a_claim_waits_for_memory_and_never_fails() -> None:
    room = AnswerRoom(100)
    granted: list[str] = []

    def ask(tenant: str, size: int) -> RoomClaim:
        claim = RoomClaim(tenant, size, lambda: granted.append(f"{tenant}{size}"))
        room.ask(claim)
        room.check_integrity()
        return claim

    first = ask("a", 40)
    second = ask("a", 41)
    assert granted == ["a40"], "a tenant gets at most as much as stays free"
    other = ask("b", 50)
    assert granted == ["a40", "b50"], "and others are not shut out"
    room.leave(first)
    assert granted == ["a40", "b50", "a41"]
    huge = ask("c", 1000)
    room.leave(other)
    small = ask("a", 1)
    assert granted == ["a40", "b50", "a41"], "nobody overtakes a claim that waits for memory"
    room.leave(second)
    assert granted[-1] == "c1000", "a claim above the limit is granted alone"
    room.leave(small)
    room.leave(huge)
    room.check_integrity()
    assert not room.num_bytes and not room.num_waiting


def test_claims_of_many_tenants_all_come_to_their_turn() -> None:
    chance = random.Random(7)
    room, held = AnswerRoom(1000), []
    waiting = set()
    for number in range(500):
        claim = RoomClaim(chance.choice("abcd"), chance.choice([10, 200, 600, 3000]), lambda: None)
        room.ask(claim)
        waiting.add(claim)
        held = [each for each in waiting if each.is_held]
        assert room.num_bytes <= 1000 or len(held) == 1
        if number % 2 and held:
            gone = chance.choice(held)
            waiting.remove(gone)
            room.leave(gone)
        room.check_integrity()
    while waiting:
        held = [each for each in waiting if each.is_held]
        assert held, "everybody waits"
        waiting.remove(held[0])
        room.leave(held[0])
    assert not room.num_bytes and not room.num_waiting
