"""Few figures of several rounds, and a table of them."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from benchmarks.command import markdown
from benchmarks.drafting.workloads import WORKLOADS
from raydix.engine.core.types import DraftSource
from raydix.engine.core.worker.drafts.draft import DraftCounts

Counts: TypeAlias = Mapping[DraftSource, DraftCounts]


@dataclass(frozen=True, slots=True)
class AnsweredWorkload:
    """Measurement of one engine answering a workload once."""

    tokens: int
    seconds: float
    """Time from the first question to the last token."""
    decode_tokens: int
    """Tokens behind the first of each answer."""
    decode_s: float
    """Time between the first and the last token, of all answers together."""
    decode_steps: int
    """Steps with tokens behind the first, of all answers together."""
    drafts: Counts
    answers: str
    """Digest of all tokens."""

    @property
    def time_per_token_s(self) -> float:
        """Mean time between two tokens of an answer."""
        return self.decode_s / max(1, self.decode_tokens)

    @property
    def tokens_per_s(self) -> float:
        """Throughput of all streams together."""
        return self.tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        return self.decode_tokens / max(1, self.decode_steps)


def compared(off: Sequence[AnsweredWorkload], auto: Sequence[AnsweredWorkload]) -> dict[str, Any]:
    """The figures of a workload without and with drafts, ready for JSON; the turns of a round at the same place."""
    pairs = list(zip(off, auto, strict=True))
    return {
        "time_per_token_ms": {
            "off": round(1e3 * statistics.median(turn.time_per_token_s for turn in off), 3),
            "auto": round(1e3 * statistics.median(turn.time_per_token_s for turn in auto), 3),
        },
        "tokens_per_s": {
            "off": round(statistics.median(turn.tokens_per_s for turn in off), 2),
            "auto": round(statistics.median(turn.tokens_per_s for turn in auto), 2),
        },
        "times_as_fast": spread([plain.time_per_token_s / drafted.time_per_token_s for plain, drafted in pairs]),
        "throughput_ratio": spread([drafted.tokens_per_s / plain.tokens_per_s for plain, drafted in pairs]),
        "tokens_per_step": round(statistics.median(turn.tokens_per_step for turn in auto), 3),
        "drafts": drafts(auto),
        "tokens": auto[0].tokens,
        "same_answers": len({turn.answers for turn in (*off, *auto)}) == 1,
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and standard error of a figure, and its values."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {
        "median": round(statistics.median(values), 4),
        "low": round(min(values), 4),
        "high": round(max(values), 4),
        "standard_error": None if error is None else round(error, 4),
        "rounds": [round(value, 4) for value in values],
    }


def drafts(turns: Sequence[AnsweredWorkload]) -> dict[str, dict[str, int]]:
    """Draft tokens of all turns by source, of the sources that had any."""
    sums = {
        source: [sum(getattr(turn.drafts[source], name) for turn in turns) for name in ("num_drafted", "num_accepted")]
        for source in DraftSource
    }
    return {source.value: {"drafted": all_, "accepted": right} for source, (all_, right) in sums.items() if all_}


def since(counts: Counts, before: Counts) -> Counts:
    """The counts less those of an earlier time."""
    return {source: counts[source].since(before[source]) for source in counts}


def speed_table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each workload and number of streams."""
    header = [
        *("workload", "streams", "ms per token: off", "auto", "times as fast", "throughput, auto / off"),
        *("tokens per step", "accepted / drafted", "answers"),
    ]
    rows = [
        [
            WORKLOADS[name].title,
            streams,
            f"{found['time_per_token_ms']['off']:.2f}",
            f"{found['time_per_token_ms']['auto']:.2f}",
            with_spread(found["times_as_fast"]),
            with_spread(found["throughput_ratio"]),
            f"{found['tokens_per_step']:.2f}",
            ", ".join(f"{source} {it['accepted']} / {it['drafted']}" for source, it in found["drafts"].items()) or "–",
            "the same" if found["same_answers"] else "DIFFER",
        ]
        for name, by_streams in figures.items()
        for streams, found in by_streams.items()
    ]
    return markdown(header, rows)


def with_spread(figure: Mapping[str, Any]) -> str:
    """A median, and the extremes of several rounds."""
    text = f"{figure['median']:.2f}"
    return text if len(figure["rounds"]) < 2 else f"{text} ({figure['low']:.2f} to {figure['high']:.2f})"
