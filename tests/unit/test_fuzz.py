"""Findings of `make fuzz` after its requests: held blocks, requests, lost workers, tracebacks."""

import http.server
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz import State, main, remains, settled, sizes_of, state_of, tracebacks

IDLE = State({"decode": 90, "prefill": 100}, 0)
REPLIES = {
    "/v1/cache": json.dumps({"workers": [{"id": "mixed", "available_blocks": 40}]}),
    "/load": '{"server_load": 0}',
    "/metrics": 'raydix_running_requests{worker="mixed"} 0.0\n',
}


def test_state_is_read_from_what_the_server_tells() -> None:
    metrics = "\n".join(
        (
            "# HELP raydix_running_requests Requests that hold blocks.",
            'raydix_running_requests{worker="a"} 2.0',
            'raydix_waiting_requests{worker="b"} 1.0',
            'raydix_cached_blocks{worker="b"} 7.0',
        )
    )
    cache = {"workers": [{"id": "a", "available_blocks": 5}, {"id": "b", "available_blocks": 6}]}
    assert state_of(cache, {"server_load": 4}, metrics) == State({"a": 5, "b": 6}, 7)


def test_what_remains_is_named() -> None:
    assert remains(IDLE, IDLE) == []
    assert remains(IDLE, State({"decode": 88, "prefill": 100, "new": 1}, 2)) == [
        "2 requests have not ended",
        "decode has 88 available blocks, and had 90",
    ]
    assert remains(IDLE, State({"decode": 90}, 0)) == ["prefill is gone"]


def test_requests_have_time_to_end() -> None:
    states = iter((State(IDLE.available, 1), IDLE))
    assert settled(IDLE, lambda: next(states), float("inf")) == []
    assert settled(IDLE, lambda: State(IDLE.available, 1), 0.0) == ["1 requests have not ended"]


@pytest.mark.parametrize(
    "text",
    [
        'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: x\n',
        '  File "/a.py", line 1, in f\n    f()\nbuiltins.ValueError\n',
        '{"level":"ERROR","message":"failed","exception":"  File ..."}\n',
    ],
    ids=["python", "without messages", "json"],
)
def test_only_new_tracebacks_count(tmp_path: Path, text: str) -> None:
    log = tmp_path / "raydix-ingress-1.log"
    log.write_text(text)
    (tmp_path / "gcs_server.err").write_text(text)
    sizes = sizes_of(tmp_path)
    with log.open("a") as file:
        file.write('{"level":"INFO","message":"no traceback in \\"file\\""}\n')
    rotated = log.rename(tmp_path / "raydix-ingress-1.log.1")
    assert tracebacks(tmp_path, sizes) == []

    with rotated.open("a") as file:
        file.write(text)
    (tmp_path / "serve").mkdir()
    (tmp_path / "serve/replica.log").write_text(f"INFO\n{text}")
    names = [each.partition(":")[0] for each in tracebacks(tmp_path, sizes)]
    assert names == ["raydix-ingress-1.log.1", "replica.log"]


@pytest.fixture
def url() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(REPLIES[self.path].encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_exit_status(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(url, tmp_path, ["true"]) == 2, "no logs: nothing would be found"
    log = tmp_path / "raydix-mixed-1.log"
    log.write_text("INFO\n")
    assert main(url, tmp_path, ["true"]) == 0
    assert main(url, tmp_path, [sys.executable, "-c", "raise SystemExit(3)"]) == 3
    capsys.readouterr()
    write = f"open({str(log)!r}, 'a').write('Traceback (most recent call last)')"
    assert main(url, tmp_path, [sys.executable, "-c", write]) == 1
    assert capsys.readouterr().err == "left behind: raydix-mixed-1.log: Traceback (most recent call last)\n"
