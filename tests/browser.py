"""A headless Chromium, driven by its debugging protocol: pages are opened, and JavaScript is evaluated in them."""

import asyncio
import base64
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_S = 60
REPLY_S = 60
"""Seconds for a call of the protocol; a promise in the page that never resolves ends with it."""
STOP_S = 10
NO_CHROMIUM = "no Chromium on this machine"
AXE = Path(__file__).parents[1] / ".venv-page/node_modules/axe-core/axe.min.js"
"""Where `make develop` puts it."""


def executable() -> str | None:
    """Path of a Chromium; None without one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def axe() -> str | None:
    """The program that looks for obstacles to people with disabilities; None where it is not installed."""
    named = os.environ.get("RAYDIX_AXE")
    file = Path(named) if named else AXE
    return file.read_text() if file.is_file() else None


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []
        """Uncaught errors, errors written to the console, and breaches of the content security policy."""

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result. Raises TimeoutError."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=REPLY_S)
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")

    async def open(self, url: str) -> None:
        """Go to an address, and return when the document has been loaded."""
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && document.querySelector('main') !== null")

    async def do(self, script: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        result = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, condition: str, timeout_s: float = 60) -> None:
        """Wait until an expression is true. Raises TimeoutError with what the page shows."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.do(f"Boolean({condition})"):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            shown = await self.do("document.body.innerText")
            raise TimeoutError(f"never true: {condition}; the page shows {shown!r}, {self.complaints}") from None

    async def write(self, selector: str, text: str) -> None:
        """Give an input the focus, and type a text into it."""
        await self.do(f"document.querySelector({selector!r}).focus()")
        await self.send("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """Press a key that has a name."""
        code = {"Enter": 13, "ArrowRight": 39, "Escape": 27}[key]
        text = {"text": "\r"} if key == "Enter" else {}  # without it a form is not submitted
        for kind, more in (("keyDown", text), ("keyUp", {})):
            await self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    async def resize(self, width: int, height: int, *, scheme: str = "light") -> None:
        """Take a size in CSS pixels and a colour scheme."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def picture(self, path: Path) -> None:
        """Write what is seen as a PNG."""
        shot = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def browser() -> AsyncGenerator[Page]:
    """A page of a Chromium of its own, which ends with the block."""
    program = executable()
    assert program is not None, NO_CHROMIUM
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [
                program,
                "--headless=new",
                "--no-sandbox",  # the tests may run as root, where there is none
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--remote-debugging-port=0",
                f"--user-data-dir={folder}",
                "about:blank",
            ],
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(folder) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                    [address] = [
                        each["webSocketDebuggerUrl"] for each in await response.json() if each["type"] == "page"
                    ]
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Log"):
                        await page.send(f"{domain}.enable")
                    yield page
        finally:
            process.terminate()
            try:
                process.wait(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _port(file: Path) -> int:
    async with asyncio.timeout(START_S):
        while True:
            if file.exists() and (lines := file.read_text().split()):
                return int(lines[0])
            await asyncio.sleep(0.05)
