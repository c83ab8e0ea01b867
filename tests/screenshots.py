"""Pictures of the page's views for the documentation: `python -m tests.screenshots` starts a server with the default
model, gives it some traffic, and writes the pictures."""

import asyncio
import subprocess
import sys
import time
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp

from raydix.cli.cluster import free_port
from tests.browser import NO_CHROMIUM, Page, browser, executable

FOLDER = Path(__file__).parents[1] / "docs/guides/images"
START_S = 300
WIDTH = 1150
SYSTEM = (
    "You are the help desk of a public library. Opening hours: Monday to Friday from 9 to 19, Saturday from 10 to 14. "
    "Books are lent for four weeks, films for one week; each loan can be extended twice, unless somebody waits for it. "
    "Late fees are 20 cents a day for each item. Answer in one or two short sentences."
)
QUESTIONS = ("When are you open on Saturday?", "How long may I keep a film?", "What does it cost to be late?")


async def ask(client: aiohttp.ClientSession, system: str, question: str) -> None:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 40, "temperature": 0}
    async with client.post("/v1/chat/completions", json=body) as response:
        response.raise_for_status()


async def traffic(url: str) -> None:
    """Requests of three applications, two at a time."""
    systems = (SYSTEM, "Translate into French: ", "You write commit messages of one line for the change that you get. ")
    async with aiohttp.ClientSession(url) as client:
        for question in QUESTIONS:
            await asyncio.gather(*(ask(client, system * 3, question) for system in systems))


async def dated_traffic(url: str) -> None:
    """Requests of an application that puts the time before everything else, which costs it its hits."""
    async with aiohttp.ClientSession(url) as client:
        for minute, question in enumerate(QUESTIONS):
            await ask(client, f"It is 14:{10 + minute} on Saturday, 28 November 2026. {SYSTEM}", question)


async def chat(page: Page) -> None:
    """A chat of two turns."""
    await page.do("[...document.querySelectorAll('.composer button')].at(-1).click()")
    await page.write("dialog[open] textarea[name=system]", SYSTEM)
    await page.do("document.querySelector('dialog[open] button.main').click()")
    for number, question in enumerate(QUESTIONS[:2], start=1):
        await page.write("textarea[name=message]", question)
        await page.press("Enter")
        await page.until(f"document.querySelectorAll('.assistant').length === {number}")
        await page.until("document.querySelector('.composer button.main').textContent === 'Send'")
        await page.until("[...document.querySelectorAll('.assistant:last-child button')].length === 2")
        await page.until("!!document.querySelector('.side .strip')")


async def pictures(url: str) -> None:
    """Write a picture of each view, while requests run."""
    async with browser() as page:
        await page.resize(WIDTH, 700)
        await page.open(url)
        await page.until("document.querySelector('.model')?.textContent")
        await chat(page)
        await page.picture(FOLDER / "page_chat.png")
        await traffic(url)
        await dated_traffic(url)
        load: list[asyncio.Task[Any]] = [asyncio.create_task(traffic(url))]
        for view, height, shown in (
            ("cluster", 320, "document.querySelectorAll('.card').length >= 3"),
            ("requests", 640, "document.querySelectorAll('.requests tbody tr').length > 3"),
            ("prefixes", 560, "document.querySelectorAll('.cell').length > 2"),
            ("doctor", 380, "document.querySelectorAll('.finding mark').length >= 2"),
            ("savings", 320, "document.querySelectorAll('.tile').length >= 3"),
        ):
            await page.resize(WIDTH, height)
            await page.do(f"location.hash = '{view}'")
            await page.until(shown)
            if view == "requests":
                await page.do("[...document.querySelectorAll('tr.ended button')][0].click()")
                await page.until("document.querySelector('dialog[open] .timeline')")
            await page.picture(FOLDER / f"page_{view}.png")
            if view == "requests":
                await page.do("document.querySelector('dialog[open] button.main').click()")
        await asyncio.gather(*load)


def main() -> None:
    if executable() is None:
        raise SystemExit(f"{NO_CHROMIUM}: apt-get install chromium")
    FOLDER.mkdir(exist_ok=True)
    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "raydix", "serve", "--local", "--port", str(port)])
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while not _is_ready(url):
            if time.monotonic() > deadline or server.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.2)
        asyncio.run(pictures(url))
    finally:
        server.terminate()
        server.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            return bool(response.status == HTTPStatus.OK)
    except OSError:
        return False


if __name__ == "__main__":
    main()
