"""Drafts measured: the time per token with drafts and without, and whether the answers are the same.

    python -m benchmarks.speculation [--workloads NAME ...] [--streams 1 8 64] [--rounds 5] [--json FILE]
    python -m benchmarks.speculation --sources request past [...]

Engines as in a worker of `cpu_mixed`, without Ray and HTTP, on the same weights. The prompts are texts written for this
benchmark (`benchmarks/drafting/prompts`). An engine with drafts and one without take turns at each workload
(`drafting.speed`); reported are medians over the rounds and of the rounds' ratios. Exit code 1 if the two gave other
answers.
"""

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.command import begin, command_parser
from benchmarks.drafting.engines import MAX_MODEL_LEN, Workshop
from benchmarks.drafting.questions import QuestionReader
from benchmarks.drafting.speed import MODES, Speed
from benchmarks.drafting.statistics import compared, speed_table
from benchmarks.drafting.workloads import WORKLOADS, chosen
from benchmarks.machine import public_name
from raydix.engine.core.types import DraftSource
from raydix.engine.model.sources import DEFAULT_MODEL


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("benchmarks.speculation", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--sources", nargs="+", choices=[*DraftSource], help="origins of drafts; default: all")
    parser.add_argument("--workloads", nargs="+", default=[], help=f"of: {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64], help="streams at the same time")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved repetitions; the medians are reported")
    options, output = begin(parser, arguments)
    try:
        workloads = chosen(options.workloads)
    except ValueError as error:
        parser.error(str(error))

    workshop = Workshop(options.model, options.sources)
    reader, speed = QuestionReader(workshop.folder, MAX_MODEL_LEN), Speed(workshop)
    figures: dict[str, dict[str, Any]] = {}
    for workload in workloads:
        questions = reader.questions(workload)
        for num_streams in options.streams:
            turns = speed.measure(questions, num_streams, options.rounds, asked_before=workload.is_asked_before)
            figures.setdefault(workload.name, {})[str(num_streams)] = compared(*(turns[mode] for mode in MODES))
            print(f"{workload.name}, {num_streams} streams: done", file=sys.stderr, flush=True)

    print(speed_table(figures))
    output.write({"model": public_name(options.model), "rounds": options.rounds, "speed": figures})
    same = all(found["same_answers"] for by_streams in figures.values() for found in by_streams.values())
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
