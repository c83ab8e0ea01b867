"""The benchmark of two tenants, against a server that answers each of them at once."""

import asyncio
import json

import pytest
from aiohttp import web

from benchmarks.tenants import TenantClient, TenantLoad, figures, put


class AnyServer:
    """Streams one token to each request, and keeps the keys and salts that it was asked with."""

    def __init__(self, usage: dict[str, int], refuses: str = "") -> None:
        """`refuses`: requests with this key get 429."""
        self.usage, self.refuses = usage, refuses
        self.keys: list[str] = []
        self.salts: set[str] = set()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.keys.append(request.headers["Authorization"].removeprefix("Bearer "))
        if self.keys[-1] == self.refuses:
            return web.json_response({"error": {}}, status=429)
        self.salts.add((await request.json())["cache_salt"])
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in ({"choices": [{"text": "a"}]}, {"choices": [], "usage": self.usage}):
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        return response


async def loaded(server: AnyServer, num_heavy: int) -> TenantLoad:
    """A load of three seconds on the server."""
    application = web.Application()
    application.add_routes([web.get("/v1/models", server.models), web.post("/v1/completions", server.complete)])
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with TenantClient(url, "heavy") as heavy, TenantClient(url, "light") as light:
            return await put(heavy, light, num_heavy, seconds=3.0)
    finally:
        await runner.cleanup()


def test_both_tenants_ask_with_their_own_keys() -> None:
    server = AnyServer({"total_tokens": 7})
    load = asyncio.run(loaded(server, 3))
    assert len(load.first_token_ms) == server.keys.count("light") > 0 and min(load.first_token_ms) > 0
    assert server.keys.count("heavy") > 3, "each flooding request is followed by the next"
    assert load.num_tokens > 0 and load.num_tokens % 7 == 0
    assert len(server.salts) == len(server.keys), "no request finds another one's prompt in the cache"


@pytest.mark.parametrize("refused", ["heavy", "light"])
def test_a_refused_request_ends_the_benchmark(refused: str) -> None:
    with pytest.raises((RuntimeError, ExceptionGroup)) as raised:
        asyncio.run(loaded(AnyServer({"total_tokens": 7}, refuses=refused), 2))
    assert "429" in repr(raised.value)


def test_the_figures_of_all_rounds() -> None:
    runs = [TenantLoad([10.0, 20.0], 300), TenantLoad([30.0, 1000.0], 500), TenantLoad([40.0], 100)]
    assert figures(runs, 10.0) == {
        "light_requests": 5,
        "light_first_token_p50_ms": 30.0,
        "light_first_token_p90_ms": 616.0,
        "tokens_per_s": 30.0,
    }
