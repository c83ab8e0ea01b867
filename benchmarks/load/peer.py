"""A trivial streaming server, to measure the load generator's own limit.

`python -m benchmarks.load.peer --port 8900`, then point `benchmarks.serve` at this server: the report shows the ceiling
of generator and loopback together, since this peer computes nothing. All running streams get one event per step, as
from an engine; a stream whose client reads too slowly is skipped, so the slower side sets the pace. The server speaks
just enough HTTP/1.1 for the measurement (one request at a time per connection, Content-Length bodies) and is no server
for any other use. It binds the loopback interface only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from typing import cast

import orjson

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = b'{"object":"list","data":[{"id":"peer","object":"model"}]}'


def chunk(payload: bytes) -> bytes:
    """`payload` as one piece of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(payload), payload)


def event(choice: dict[str, object], **more: object) -> bytes:
    """One event of about the size a completion's token has."""
    common = {"id": "cmpl-0123456789abcdef01234567", "created": 1700000000, "model": "peer"}
    return b"data: " + orjson.dumps(common | {"choices": [choice] if choice else []} | more) + b"\n\n"


COMPLETION = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None}
CHAT = {"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}


class Connection(asyncio.Protocol):
    """One client: buffers a request, and while streaming owes `left` more tokens."""

    def __init__(self, running: set[Connection], wake: asyncio.Event, tokens_per_write: int) -> None:
        self.running = running
        self.wake = wake
        self.tokens_per_write = tokens_per_write
        self.buffer = b""
        self.left = 0
        self.paused = False
        self.last = b""
        self.piece = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.running.discard(self)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        if len(body) < length:
            return
        self.buffer = b""
        if lines[0].startswith(b"get"):
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(MODELS), MODELS))
        else:
            self.begin(orjson.loads(body))

    def begin(self, request: dict[str, object]) -> None:
        """Start a stream of `max_tokens` events; the usage counts a prompt given as ids exactly."""
        prompt = request.get("prompt")
        self.left = total = int(str(request.get("max_tokens", 16)))
        self.piece = event(COMPLETION if prompt is not None else CHAT)
        prompt_tokens = len(prompt) if isinstance(prompt, list) else 0
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": total, "total_tokens": prompt_tokens + total}
        self.last = chunk(event({}, usage=usage)) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self.transport.write(HEAD)
        self.running.add(self)
        self.wake.set()

    def step(self) -> bool:
        """Send the events of one engine step; False when nothing could be sent."""
        if self.paused:
            return False
        count = min(self.left, self.tokens_per_write)
        self.left -= count
        data = chunk(self.piece * count)
        if not self.left:
            self.running.discard(self)
            data += self.last
        self.transport.write(data)
        return True


async def play(running: set[Connection], wake: asyncio.Event, step_s: float) -> None:
    """Give every running stream one event per step; with `step_s` 0, as fast as clients read."""
    while True:
        wake.clear()
        if not running:
            await wake.wait()
        moved = [connection.step() for connection in tuple(running)]
        await asyncio.sleep(step_s if any(moved) else 0.0005)


async def serve(port: int, step_s: float, tokens_per_write: int) -> None:
    """Listen on the loopback interface until cancelled."""
    running: set[Connection] = set()
    wake = asyncio.Event()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(running, wake, tokens_per_write), "127.0.0.1", port)
    async with server:
        print(f"peer on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await play(running, wake, step_s)


def main() -> None:
    """Command line of the peer."""
    parser = argparse.ArgumentParser(description="trivial streaming server to measure the load generator against")
    parser.add_argument("--port", type=int, default=8900)
    parser.add_argument("--step-ms", type=float, default=0.0, help="time between the tokens of a stream")
    parser.add_argument("--tokens-per-write", type=int, default=1, help="events sent in one write")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        import uvloop

        uvloop.run(serve(arguments.port, arguments.step_ms / 1000, arguments.tokens_per_write))


if __name__ == "__main__":
    main()
