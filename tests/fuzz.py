"""Runs a program that sends requests to a server, and looks for what the requests have left there.

`python3 -m tests.fuzz URL LOGS PROGRAM ...` fails where the program fails, where workers still have requests or hold
blocks `SETTLED_S` seconds after its end, and where a log of the server in the folder LOGS has a new traceback. The
server is idle at the beginning, and trusts every client. Needs the standard library alone.
"""

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SETTLED_S = 90
LOGS = ("raydix-*", "worker-*.err", "serve/*")
TRACEBACK = re.compile(r'^Traceback \(|^ +File "|"exception":', re.M)
"""Processes that see clients' texts write a traceback without its first line."""
REQUESTS = re.compile(r"^raydix_(?:running|waiting)_requests(?:{.*})? ([0-9.e+]+)$", re.M)


@dataclass(frozen=True, slots=True)
class State:
    """Load of a server."""

    available: Mapping[str, int]
    """Blocks that no request holds, by worker."""
    num_requests: int
    """Requests in workers, and answers under way."""


def state_of(cache: Mapping[str, object], load: Mapping[str, int], metrics: str) -> State:
    """Read the replies of `/v1/cache`, `/load` and `/metrics`."""
    workers = cache["workers"]
    assert isinstance(workers, list)
    available = {worker["id"]: worker["available_blocks"] for worker in workers}
    return State(available, load["server_load"] + sum(int(float(value)) for value in REQUESTS.findall(metrics)))


def remains(before: State, after: State) -> list[str]:
    """Return the differences that requests have left, as sentences."""
    found = [f"{after.num_requests} requests have not ended"] if after.num_requests else []
    found += [f"{worker_id} is gone" for worker_id in before.available if worker_id not in after.available]
    for worker_id, count in after.available.items():
        if worker_id in before.available and count != before.available[worker_id]:
            found.append(f"{worker_id} has {count} available blocks, and had {before.available[worker_id]}")
    return found


def sizes_of(folder: Path) -> dict[int, int]:
    """Sizes of the logs by inode, which a rotated log keeps."""
    return {path.stat().st_ino: path.stat().st_size for path in _logs(folder)}


def tracebacks(folder: Path, sizes: Mapping[int, int]) -> list[str]:
    """Return the first new traceback of each log, as text with the log's name. `sizes`: before what is new."""
    found: list[str] = []
    for path in _logs(folder):
        new = path.read_bytes()[sizes.get(path.stat().st_ino, 0) :].decode(errors="replace")
        if (match := TRACEBACK.search(new)) is not None:
            found.append(f"{path.name}: {new[match.start() : match.start() + 2000]}")
    return found


def settled(before: State, read: Callable[[], State], deadline: float) -> list[str]:
    """Return what requests have left at the deadline (seconds as `time.monotonic`), or nothing once nothing is left."""
    while (found := remains(before, read())) and time.monotonic() < deadline:
        time.sleep(1)
    return found


def main(url: str, logs: Path, program: Sequence[str]) -> int:
    """Run the program; returns the exit status."""

    def read() -> State:
        cache, load, metrics = (_get(url + path) for path in ("/v1/cache", "/load", "/metrics"))
        return state_of(json.loads(cache), json.loads(load), metrics)

    sizes, before = sizes_of(logs), read()
    if not sizes or before.num_requests or not before.available:
        print(f"{url} is not idle or has no workers, or its logs are not in {logs}", file=sys.stderr)
        return 2
    status = subprocess.run(program, check=False).returncode
    found = settled(before, read, time.monotonic() + SETTLED_S) + tracebacks(logs, sizes)
    for each in found:
        print(f"left behind: {each}", file=sys.stderr)
    return status or int(bool(found))


def _logs(folder: Path) -> Iterator[Path]:
    return (path for pattern in LOGS for path in sorted(folder.glob(pattern)) if path.is_file())


def _get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=60) as reply:
        text: str = reply.read().decode()
        return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
