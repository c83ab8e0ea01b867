"""Streams that run while processes are killed: what their clients saw, and how long everything took."""

import contextlib
import http.client
import itertools
import os
import signal
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil

from tests.integration.conftest import Server, eventually, random_prompt

NUM_STREAMS = 10
NUM_OPEN = 5
"""Streams of a case that go on until their clients leave, so that none of them can end before the disturbance, however
fast the machine is. The others end by their length."""
OPEN_TOKENS = 3000
"""Tokens that an open stream asks for: far more than it gets."""
TOKENS_BEHIND = 32
"""Tokens that an open stream has behind the disturbance when its client leaves, at the least."""
STOPPED_S = 20.0
"""How long a process stands still that gets SIGSTOP."""
CONNECTED = {"ingress", "HAProxy", "HAProxy manager"}
"""Processes without which there is no connection to a client."""
NUM_WORKERS = 4
TITLES = {
    "prefill host": "ray::ServeReplica:raydix:prefill",
    "decode host": "ray::ServeReplica:raydix:decode",
    "manager host": "ray::ServeReplica:raydix:kv_cache_manager",
    "ingress": "ray::ServeReplica:raydix:ingress",
    "controller": "ray::ServeController",
    "proxy": "ray::ProxyActor",
    "HAProxy manager": "ray::HAProxyManager",
}
"""How the titles of processes begin that have no statistics of their own."""


@dataclass
class Stream:
    """One client: its request and what arrived when."""

    prompt: list[int]
    num_tokens: int
    salt: str
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    sent_at: float = 0.0
    error: str | None = None
    has_enough: threading.Event = field(default_factory=threading.Event)
    """Once it is set, the client leaves at the next token."""
    leaves_at: int | None = None
    """The client leaves when it has so many tokens."""

    def run(self, server: Server) -> None:
        """Send the request and read its answer to the end, or until the client has enough."""
        self.sent_at = time.monotonic()
        try:
            for chunk in server.stream(self.prompt, max_tokens=self.num_tokens, cache_salt=self.salt):
                for choice in chunk["choices"]:
                    self.token_ids += choice.get("token_ids", [])
                    self.times.append(time.monotonic())
                if self.has_enough.is_set() or (self.leaves_at is not None and len(self.token_ids) >= self.leaves_at):
                    return
            if len(self.token_ids) < self.num_tokens:
                self.error = f"ended after {len(self.token_ids)} of {self.num_tokens} tokens"
        except (OSError, http.client.HTTPException, AssertionError) as error:
            self.error = f"{type(error).__name__}: {error}"

    def longest_pause_s(self, since: float) -> float:
        """The longest time without a token that ended after `since`, in seconds."""
        times = [self.sent_at, *self.times]
        return max((b - a for a, b in itertools.pairwise(times) if b > since), default=0.0)


@dataclass(frozen=True)
class Case:
    """One disturbance: these processes get this signal at this moment of the streams, one after the other or all at
    once."""

    victims: tuple[str, ...]
    moment: str
    how: signal.Signals = signal.SIGKILL
    at_once: bool = False

    @property
    def name(self) -> str:
        return (" and " if self.at_once else ", then ").join(self.victims) or "nobody"

    @property
    def is_replaced(self) -> bool:
        """Whether another worker or manager takes the place of each victim."""
        parts = {victim.removesuffix(" host") for victim in self.victims}
        return self.how is signal.SIGKILL and parts <= {"prefill", "decode", "manager"}

    @property
    def breaks_connections(self) -> bool:
        """Whether clients are connected through a victim. Serve replaces HAProxy also when it stands still."""
        return "HAProxy" in self.victims or (self.how is signal.SIGKILL and not CONNECTED.isdisjoint(self.victims))

    @property
    def goes_on(self) -> bool:
        """Whether each victim only stands still for a while, and nobody may take it for dead."""
        return self.how is signal.SIGSTOP and "HAProxy" not in self.victims


