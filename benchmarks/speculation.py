"""Drafts measured and proved: the time per token with drafts and without, gaps beside a prefill, identity of answers.

    python -m benchmarks.speculation [--workloads NAME ...] [--streams 1 8 64] [--rounds 5] [--no-gaps] [--json FILE]
    python -m benchmarks.speculation --sources request past [...]
    python -m benchmarks.speculation --identity [--kinds NAME ...] [--requests 200] [--tokens 48] [...]

Engines as in a worker of `cpu_mixed`, without Ray and HTTP, on the same weights. The prompts are texts written for this
benchmark (`benchmarks/drafting/prompts`).

* Speed: an engine with drafts and one without take turns at each workload (`drafting.speed`); reported are medians over
  the rounds and of the rounds' ratios. That both gave the same answers is checked.
* Gaps: a prompt of 2,048 random tokens arrives while streams decode with drafts and without (`drafting.gaps`).
* Identity: tokens and log-probabilities with every kind of drafts, under every circumstance, are compared with each
  request's alone and without drafts (`drafting.identity`). Exit code 1 if any bit differs.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.drafting import gaps, identity
from benchmarks.drafting.comparing import compared, differing
from benchmarks.drafting.engines import MAX_MODEL_LEN, Workshop
from benchmarks.drafting.questions import Question, Reader
from benchmarks.drafting.speed import MODES, Speed
from benchmarks.drafting.statistics import compared as compared_turns
from benchmarks.drafting.tables import gap_table, identity_table, speed_table
from benchmarks.drafting.workloads import EDITS_PREDICTED, WORKLOADS, Workload, chosen
from benchmarks.machine import describe, public_name
from raydix.engine.core.types import DraftSource
from raydix.engine.model.sources import DEFAULT_MODEL

KINDS = ("off", *DraftSource, "choices", "all", "adversarial", "random")
"""Kinds of drafts whose answers are compared."""
GAP_STREAMS = 8
GAP_PROMPT = 2048


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.speculation", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--sources", nargs="+", choices=[*DraftSource], help="origins of drafts; default: all")
    parser.add_argument("--workloads", nargs="+", default=[], help=f"of: {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64], help="streams at the same time")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved repetitions; the medians are reported")
    parser.add_argument("--no-gaps", action="store_true", help="leave out the gaps beside a prefill")
    parser.add_argument("--identity", action="store_true", help="compare answers bit by bit instead of measuring")
    parser.add_argument(
        "--kinds", nargs="+", default=[], choices=KINDS, help="kinds of drafts to compare; default: all"
    )
    parser.add_argument("--requests", type=int, default=200, help="requests whose answers are compared")
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of each compared answer")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args(arguments)
    try:
        workloads = chosen(options.workloads)
    except ValueError as error:
        parser.error(str(error))

    result: dict[str, Any] = describe("benchmarks.speculation", sys.argv[1:] if arguments is None else list(arguments))
    result["model"] = public_name(options.model)
    workshop = Workshop(options.model, options.sources)
    reader = Reader(workshop.folder, MAX_MODEL_LEN)
    if options.identity:
        result |= prove(workshop, reader, workloads, options)
    else:
        result |= measure(workshop, reader, workloads, options)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if differs(result) else 0


def measure(
    workshop: Workshop, reader: Reader, workloads: Sequence[Workload], options: argparse.Namespace
) -> dict[str, Any]:
    """Speed and gaps, printed and ready for JSON."""
    speed = Speed(workshop)
    figures: dict[str, dict[str, Any]] = {}
    for workload in workloads:
        questions = reader.questions(workload)
        for num_streams in options.streams:
            turns = speed.measure(questions, num_streams, options.rounds, asked_before=workload.is_asked_before)
            figures.setdefault(workload.name, {})[str(num_streams)] = compared_turns(*(turns[mode] for mode in MODES))
            print(f"{workload.name}, {num_streams} streams: done", file=sys.stderr, flush=True)

    result: dict[str, Any] = {"rounds": options.rounds, "speed": figures}
    print(speed_table(figures))
    if not options.no_gaps:
        result["gaps"] = found = measure_gaps(speed, reader.questions(EDITS_PREDICTED), options.rounds, workshop)
        print(gap_table(found))
    return result


def measure_gaps(speed: Speed, questions: Sequence[Question], rounds: int, workshop: Workshop) -> dict[str, Any]:
    """The gaps of `GAP_STREAMS` streams, by turns with drafts and without."""
    found: dict[str, list[gaps.Gaps]] = {mode: [] for mode in MODES}
    for number in range(-1, rounds):  # the first one computes the streams' prompts
        for mode in sorted(MODES, reverse=number % 2 == 0):
            each = gaps.measure(speed.workers[mode], questions, GAP_STREAMS, GAP_PROMPT, seed=number)
            if number >= 0:
                found[mode].append(each)
    settings = {"streams": GAP_STREAMS, "prompt": GAP_PROMPT}
    return settings | gaps.report(found, workshop.settings.limits.token_budget)


def prove(
    workshop: Workshop, reader: Reader, workloads: Sequence[Workload], options: argparse.Namespace
) -> dict[str, Any]:
    """The comparison of answers, printed and ready for JSON."""
    questions = {workload.name: reader.questions(workload) for workload in workloads}
    report = identity.check(workshop, questions, options.requests, options.tokens, options.kinds)
    print(identity_table(report))
    print(f"{compared(report):,} answers compared, {differing(report):,} differ")
    counts = {"requests": options.requests, "compared": compared(report), "differing": differing(report)}
    return counts | {"identity": report}


def differs(result: Mapping[str, Any]) -> bool:
    """True if drafts have changed an answer."""
    speeds = [figures for each in result.get("speed", {}).values() for figures in each.values()]
    return result.get("differing", 0) > 0 or not all(figures["same_answers"] for figures in speeds)


if __name__ == "__main__":
    sys.exit(main())
