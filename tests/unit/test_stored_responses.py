"""Stored responses as bytes: the object of the API is kept and given back unread."""

from dataclasses import replace

import orjson

from raydix.engine.api.openai_responses.items import lines_of
from raydix.engine.api.openai_responses.stored import Run, StoredResponse, answer_of, beginning_of, encoded
from raydix.engine.api.responses import Json
from raydix.engine.api.resuming import Origin

ITEM: Json = {"type": "message", "id": "i", "content": "one\ntwo"}
ITEMS = b"\n".join(lines_of({"i": orjson.dumps(ITEM)}))
MESSAGES = [{"role": "user", "content": "one\ntwo"}]


def test_the_object_of_the_api_is_not_read() -> None:
    response = b"\n{not read\n"
    stored = StoredResponse(response, "resp_a", ITEMS, orjson.dumps(MESSAGES), answer_of("three\n", (1, 2)))
    assert StoredResponse.decode(encoded(stored)) == stored
    assert stored.input_items() == {"i": orjson.dumps(ITEM)}
    assert stored.turns() == (MESSAGES, "three\n", (1, 2))


def test_a_response_under_way_has_all_that_is_needed_to_generate_it_again() -> None:
    run = Run(b'{"input": "a\nb"}\n', "s", True, Origin("u", 1, 2, "fp_1"))
    stored = StoredResponse(b"{}", None, ITEMS, b"[]", in_background=True, state="under_way", run=run)
    for revision in (b"\n" * 16, b"{" * 16):
        data = encoded(stored, revision)
        assert data.startswith(beginning_of(revision)) and StoredResponse.decode(data) == stored
    ended = replace(stored, state="cancelled", run=None)
    assert StoredResponse.decode(encoded(ended)) == ended


def test_a_response_that_an_older_server_has_stored_is_found() -> None:
    response = {"id": "resp_b", "previous_response_id": "resp_a", "output": ["a\nb"]}
    own = {"items": [ITEM], "messages": MESSAGES, "text": "three", "token_ids": (1, 2)}
    whole = orjson.dumps({"response": response, **own})
    apart = orjson.dumps({"previous": "resp_a", **own}) + b"\n" + orjson.dumps(response)
    for data in (whole, apart):
        found = StoredResponse.decode(data)
        assert orjson.loads(found.response) == response
        assert (found.previous, found.input_items()) == ("resp_a", {"i": orjson.dumps(ITEM)})
        assert found.turns() == (MESSAGES, "three", (1, 2))