@dataclass(frozen=True)
class Load:
    """Prompts of ten streams, and their answers when nothing is disturbed."""

    prompts: list[list[int]]
    answers: list[list[int]]
    longer: dict[int, list[int]] = field(default_factory=dict)
    """Longer answers to some of the prompts, by place."""

    def lengthen(self, server: Server, lengths: Mapping[int, int]) -> None:
        """Have answers of at least these lengths in `longer`. The server is not disturbed meanwhile."""

        def answer(place: int) -> list[int]:
            token_ids: list[int] = server.complete(
                self.prompts[place], max_tokens=2 * lengths[place], cache_salt="reference"
            )["choices"][0]["token_ids"]
            return token_ids

        missing = [place for place, length in lengths.items() if len(self.longer.get(place, ())) < length]
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            self.longer.update(zip(missing, pool.map(answer, missing), strict=True))


@dataclass
class Outcome:
    """What one disturbance did."""

    victim: str
    moment: str
    how: str
    identical: int = 0
    """Streams with exactly the tokens of an undisturbed run, of `NUM_STREAMS`."""
    broken: int = 0
    """Streams whose connection ended early."""
    longest_pause_s: float = 0.0
    fresh_s: float = 0.0
    """From the disturbance to the whole answer of a request that came right after it."""
    noticed_s: float | None = None
    """Until the process that takes the victim's place was started; None where nothing takes its place."""
    back_s: float | None = None
    """Until that process did the victim's work."""
    errors: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    """Victims that only stood still, and were replaced."""
    unfinished: int = 0
    """Streams without their last token at that moment."""
    survivors: list[str] = field(default_factory=list)
    """Victims that were to be killed, and live."""
    failovers: int | None = None
    """Requests that went on at another worker; None where the process that counts them was disturbed."""
    identical_again: int | None = None
    """As `identical`, of the same requests sent again afterwards; None where no connection was to break."""


class Streams:
    """Ten clients of one server at the same time, the first `num_open` of them with streams that end when the clients
    leave (`let_leave`)."""

    def __init__(self, server: Server, load: Load, salt: str, num_open: int = 0) -> None:
        self._load = load
        self._num_open = num_open
        self.streams = [
            Stream(prompt, OPEN_TOKENS if place < num_open else len(answer), salt)
            for place, (prompt, answer) in enumerate(zip(load.prompts, load.answers, strict=True))
        ]
        self._threads = [threading.Thread(target=stream.run, args=(server,)) for stream in self.streams]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait_for_tokens(self, count: int, num_streams: int) -> None:
        """Until so many streams have so many tokens."""
        eventually(
            lambda: sum(len(stream.token_ids) >= count for stream in self.streams) >= num_streams,
            f"{count} tokens of {num_streams} streams",
        )

    def num_unfinished(self) -> int:
        return sum(len(stream.token_ids) < stream.num_tokens for stream in self.streams)

    def let_leave(self) -> None:
        """Have the clients of open streams leave some tokens from now on, behind their answers' usual length."""
        for stream, answer in zip(self.streams[: self._num_open], self._load.answers[: self._num_open], strict=True):
            stream.leaves_at = max(len(answer), len(stream.token_ids) + TOKENS_BEHIND)

    def leave(self) -> None:
        """Have all clients leave at their next token."""
        for stream in self.streams:
            stream.has_enough.set()

    def finish(self, outcome: Outcome, since: float = 0.0) -> Outcome:
        """Wait for all answers and note what they were."""
        for thread in self._threads:
            thread.join()
        outcome.identical = sum(
            stream.token_ids == answer
            for stream, answer in zip(self.streams[self._num_open :], self._load.answers[self._num_open :], strict=True)
        )
        outcome.errors = sorted({stream.error for stream in self.streams if stream.error is not None})
        outcome.broken = sum(stream.error is not None for stream in self.streams)
        outcome.longest_pause_s = max(stream.longest_pause_s(since) for stream in self.streams)
        return outcome

    def compare_open(self, server: Server, outcome: Outcome) -> None:
        """Count the open streams with an undisturbed run's tokens among the identical ones. The server is undisturbed
        again, and generates the answers that are not known at such a length."""
        whole = {place: stream for place, stream in enumerate(self.streams[: self._num_open]) if stream.error is None}
        self._load.lengthen(server, {place: len(stream.token_ids) for place, stream in whole.items()})
        outcome.identical += sum(
            stream.token_ids == self._load.longer[place][: len(stream.token_ids)] for place, stream in whole.items()
        )


