"""The page in a real browser, with the real application in front of a directory whose state the test makes: what no
single process has, such as workers that hand KV over and one that is killed, and obstacles to people with disabilities.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.manager.cache_report import cache_report
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.manager.placement import CostModel
from raydix.engine.core.types import AdmitRequest, CacheHints, EvictionReason, Role
from tests.browser import NO_CHROMIUM, Page, axe, browser, executable
from tests.skips import NO_AXE
from tests.unit.conftest import served
from tests.unit.ingress import FakeLink, Memory, Replica, Served, body_of, call
from tests.unit.served_app import app
from tests.unit.waits import WAIT_S

__all__ = ["served"]

VIEWS = {
    "chat": "raydix-chat textarea",
    "requests": ".requests tbody tr",
    "cluster": ".card",
    "prefixes": ".icicle .cell",
    "doctor": ".finding .two",
    "savings": ".tile",
}
"""What each view shows once it has been drawn with figures."""
POLICY = "You help the people of a harbour with their letters, kindly and in short words, and never with numbers. " * 3
TEXT = "document.querySelector('main').textContent"
OBSTACLES = """axe.run(document, {resultTypes: ['violations']}).then(({violations}) => violations.map(
    each => `${each.id}: ${each.nodes.map(node => node.html).join(' ')}`))"""

pytestmark = pytest.mark.skipif(executable() is None, reason=NO_CHROMIUM)


class Cluster:
    """A directory with one prefill and one decode worker, and what its manager answers."""

    def __init__(self) -> None:
        self.directory = Directory(CostModel(block_size=4, piggyback_tokens=0), 10_000, 0)
        self.num_resets = 0
        for worker_id, role in (("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE)):
            self.directory.register(worker_id, role, 1, 10, ())
            self.directory.fleet.measured(worker_id, 1, WorkerCosts(step_s=0.01), 64)
        for number in range(2):
            self._ask(f"r{number}")

    def _ask(self, name: str) -> None:
        hashes, preview = (b"a1", b"a2"), (*b"Dear harbour",)
        hints = CacheHints("anonymous")
        admission, _ = self.directory.admit(AdmitRequest(name, 0, hashes, 10, cache=hints, preview=preview), 0.0)
        self.directory.blocks_changed(admission.prefill, 1, hashes, ())
        self.directory.end_request(name, 0.0)

    def link(self) -> FakeLink:
        """A link to this manager."""
        cluster, link = self, FakeLink()

        class Manager(Memory):
            async def cache_report(self, tenant: str, is_admin: bool) -> Any:
                return cache_report(cluster.directory, tenant, is_admin)

            async def reset_cache(self) -> dict[str, int]:
                cluster.num_resets += 1
                return {"store_blocks": 0, "pool_blocks": 2}

        link.memory = Manager
        return link


def in_browser(
    served: Served, cluster: Cluster, steps: Callable[[Page], Awaitable[None]], **observability: object
) -> None:
    """Serve the application on a port of this machine, and take the steps on its page."""
    replica = Replica(manager=cluster.link(), max_model_len=4096)

    async def run() -> None:
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            assert not serving.done(), "it could not begin"
            await asyncio.sleep(0.01)
        [port] = {socket.getsockname()[1] for each in server.servers for socket in each.sockets}
        async with browser() as page:
            await page.resize(1280, 800)
            await page.open(f"http://127.0.0.1:{port}/")
            await steps(page)
            assert page.complaints == []
        server.should_exit = True
        await serving

    served(replica, run, observability=observability)


async def show(page: Page, view: str) -> None:
    await page.do(f"location.hash = '{view}'")
    await page.until(f"document.querySelector('main {VIEWS[view]}') !== null")


async def chat(text: str) -> None:
    """A chat whose system prompt begins with a date."""
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "hi"}]
    assert (await call(app, "POST", "/v1/chat/completions", body_of("chat", messages=messages))).status == 200


def test_kv_that_moves_is_seen_and_a_killed_worker_turns_grey(served: Served) -> None:
    cluster = Cluster()

    async def steps(page: Page) -> None:
        await show(page, "cluster")
        assert "KV between workers" not in await page.do(TEXT)
        # Again and again, so that each look finds another move, however late it comes.
        async with asyncio.timeout(WAIT_S):
            while not await page.do(f"document.querySelector('.moves li.now') !== null && {TEXT}.includes('just now')"):
                cluster.directory.stock.moves.add("prefill-0", "decode-0", 3, 30)
                await asyncio.sleep(0.05)
        # At a look at which nothing has moved it is told as past.
        await page.until("document.querySelector('.moves li') && !document.querySelector('.moves li.now')")
        assert await page.do("document.querySelectorAll('.card.gone').length") == 0

        cluster.directory.remove_worker("decode-0")
        await page.until("document.querySelector('.card.gone') !== null")
        assert "decode-0" in await page.do("document.querySelector('.card.gone h2').textContent")
        assert "gone" in await page.do("document.querySelector('.card.gone p').textContent")

    in_browser(served, cluster, steps)


def test_a_late_token_is_told_with_what_fell_into_its_wait(served: Served) -> None:
    row = {"id": "own", "arrived_at": 100.0, "moved_s": None, "preemptions": 0, "decode_workers": ["w"]}
    other = {"id": "long", "placed_s": 0.0, "first_token_s": 1.0, "prompt_tokens": 2048, "cached_tokens": 16}
    at_worker = other | {"prefill_workers": ["w"]}
    wait = {"ms": 500, "fromMs": 2000, "text": " Paris"}  # from 102 to 102.5

    async def steps(page: Page) -> None:
        async def told(row: dict[str, Any], *others: dict[str, Any]) -> str:
            module = "import(new URL('explain.js', document.querySelector('script[type=module]').src))"
            values = json.dumps([wait, row, [row | {"placed_s": 0.1, "prefill_workers": ["w"]}, *others]])
            text: str = await page.do(f"{module}.then(({{ longestWait }}) => longestWait(...{values}).textContent)")
            return text

        took = "The longest wait for a later token took 500 ms, before  Paris"
        assert await told(row, at_worker | {"arrived_at": 101.8}) == (
            f"{took}: the prompt of long (2,048 tokens, 16 cached) was computed at its worker."
        )
        # Before, behind, and elsewhere.
        none = (
            at_worker | {"arrived_at": 100.9},
            at_worker | {"arrived_at": 102.6},
            other | {"arrived_at": 101.8} | {"prefill_workers": ["v"]},
        )
        assert (await told(row, *none)).startswith(f"{took}. Nothing that you may see here fell into it")
        four = [at_worker | {"arrived_at": 102.0}] * 4
        assert (await told(row, *four)).endswith("; so were those of 1 other request.")
        moved = await told(row | {"moved_s": 2.2, "preemptions": 2})
        assert "it went on at another worker" in moved and "to make room (2 times in all)" in moved
        assert "another worker" not in await told(row | {"moved_s": 1.9, "preemptions": 1})

    in_browser(served, Cluster(), steps)


def test_evictions_have_a_rate_and_the_cache_can_be_reset(served: Served) -> None:
    cluster = Cluster()

    async def steps(page: Page) -> None:
        await show(page, "prefixes")
        cluster.directory.blocks_changed("prefill-0", 1, (), [(b"a2", EvictionReason.FULL)])
        await page.until(f"{TEXT}.includes('pool full 1, ') && /[1-9][0-9]* a minute/.test({TEXT})")
        reset = "document.querySelector('.reset:not([hidden]) button')"
        await page.do(f"{reset}.click()")
        await page.until("document.querySelector('dialog[open][aria-label^=Reset]') !== null")
        await page.press("Escape")
        await page.until("document.querySelector('dialog[open]') === null")
        assert cluster.num_resets == 0, "closed without an answer"
        await page.do(f"{reset}.click()")
        # What is drawn anew meanwhile leaves the question where it is.
        cluster.directory.blocks_changed("prefill-0", 1, (), [(b"a1", EvictionReason.FULL)])
        await page.until(f"{TEXT}.includes('pool full 2, ')")
        await page.do("document.querySelector('dialog[open] button.main').click()")
        await page.until(f"{TEXT}.includes('Forgotten: 2 blocks of pools')")
        assert cluster.num_resets == 1

    in_browser(served, cluster, steps)


def test_savings_are_shown_at_the_configured_price_or_the_readers(served: Served) -> None:
    async def steps(page: Page) -> None:
        await show(page, "savings")
        # 8 of 20 tokens came from the cache.
        await page.until(f"{TEXT}.includes('4.00at this price')")
        assert await page.do("document.querySelector('input[type=number]').placeholder") == "500000"
        await page.write("input[type=number]", "1000000")
        await page.until(f"{TEXT}.includes('8.00at this price')")
        await page.do("const box = document.querySelector('input[type=number]'); box.value = ''; box.oninput ?? 0")
        await page.do("document.querySelector('input[type=number]').dispatchEvent(new Event('input'))")
        await page.until(f"{TEXT}.includes('4.00at this price')")

    in_browser(served, Cluster(), steps, price_per_million_tokens=500_000)


def test_the_doctor_shows_what_to_change_and_both_texts(served: Served) -> None:
    async def steps(page: Page) -> None:
        await page.do("location.hash = 'doctor'")
        await page.until(f"{TEXT}.includes('Nothing to change')")
        for day in ("27", "28"):
            await chat(f"Today is the {day}. of November. {POLICY}")
        await page.do("location.hash = 'chat'")
        await page.do("location.hash = 'doctor'")
        await page.until("document.querySelectorAll('.finding mark').length === 2")
        marked = await page.do("[...document.querySelectorAll('.finding mark')].map(mark => mark.textContent).join()")
        assert marked == "7,8"
        shown = await page.do("document.querySelector('.finding').textContent")
        assert "move it behind everything that stays" in shown and "tokens a day" in shown

    in_browser(served, Cluster(), steps)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_view_has_an_obstacle(served: Served, scheme: str) -> None:
    program = axe()
    if program is None:
        pytest.skip(NO_AXE)
    cluster = Cluster()

    async def steps(page: Page) -> None:
        await page.resize(1280, 800, scheme=scheme)
        for day in ("27", "28"):
            await chat(f"Today is the {day}. of November. {POLICY}")
        await page.do(f"{program}; undefined")
        await page.do("document.body.append(document.createElement('img'))")
        assert any(each.startswith("image-alt:") for each in await page.do(OBSTACLES)), "one that is known"
        await page.do("document.querySelector('img').remove()")
        found: dict[str, Any] = {}
        for view in VIEWS:
            await show(page, view)
            found[view] = await page.do(OBSTACLES)
        await show(page, "cluster")
        cluster.directory.stock.moves.add("prefill-0", "decode-0", 3, 30)
        cluster.directory.remove_worker("decode-0")
        await page.until("document.querySelector('.card.gone') && document.querySelector('.moves li')")
        found["a worker that is gone"] = await page.do(OBSTACLES)
        await show(page, "requests")
        await page.do("document.querySelector('.requests tbody button').click()")
        await page.until("document.querySelector('dialog[open]') !== null")
        found["a request"] = await page.do(OBSTACLES)
        page.complaints.clear()  # about a 404: no worker of the directory computed the request
        assert {view: obstacles for view, obstacles in found.items() if obstacles} == {}

    in_browser(served, cluster, steps)
