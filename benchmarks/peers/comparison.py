"""Cases of the comparison, and engines that are taken through them, round after round.

Every engine gets the same prompts: random tokens, different in each case, round and repetition.

* prefill: one prompt that no engine has seen, one token.
* decode: the time for 65 tokens less the time for one, over 64, with the same prompts in both. The prompts were
  submitted once before, so that an engine with a prefix cache prefills neither time and only decoding is left in the
  difference; an engine without one prefills both times.
* prefix hit: a prompt for the second time, one token.
"""

import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tokenizers import Tokenizer

from benchmarks.peers.process import EngineProcess, WorkerError
from benchmarks.peers.roster import Peer, Site

Generate: TypeAlias = Callable[[list[list[int]], int], float]
"""Seconds for prompts and a number of tokens of each."""

DECODE_STEPS = 64
DECODE_PROMPT = 128
TOKEN_IDS = range(100, 40_000)


@dataclass(frozen=True, slots=True)
class ComparisonCase:
    """One row of the comparison. `measure` gives seconds, `figures` the reported values, by name with unit."""

    name: str
    measure: Callable[[Generate, random.Random], float]
    figures: Callable[[float], dict[str, float]]
    repetitions: int
    """Measurements in each round, of which the median counts: more for short ones."""
    needs_prefix_cache: bool = False

    def run(self, generate: Generate, seed: str) -> float:
        """Seconds, the median of the repetitions."""
        return statistics.median(
            self.measure(generate, random.Random(f"{seed}/{self.name}/{repetition}"))
            for repetition in range(self.repetitions)
        )


def prompts(generator: random.Random, count: int, length: int) -> list[list[int]]:
    return [generator.sample(TOKEN_IDS, length) for _ in range(count)]


def prefill(length: int, repetitions: int) -> ComparisonCase:
    def measure(generate: Generate, generator: random.Random) -> float:
        return generate(prompts(generator, 1, length), 1)

    return ComparisonCase(
        f"prefill {length:,}", measure, lambda seconds: {"tokens_per_s": length / seconds}, repetitions
    )


def decode(streams: int, repetitions: int) -> ComparisonCase:
    def measure(generate: Generate, generator: random.Random) -> float:
        asked = prompts(generator, streams, DECODE_PROMPT)
        generate(asked, 1)
        first = generate(asked, 1)
        return (generate(asked, 1 + DECODE_STEPS) - first) / DECODE_STEPS

    def figures(seconds: float) -> dict[str, float]:
        return {"tokens_per_s": streams / seconds, "ms_per_step": seconds * 1e3}

    return ComparisonCase(name=f"decode {streams} streams", measure=measure, figures=figures, repetitions=repetitions)


def prefix_hit(length: int, repetitions: int) -> ComparisonCase:
    def measure(generate: Generate, generator: random.Random) -> float:
        asked = prompts(generator, 1, length)
        generate(asked, 1)
        return generate(asked, 1)

    def figures(seconds: float) -> dict[str, float]:
        return {"first_token_ms": seconds * 1e3}

    return ComparisonCase(f"prefix hit of {length:,}", measure, figures, repetitions, needs_prefix_cache=True)


CASES = (
    prefill(512, repetitions=5),
    prefill(2048, repetitions=2),
    decode(1, repetitions=3),
    decode(16, repetitions=2),
    decode(64, repetitions=1),
    prefix_hit(2048, repetitions=2),
)


CHECK_TEXT = "The Roman Empire began when"
CHECK_TOKENS = 16
WARM_PROMPT = list(range(1000, 1064))


@dataclass
class Contender:
    """An engine in the comparison and its measurements so far."""

    worker: EngineProcess
    agrees: int
    """Leading greedy tokens, of `CHECK_TOKENS`, that equal raydix's."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each case, one for each round."""

    @property
    def peer(self) -> Peer:
        return self.worker.peer

    def runs(self, case: ComparisonCase) -> bool:
        cached = self.worker.introduction.caches_prefixes
        return cached or not case.needs_prefix_cache

    def measure(self, case: ComparisonCase, seed: str) -> float:
        """Seconds, the median of the case's repetitions."""
        self.worker.generate([WARM_PROMPT], 4)  # what other engines pushed out of caches and memory comes back
        return case.run(lambda prompts, max_tokens: self.worker.generate(prompts, max_tokens)[0], seed)

    def median(self, case: ComparisonCase) -> float | None:
        """Seconds over all rounds; None where there are none."""
        return statistics.median(self.seconds[case.name]) if self.seconds.get(case.name) else None


class Comparison:
    """All engines, loaded, in the order of the report. The others are compared with the first."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.contenders: list[Contender] = []
        self.left_out: dict[str, str] = {}
        """Reason why a peer is missing from the figures, or from some of them."""

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

    def run(self, cases: Sequence[ComparisonCase], rounds: int) -> None:
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

    def _turn(self, contender: Contender, case: ComparisonCase, seed: str) -> None:
        """One engine's turn at a case; an engine that fails takes no further turn."""
        if not contender.worker.is_open:
            return
        try:
            contender.seconds.setdefault(case.name, []).append(contender.measure(case, seed))
        except WorkerError as error:
            self._leave_out(contender.peer, f"{case.name}: {error}")
            contender.worker.close()

    def _leave_out(self, peer: Peer, reason: str) -> None:
        self.left_out[peer.name] = reason
        _say(f"{peer.title}: left out, {reason}")


def _load(peer: Peer, site: Site) -> EngineProcess:
    """Start an engine and run each kind of its work once, untimed."""
    if reason := peer.why_not(site):
        raise WorkerError(reason)

    _say(f"{peer.title}: loading")
    logs = site.home / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    worker = EngineProcess(peer, site, logs / f"{peer.name}.log")

    try:
        generator = random.Random("warm-up")
        for streams, length in ((1, 2048), (1, DECODE_PROMPT), (16, DECODE_PROMPT), (64, DECODE_PROMPT)):
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