def num_failovers(server: Server) -> int:
    """Requests of the ingress replicas that went on at another worker so far."""
    status, _, data = server.request("GET", "/metrics")
    assert status == 200, data
    lines = data.decode().splitlines()
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith("raydix_failovers_total"))


def pids_of(server: Server, victims: Sequence[str], known: Mapping[str, int] | None = None) -> list[int]:
    """The processes to disturb, each another one; all of them are there. `known`: those that need not be looked for."""
    pids: list[int] = []
    for victim in victims:
        pid = (known or {}).get(victim)
        pids.append(pid or eventually(partial(pid_of, server, victim, pids), f"a process of '{victim}'"))
    return pids


def pid_of(server: Server, victim: str, others: Collection[int]) -> int:
    """A process to disturb, none of `others`: of several workers of a role the one with the most requests."""
    if victim == "manager":
        return server.manager()["pid"]
    if victim in ("prefill", "decode"):
        workers = [each for each in server.all_workers() if each["role"] == victim and each["pid"] not in others]
        return int(max(workers, key=lambda worker: worker["num_running"] + worker["num_waiting"])["pid"])
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline())
            if process.name() == "haproxy" if victim == "HAProxy" else title.startswith(TITLES[victim]):
                return process.pid
    raise LookupError(f"no process of '{victim}'")


def place_of(server: Server, victim: str) -> dict[int, Any]:
    """The processes that do the victim's kind of work now: ids of registered workers by process, or the manager's."""
    if victim in ("manager", "manager host"):
        statistics = server.manager()
        return {statistics["pid"]: statistics["num_workers"]}
    role = victim.removesuffix(" host")
    return {worker["pid"]: worker["worker_id"] for worker in server.all_workers() if worker["role"] == role}


class Return:
    """Notes when another process has taken the place of a killed one. Made before the kill, started with it."""

    def __init__(self, server: Server, victim: str) -> None:
        self._server = server
        self._victim = victim
        self._before = place_of(server, victim)
        self._watcher = threading.Thread(target=self._watch)
        self._killed_at = 0.0
        self.noticed_s: float | None = None
        self.back_s: float | None = None

    def start(self) -> None:
        self._killed_at = time.time()
        self._watcher.start()

    def join(self) -> None:
        self._watcher.join()

    def _watch(self) -> None:
        pid = eventually(self._successor, f"another {self._victim}")
        self.back_s = time.time() - self._killed_at
        self.noticed_s = max(0.0, psutil.Process(pid).create_time() - self._killed_at)

    def _successor(self) -> int | None:
        now = place_of(self._server, self._victim)
        new = [pid for pid in now if pid not in self._before]
        if self._victim.startswith("manager"):
            return new[0] if new and now[new[0]] == NUM_WORKERS else None
        return new[0] if new and len(now) == len(self._before) else None


def disturb(pid: int, how: signal.Signals) -> threading.Thread:
    """Send a signal; gives a thread that ends when a process that is stopped goes on, after `STOPPED_S`."""
    os.kill(pid, how)
    is_stopped = how is signal.SIGSTOP
    waiting = threading.Timer(STOPPED_S, go_on, (pid,)) if is_stopped else threading.Thread()
    waiting.daemon = True
    waiting.start()
    return waiting


