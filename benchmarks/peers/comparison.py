"""Loads the engines and takes them through the cases, round after round."""

import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from benchmarks.peers.bystanders import QUIET, wait_until_quiet, watching
from benchmarks.peers.cases import DECODE_PROMPT, Case, prompts
from benchmarks.peers.roster import Peer, Site
from benchmarks.peers.worker import Worker, WorkerError

CHECK_TEXT = "The Roman Empire began when"
CHECK_TOKENS = 16
WARM_PROMPT = list(range(1000, 1064))


@dataclass
class Contender:
    """An engine in the comparison and its measurements so far."""

    worker: Worker
    agrees: int
    """Leading greedy tokens, of `CHECK_TOKENS`, that equal raydix's."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """By case, one for each round."""

    @property
    def peer(self) -> Peer:
        return self.worker.peer

    def runs(self, case: Case) -> bool:
        cached = self.worker.introduction.caches_prefixes
        return case.streams <= self.peer.most_streams and (cached or not case.needs_prefix_cache)

    def measure(self, case: Case, seed: str) -> float:
        """Seconds, the median of the case's repetitions."""
        self.worker.generate([WARM_PROMPT], 4)  # what other engines pushed out of caches and memory comes back
        return case.run(lambda prompts, max_tokens: self.worker.generate(prompts, max_tokens)[0], seed)

    def median(self, case: Case) -> float | None:
        """Seconds over all rounds; None where there are none."""
        return statistics.median(self.seconds[case.name]) if case.name in self.seconds else None


class Comparison:
    """All engines, loaded, in the order of the report. The others are compared with the first."""

    def __init__(self, site: Site, patience_s: float) -> None:
        self.site = site
        self.contenders: list[Contender] = []
        self.left_out: dict[str, str] = {}
        """Reason why a peer is missing from the figures, or from some of them."""
        self.idle_cores = 0.0
        """Cores used by the waiting engines together, the most in any turn."""
        self.foreign_cores = 0.0
        """Cores used by others, the most in any turn that counts."""
        self.num_disturbed = 0
        """Turns that count although others used more than `QUIET` cores: patience was over."""
        self._patience_s = patience_s

    def load(self, peers: Sequence[Peer]) -> None:
        """Start the engines, one after the other; leave out engines that do not start."""
        text: list[int] = Tokenizer.from_file(str(self.site.model / "tokenizer.json")).encode(CHECK_TEXT).ids
        expected: list[int] | None = None
        for peer in peers:
            try:
                worker = _load(peer, self.site)
            except WorkerError as error:
                self._leave_out(peer, str(error))
                continue
            tokens = worker.generate([text], CHECK_TOKENS)[1][0]
            expected = expected or tokens
            self.contenders.append(Contender(worker, _common_length(tokens, expected)))

    def run(self, cases: Sequence[Case], rounds: int) -> None:
        for round_number in range(rounds):
            for number, case in enumerate(cases):
                turns = [contender for contender in self.contenders if contender.runs(case)]
                first = (round_number + number) % max(1, len(turns))
                for contender in turns[first:] + turns[:first]:
                    self._turn(contender, case, str(round_number))
            _say(f"round {round_number + 1} of {rounds} done")

    def close(self) -> None:
        for contender in self.contenders:
            contender.worker.close()

    def _turn(self, contender: Contender, case: Case, seed: str) -> None:
        """One engine's turn at a case; again if others disturbed it, while there is patience."""
        while contender.worker.is_open:
            idle = [other.worker for other in self.contenders if other is not contender]
            started, before = time.perf_counter(), sum(worker.cpu_seconds() for worker in idle)
            try:
                with watching(self._own_cpu_s) as watch:
                    seconds = contender.measure(case, seed)
            except WorkerError as error:
                self._leave_out(contender.peer, f"{case.name}: {error}")
                contender.worker.close()
                return

            used = sum(worker.cpu_seconds() for worker in idle) - before
            if watch.cores > QUIET and self._patience_s > 0:
                seed += " again"  # what caches hold of these prompts must not count
                self._wait_until_quiet()
                continue

            self.idle_cores = max(self.idle_cores, used / (time.perf_counter() - started))
            self.foreign_cores = max(self.foreign_cores, watch.cores)
            self.num_disturbed += watch.cores > QUIET
            contender.seconds.setdefault(case.name, []).append(seconds)
            return

    def _wait_until_quiet(self) -> None:
        started = time.monotonic()
        wait_until_quiet(self._own_cpu_s, self._patience_s)
        self._patience_s = max(0.0, self._patience_s - (time.monotonic() - started))

    def _own_cpu_s(self) -> float:
        return time.process_time() + sum(contender.worker.cpu_seconds() for contender in self.contenders)

    def _leave_out(self, peer: Peer, reason: str) -> None:
        self.left_out[peer.name] = reason
        _say(f"{peer.title}: left out, {reason}")


def _load(peer: Peer, site: Site) -> Worker:
    """Start an engine and run each kind of its work once, untimed."""
    if reason := peer.why_not(site):
        raise WorkerError(reason)

    _say(f"{peer.title}: loading")
    logs = site.home / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    worker = Worker(peer, site, logs / f"{peer.name}.log")

    try:
        generator = random.Random("warm-up")
        for streams, length in ((1, 2048), (1, DECODE_PROMPT), (16, DECODE_PROMPT), (64, DECODE_PROMPT)):
            if streams <= peer.most_streams:
                worker.generate(prompts(generator, streams, length), 8)
    except BaseException:
        worker.close()
        raise

    return worker


def _common_length(tokens: Sequence[int], expected: Sequence[int]) -> int:
    same = [token == other for token, other in zip(tokens, expected, strict=True)]
    return [*same, False].index(False)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
