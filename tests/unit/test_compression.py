"""Large bodies are compressed for clients that take gzip, and nothing else is."""

import asyncio
import gzip
import json
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from raydix.actors.ingress.middleware import BESIDE_BYTES, LEAST_BYTES, Compression, takes_gzip
from tests.unit.ingress import Replica, Served, call
from tests.unit.served_app import app

LARGE = json.dumps(["a text"] * LEAST_BYTES).encode()


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [
        ("gzip", True),
        ("br, GZIP;q=0.5", True),
        ("x-gzip", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000", False),
        ("", False),
        ("identity, br", False),
    ],
)
def test_who_takes_gzip(accepted: str, expected: bool) -> None:
    assert takes_gzip(accepted) is expected


def answer(parts: Sequence[bytes], accepted: str = "gzip", **headers: str) -> Any:
    """The reply of an application that sends these parts."""

    async def sending(scope: Scope, receive: Receive, send: Send) -> None:
        own = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": own})
        for number, part in enumerate(parts, start=1):
            await send({"type": "http.response.body", "body": part, "more_body": number < len(parts)})

    return asyncio.run(call(Compression(sending), "GET", "/", headers={"accept-encoding": accepted}))


@pytest.mark.parametrize(
    "parts", [[LARGE], [LARGE[:10], LARGE[10:], b""], [LARGE * 2, LARGE], [b"x" * BESIDE_BYTES]], ids=len
)
def test_large_bodies_whole_and_in_slices(parts: list[bytes]) -> None:
    reply = answer(parts, content_type="application/json", content_length=str(sum(map(len, parts))))
    assert reply.headers["content-encoding"] == "gzip" and reply.headers["vary"] == "accept-encoding"
    assert "content-length" not in reply.headers
    assert gzip.decompress(reply.body) == b"".join(parts) and len(reply.body) < 0.1 * len(b"".join(parts))


@pytest.mark.parametrize(
    ("num_bytes", "expected"), [(LEAST_BYTES - 1, None), (LEAST_BYTES, "gzip")], ids=["small", "large"]
)
def test_the_declared_length_decides_and_not_the_number_of_parts(num_bytes: int, expected: str | None) -> None:
    parts = [LARGE[:10], LARGE[10:num_bytes], b""]
    assert answer(parts, content_length=str(num_bytes)).headers.get("content-encoding") == expected


def test_several_parts_of_an_unknown_length_count_as_large() -> None:
    assert gzip.decompress(answer([b"a", b"b"]).body) == b"ab"


@pytest.mark.parametrize(
    ("parts", "headers", "varies"),
    [
        ([LARGE], {}, True),
        ([LARGE[:10], LARGE[10:]], {}, True),
        ([LARGE[: LEAST_BYTES - 1]], {}, False),
        ([LARGE], {"content_type": "text/event-stream"}, False),
    ],
    ids=["large", "in parts", "small", "events"],
)
@pytest.mark.parametrize("accepted", ["gzip", "identity"])
def test_caches_keep_both_forms_apart(parts: list[bytes], headers: dict[str, str], varies: bool, accepted: str) -> None:
    """Also the form that is not compressed says so, or a cache would give it to every client."""
    assert (answer(parts, accepted, **headers).headers.get("vary") == "accept-encoding") is varies


def test_the_forms_of_a_file_are_not_the_same_bytes_by_their_tags() -> None:
    assert answer([LARGE], etag='"a"').headers["etag"] == 'W/"a"'
    assert answer([LARGE], "identity", etag='"a"').headers["etag"] == '"a"'


@pytest.mark.parametrize(
    ("parts", "headers"),
    [
        ([LARGE], {"accepted": "identity"}),
        ([LARGE[: LEAST_BYTES - 1]], {}),
        ([b""], {}),
        ([b"data: a\n\n", b""], {"content_type": "text/event-stream; charset=utf-8"}),
        ([LARGE], {"content_encoding": "br"}),
        ([LARGE], {"content_range": "bytes 9-40000/50000"}),
    ],
    ids=["not asked for", "small", "empty", "events", "encoded", "a range"],
)
def test_what_stays_as_it_is(parts: list[bytes], headers: dict[str, str]) -> None:
    reply = answer(parts, **headers)
    assert reply.body == b"".join(parts) and reply.headers.get("content-encoding") != "gzip"


def test_the_description_of_the_api_is_compressed(served: Served) -> None:
    def get(**headers: str) -> Any:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return served(Replica(), lambda: call(app, "GET", "/openapi.json", headers=given))

    assert gzip.decompress(get(accept_encoding="gzip, deflate").body) == get().body
    small = served(Replica(), lambda: call(app, "GET", "/v1/models", headers={"accept-encoding": "gzip"}))
    assert small.json["data"]