def disturb_in_turn(pids: Sequence[int], how: signal.Signals) -> list[threading.Thread]:
    """Send a signal to each of these processes, once the one before has ended or stands still."""
    waiting = []
    for pid in pids:
        waiting.append(disturb(pid, how))
        eventually(lambda: not lives(pid), "the victim does nothing any more", 0.01)  # noqa: B023
    return waiting


def go_on(pid: int) -> None:
    """Have a stopped process go on, if nobody has ended it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def lives(pid: int) -> bool:
    """Whether a process neither has ended nor stands still."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def fresh_request_s(server: Server, salt: str) -> float:
    """How long a short new request takes; it is sent again when its connection breaks."""
    started = time.monotonic()

    def answered() -> bool:
        try:
            return bool(server.complete(random_prompt(77, 20), max_tokens=2, cache_salt=salt))
        except (OSError, http.client.HTTPException, AssertionError):
            return False

    eventually(answered, "a fresh request is answered")
    return time.monotonic() - started


def run(server: Server, case: "Case", load: Load, salt: str) -> Outcome:
    """Disturb the server at that moment of ten streams, and note what followed."""
    streams = Streams(server, load, salt, NUM_OPEN)
    try:
        return _run(server, case, load, salt, streams)
    finally:
        streams.leave()  # after an error, too: open streams would go on for minutes beside the next case


def _run(server: Server, case: "Case", load: Load, salt: str, streams: Streams) -> Outcome:
    outcome = Outcome(case.name, case.moment, case.how.name.removeprefix("SIG"))
    failovers_before = num_failovers(server)
    # The workers with the most requests are known while streams run; the search for the others would take long then.
    others = [victim for victim in case.victims if victim in TITLES or victim == "HAProxy"]
    known = dict(zip(others, pids_of(server, others), strict=True))
    if case.moment != "idle":
        streams.start()
    if case.moment == "prefill":
        eventually(lambda: any(worker["num_running"] for worker in server.all_workers()), "prefill has begun")
    elif case.moment == "hand-over":
        streams.wait_for_tokens(1, 1)
    elif case.moment == "decode":
        streams.wait_for_tokens(8, NUM_STREAMS)
    returns = [Return(server, victim) for victim in case.victims] if case.is_replaced else []
    pids = pids_of(server, case.victims, known)
    since = time.monotonic()
    outcome.unfinished = streams.num_unfinished()
    waiting = [] if case.at_once else disturb_in_turn(pids, case.how)
    if case.at_once:
        for pid in pids:  # nothing between the signals: no process hears of another one's end before its own
            os.kill(pid, case.how)
    for watch in returns:
        watch.start()
    if case.moment == "idle":
        streams.start()
    streams.let_leave()
    outcome.fresh_s = fresh_request_s(server, f"{salt} fresh")
    streams.finish(outcome, since)
    for watch in returns:
        watch.join()
    if case.goes_on:
        for thread in waiting:
            thread.join()
        eventually(lambda: all(map(lives, pids)) or not all(map(psutil.pid_exists, pids)), "the victims go on")
        outcome.ended = [victim for victim, pid in zip(case.victims, pids, strict=True) if not lives(pid)]
    if case.how is signal.SIGKILL:
        outcome.survivors = [victim for victim, pid in zip(case.victims, pids, strict=True) if lives(pid)]
    streams.compare_open(server, outcome)
    if CONNECTED.isdisjoint(case.victims):
        outcome.failovers = num_failovers(server) - failovers_before
    if case.breaks_connections:
        again = Streams(server, load, f"{salt} again")
        again.start()
        outcome.identical_again = again.finish(Outcome(case.name, case.moment, "")).identical
    if returns:
        outcome.noticed_s = max(watch.noticed_s or 0.0 for watch in returns)
        outcome.back_s = max(watch.back_s or 0.0 for watch in returns)
    return outcome
