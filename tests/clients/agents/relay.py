"""A relay between an agent and the server, which notes the outcome and the usage of each request."""

import http.client
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any
from urllib.parse import urlsplit

NOT_PASSED_ON = ("host", "content-length", "connection", "accept-encoding", "transfer-encoding")
_ID = re.compile(r'"id":\s*"((?:chatcmpl|resp|msg)[-_]\w+)"')
_COUNTS = re.compile(r'"(input_tokens|prompt_tokens|cached_tokens|cache_\w+_input_tokens)":\s*(\d+)')


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request of an agent, and its answer."""

    path: str
    status: int
    request: bytes
    answer: bytes

    @property
    def is_refused(self) -> bool:
        """True for a refused request of the API. Claude Code looks whether there is a page at `/`, too."""
        return self.status >= 400 and self.path.startswith("/v1")

    @property
    def has_tools(self) -> bool:
        """True for a turn of the agent's own conversation; a request for a title offers no tools."""
        try:
            body: Any = json.loads(self.request)
        except ValueError:
            return False
        return bool(isinstance(body, dict) and body.get("tools"))

    @property
    def answer_id(self) -> str:
        """The id of the answer, by which `explain` knows the request; empty where there is none."""
        found = _ID.search(self.answer.decode(errors="replace"))
        return found[1] if found else ""

    @property
    def usage(self) -> tuple[int, int]:
        """Tokens of the prompt, and those of them that were found in the cache."""
        counts: dict[str, int] = {}
        for name, count in _COUNTS.findall(self.answer.decode(errors="replace")):
            counts[name] = max(counts.get(name, 0), int(count))
        read, written = counts.get("cache_read_input_tokens"), counts.get("cache_creation_input_tokens", 0)
        if read is not None:
            return counts.get("input_tokens", 0) + read + written, read
        return counts.get("input_tokens", counts.get("prompt_tokens", 0)), counts.get("cached_tokens", 0)


class Relay:
    """Passes requests on to `target`, an address; `exchanges` are those that have ended, in order."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self._lock = Lock()
        self.exchanges: list[Exchange] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        relay = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                relay._pass_on(self)

            do_POST = do_GET
            do_HEAD = do_GET
            do_DELETE = do_GET

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        return Handler

    def _pass_on(self, asked: BaseHTTPRequestHandler) -> None:
        """Pass a request on, and its answer back as it comes."""
        request = asked.rfile.read(int(asked.headers.get("content-length") or 0))
        kept = {name: value for name, value in asked.headers.items() if name.lower() not in NOT_PASSED_ON}
        connection = http.client.HTTPConnection(str(self._target.hostname), self._target.port, timeout=120)
        connection.request(asked.command, asked.path, request or None, kept)
        reply = connection.getresponse()
        asked.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in NOT_PASSED_ON:
                asked.send_header(name, value)
        asked.send_header("Connection", "close")
        asked.end_headers()
        answer = b""
        while data := reply.read1(65_536):
            answer += data
            asked.wfile.write(data)
            asked.wfile.flush()
        connection.close()
        asked.close_connection = True
        with self._lock:
            self.exchanges.append(Exchange(asked.path, reply.status, request, answer))
