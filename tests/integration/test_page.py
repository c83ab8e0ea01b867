"""The page at `/` in a real browser, on a server with tenants: each view, and what a tenant must not see."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from raydix.engine.core.tenants import key_hash
from tests.browser import NO_CHROMIUM, Page, browser, executable
from tests.integration.conftest import WAIT_S, Server
from tests.integration.local import Process, require_default_model

VIEWS = ("chat", "requests", "cluster", "prefixes", "doctor", "savings")
TENANTS = f"""
cache: {{num_blocks: 400}}
model: {{max_model_len: 2048}}
tenants:
  - {{name: alice, admin: true, key_hashes: [{key_hash("rdx-alice")}]}}
  - {{name: bob, key_hashes: [{key_hash("rdx-bob")}]}}
"""
# What a view shows once it has been drawn with figures, and not only begun.
DRAWN = {
    "chat": "raydix-chat textarea",
    "requests": ".requests tbody tr",
    "cluster": ".card",
    "prefixes": ".icicle .cell",
    "doctor": "raydix-doctor .facts",
    "savings": ".tile",
}
SENDS = "document.querySelector('.composer button.main').textContent === 'Send'"
BLOCK = 16
REFUSALS = """window.refusals = 0; window.asked = window.fetch; window.fetch = async (...all) => {
    const reply = await asked(...all);
    window.refusals += reply.status === 401;
    return reply;
}"""
NUM_MESSAGES = "document.querySelector('raydix-chat').messages.length"
SECRET = "The password of the vault is marzipan, and nobody else may ever read it here. "
ANSWERED = """[...document.querySelectorAll('.assistant .facts')].map(facts => facts.textContent)
    .filter(text => text.includes('cached')).length >= """


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    if executable() is None:
        pytest.skip(NO_CHROMIUM)
    require_default_model()
    folder = tmp_path_factory.mktemp("page")
    config = folder / "tenants.yaml"
    config.write_text(TENANTS + f"batches: {{folder: {folder / 'batches'}}}\n")
    running = Process("--config", str(config))
    try:
        running.until("ready after")
        yield running
    finally:
        running.end()


def in_browser(local: Process, key: str, steps: Callable[[Page], Awaitable[None]]) -> None:
    """Open the page with a key, take the steps, and see that the browser had nothing to complain about."""

    async def run() -> None:
        async with browser() as page:
            await page.resize(1280, 800)
            await page.open(f"http://127.0.0.1:{local.port}/")
            await page.until("document.querySelector('dialog[open] input[name=key]') !== null")
            await page.write("dialog[open] input[name=key]", key)
            page.complaints.clear()  # about the 401 that asked for the key
            await page.press("Enter")
            await page.until("document.querySelector('.model')?.textContent")
            await steps(page)
            assert page.complaints == []

    asyncio.run(run())


async def ask(page: Page, text: str, number: int) -> None:
    """Send a message, and wait for the end of the answer with this number, and for its explanation."""
    await page.write("textarea[name=message]", text)
    await page.press("Enter")
    await page.until(ANSWERED + str(number))
    await page.until("document.querySelector('.composer button.main').textContent === 'Send'")
    await page.until(f"document.querySelectorAll('.assistant').length === {number}")
    await page.until("document.querySelector('.side .strip') !== null")


async def show(page: Page, view: str) -> None:
    await page.do(f"location.hash = '{view}'")
    await page.until(f"document.querySelector('main raydix-{view}')?.firstChild")


def test_a_chat_is_explained_beside_it(local: Process) -> None:
    async def steps(page: Page) -> None:
        await ask(page, "Tell me about the rivers of Europe, and about the cities on their banks.", 1)
        first = await page.do("document.querySelector('.side').textContent")
        assert "Why not cached" in first and "computed: new" in first

        await page.do("[...document.querySelectorAll('.assistant button')].at(-2).click()")  # the same prompt again
        await page.until("document.querySelector('.side').textContent.includes('cached here')")
        assert await page.do("document.querySelectorAll('.side .strip rect.local').length") > 0

        await page.do("document.querySelector('.side .strip').focus()")
        await page.press("ArrowRight")
        await page.until("document.querySelector('.block-text q')?.textContent.includes('You are a helpful')")

        await page.do("document.querySelector('.assistant > .text').focus()")
        await page.press("ArrowRight")
        assert await page.do("document.querySelectorAll('.tip:not([hidden]) tr').length") >= 5
        tip = await page.do("document.querySelector('.tip').textContent")
        assert "%" in tip and "after the question" in tip
        await page.press("ArrowRight")
        assert "the one before" in await page.do("document.querySelector('.tip').textContent")

    in_browser(local, "rdx-alice", steps)


def test_an_answer_can_be_stopped(local: Process) -> None:
    async def steps(page: Page) -> None:
        await page.write("textarea[name=message]", "Count from one to a thousand, in words.")
        await page.press("Enter")
        await page.until("document.querySelectorAll('.assistant .token').length > 3")
        await page.do("document.querySelector('.composer button.main').click()")
        await page.until("document.querySelector('.composer button.main').textContent === 'Send'")
        await show(page, "requests")
        await page.until("document.querySelector('.requests tbody tr .state')?.textContent === 'aborted'")

    in_browser(local, "rdx-alice", steps)


def test_each_view_shows_what_happened_and_fits_a_telephone(local: Process) -> None:
    async def steps(page: Page) -> None:
        await ask(page, "Which of the planets has rings, and what are the rings made of?", 1)
        await show(page, "requests")
        await page.until("document.querySelectorAll('.requests tbody tr').length > 0")
        await page.do("document.querySelector('.requests tbody button').click()")
        await page.until(
            "document.querySelector('dialog[open] .strip') && document.querySelector('dialog[open] .timeline')"
        )
        await page.do("document.querySelector('dialog[open] button.main').click()")

        await show(page, "cluster")
        await page.until("document.querySelector('main').textContent.includes('of 400')")
        await show(page, "prefixes")
        await page.until("document.querySelectorAll('.icicle .cell').length > 0")
        await show(page, "savings")
        await page.until("document.querySelectorAll('.tile').length >= 3")

        for scheme in ("light", "dark"):
            await page.resize(360, 740, scheme=scheme)
            for view in VIEWS:
                await show(page, view)
                await page.until(f"document.querySelector('main {DRAWN[view]}') !== null")
                assert await page.do("document.documentElement.scrollWidth") <= 360, view

    in_browser(local, "rdx-alice", steps)


def test_a_request_under_way_is_pushed_to_the_table(local: Process) -> None:
    async def steps(page: Page) -> None:
        await show(page, "requests")
        body = {"prompt": "One, two, three,", "max_tokens": 600, "ignore_eos": True, "temperature": 1}
        server = Server("127.0.0.1", local.port, "rdx-alice")
        call = asyncio.to_thread(server.request, "POST", "/v1/completions", body)
        asked = asyncio.create_task(call)
        await page.until("document.querySelector('.requests tbody tr .state.decoding') !== null")
        await asked
        await page.until("document.querySelector('.requests tbody tr .state')?.textContent === 'length'")

    in_browser(local, "rdx-alice", steps)


def test_a_tenant_sees_nothing_of_another_one(local: Process) -> None:
    alice = Server("127.0.0.1", local.port, "rdx-alice")
    status, _, body = alice.request("POST", "/v1/completions", {"prompt": SECRET * 3, "max_tokens": 4}, timeout=WAIT_S)
    assert status == 200
    name = json.loads(body)["id"]

    async def steps(page: Page) -> None:
        await ask(page, "What is the capital of Italy?", 1)
        seen: list[Any] = []
        for view in VIEWS:
            await show(page, view)
            drawn = ".note" if view == "cluster" else DRAWN[view]
            await page.until(f"document.querySelector('main {drawn}') !== null")
            seen.append(await page.do("document.querySelector('main').textContent"))
        await show(page, "requests")
        await page.until("document.querySelectorAll('.requests tbody tr').length > 0")
        seen.append(await page.do("document.querySelector('main').innerHTML"))
        assert not [text for text in seen if "marzipan" in text or "alice" in text or name in text]
        assert "administrators" in seen[VIEWS.index("cluster")]

    in_browser(local, "rdx-bob", steps)


def test_texts_are_never_markup(local: Process) -> None:
    markup = "<img src=x onerror='document.title=1'><script>document.title = 2</script>"

    async def steps(page: Page) -> None:
        await ask(page, markup + " Repeat the markup before this sentence, and write nothing else beside it.", 1)
        assert "<script>" in await page.do("document.querySelector('.user .text').textContent")
        read = await texts_of_blocks(page)
        assert "<script>" in read
        for view in VIEWS:
            await show(page, view)
            drawn = ".note" if view == "cluster" else DRAWN[view]
            await page.until(f"document.querySelector('main {drawn}') !== null")
            assert await page.do("document.querySelectorAll('raydix-app img, raydix-app script').length") == 0
        assert await page.do("document.title") == "Savings – raydix"

    in_browser(local, "rdx-bob", steps)


async def texts_of_blocks(page: Page) -> str:
    """The text of all blocks of the last prompt, as the arrow keys show them."""
    total = await page.do("Number(document.querySelector('.side .strip').ariaLabel.match(/of ([0-9]+) token/)[1])")
    await page.do("document.querySelector('.side .strip').focus()")
    texts = []
    for block in range(total // BLOCK):
        await page.press("ArrowRight")
        await page.until(f"document.querySelector('.block-text b')?.textContent === 'Block {block}: '")
        texts.append(await page.do("document.querySelector('.block-text q').textContent"))
    return "".join(texts)


def test_texts_of_blocks_are_those_of_the_prompt(local: Process) -> None:
    async def steps(page: Page) -> None:
        await ask(page, "Grüße aus Köln, Москва и 東京. " * 4, 1)
        read = await texts_of_blocks(page)
        assert "Grüße aus Köln" in read and "Москва" in read and "東京" in read

    in_browser(local, "rdx-bob", steps)


def test_an_answer_that_is_begun_anew_is_the_only_one(local: Process) -> None:
    async def steps(page: Page) -> None:
        await page.write("textarea[name=message]", "Count from one to a thousand, in words.")
        await page.press("Enter")
        await page.until("document.querySelectorAll('.assistant .token').length > 3")
        await page.do("document.querySelector('.assistant').dataset.old = 'yes'")
        await page.do("document.querySelector('.assistant .row button').click()")  # regenerate, while it comes
        await page.until("document.querySelectorAll('.assistant:not([data-old]) .token').length > 3")
        assert await page.do("document.querySelectorAll('.assistant').length") == 1
        assert await page.do(f"{NUM_MESSAGES} === 1 && !({SENDS})")
        await page.do("document.querySelector('.composer button.main').click()")
        await page.until(SENDS)
        assert await page.do("document.querySelector('.assistant .facts').textContent") == "stopped"
        assert await page.do(NUM_MESSAGES) == 2

    in_browser(local, "rdx-bob", steps)


def test_an_answer_that_failed_is_no_part_of_the_conversation(local: Process) -> None:
    async def steps(page: Page) -> None:
        await page.do("document.querySelector('textarea[name=tools]').value = 'no list of tools'")
        await page.write("textarea[name=message]", "What is the capital of Norway?")
        await page.press("Enter")
        await page.until("document.querySelector('.assistant .error') !== null")
        await page.until(SENDS)
        assert await page.do(NUM_MESSAGES) == 1
        page.complaints.clear()  # about the 400
        await page.do("document.querySelector('textarea[name=tools]').value = ''")
        await page.do("document.querySelector('.assistant .row button').click()")
        await page.until(f"{NUM_MESSAGES} === 2 && document.querySelector('.side .strip') !== null")
        assert await page.do("document.querySelectorAll('.assistant').length") == 1

    in_browser(local, "rdx-bob", steps)


def test_a_key_that_is_refused_is_said_and_the_dialog_can_be_closed(local: Process) -> None:
    async def run() -> None:
        async with browser() as page:
            await page.open(f"http://127.0.0.1:{local.port}/#constructor")  # no view of this name: the chat
            await page.until("document.querySelector('dialog[open] input[name=key]') !== null")
            assert "asks for a key" in await page.do("document.querySelector('dialog[open]').textContent")
            assert await page.do("document.querySelector('main raydix-chat') !== null")
            await page.write("dialog[open] input[name=key]", "schlüssel")  # which no header takes
            await page.press("Enter")
            assert await page.do("document.querySelector('dialog[open] input:invalid') !== null")
            await page.do("document.querySelector('dialog[open] input').value = ''")
            await page.write("dialog[open] input[name=key]", "rdx-nobody")
            await page.press("Enter")
            await page.until("document.querySelector('dialog[open]')?.textContent.includes('refused this key')")
            await page.press("Escape")
            await page.until("document.querySelector('dialog[open]') === null")
            # The view asks every 2 s; after the second refusal the dialog is still closed.
            await page.do(REFUSALS)
            await page.do("location.hash = 'cluster'")
            await page.until("window.refusals >= 3")
            assert await page.do("document.querySelector('dialog[open]') === null")
            await page.do("document.querySelector('nav a').click()")
            await page.do("location.hash = 'savings'")
            await page.until("document.querySelector('dialog[open]') !== null")

    asyncio.run(run())
