"""Stored responses as bytes: the object of the API is kept and given back unread."""

import orjson

from raydix.engine.api.openai_responses.stored import StoredResponse, encoded
from raydix.engine.api.responses import Json

ITEMS: tuple[Json, ...] = ({"type": "message", "id": "i", "content": "one\ntwo"},)
MESSAGES = ({"role": "user", "content": "one\ntwo"},)


def test_the_object_of_the_api_is_not_read() -> None:
    response = b"\n{not read\n"
    data = encoded(response, previous="resp_a", items=ITEMS, messages=MESSAGES, text="three\n", token_ids=(1, 2))
    assert StoredResponse.decode(data) == StoredResponse(response, "resp_a", ITEMS, MESSAGES, "three\n", (1, 2))


def test_a_response_that_an_older_server_has_stored_is_found() -> None:
    response = {"id": "resp_b", "previous_response_id": "resp_a", "output": ["a\nb"]}
    own = {"items": ITEMS, "messages": MESSAGES, "text": "three", "token_ids": (1, 2)}
    found = StoredResponse.decode(orjson.dumps({"response": response, **own}))
    assert orjson.loads(found.response) == response
    assert (found.previous, found.items, found.text) == ("resp_a", ITEMS, "three")
