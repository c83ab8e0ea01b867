"""Load generator for OpenAI-compatible servers: `python -m benchmarks.serve --url http://127.0.0.1:8000`.

Measures from outside, over HTTP: time to first token, time per token, gaps, throughput, goodput, cached prompt tokens.
`python -m benchmarks.serve compare A.json B.json` sets reports side by side. The parts are in `benchmarks/load/`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from benchmarks.load import compare, report
from benchmarks.load.options import BenchmarkError, Options, Parser, parse
from benchmarks.load.runner import run

T = TypeVar("T")

OK, SOME_FAILED, NO_RUN = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run or compare; returns the exit status, and says in one line why a run could not be made."""
    argv = list(sys.argv[1:] if argv is None else argv)
    console = Console(highlight=False)
    try:
        if argv[:1] == ["compare"]:
            return compare_reports(argv[1:], console)
        return measure(parse(argv), argv, console)
    except BenchmarkError as error:
        print(f"benchmarks.serve: {error}", file=sys.stderr)
        return NO_RUN
    except KeyboardInterrupt:
        print("benchmarks.serve: interrupted before anything was measured", file=sys.stderr)
        return NO_RUN


def measure(options: Options, argv: Sequence[str], console: Console) -> int:
    """One run: load, print, write the files asked for."""
    outcome = run_loop(run(options))
    document = report.build(options, argv, outcome)
    report.show(document, console)
    if options.json:
        report.save(document, options.json)
    if options.plot:
        draw([document], options.plot)
    return SOME_FAILED if document["summary"]["errors"] or not document["summary"]["answered"] else OK


def compare_reports(argv: Sequence[str], console: Console) -> int:
    """Print the ratios of reports written earlier to the first of them, and draw all in one figure."""
    parser = Parser(prog="python -m benchmarks.serve compare", description="Compare reports with the first one.")
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.json")
    parser.add_argument("--plot", type=Path, default=Path("comparison.png"), metavar="FILE.png", help="%(default)s")
    arguments = parser.parse_args(argv)
    if len(arguments.reports) < 2:
        raise BenchmarkError("compare needs two reports or more")

    documents = [report.load(path) for path in arguments.reports]
    if len({document["label"] for document in documents}) < len(documents):
        documents = [
            {**document, "label": path.stem} for document, path in zip(documents, arguments.reports, strict=True)
        ]

    compare.show(documents, console)
    draw(documents, arguments.plot)
    console.print(f"drawn in {arguments.plot}", markup=False)
    return OK


def draw(documents: Sequence[report.Report], path: Path) -> None:
    """Draw reports; the plotting library is loaded only here, after the measuring."""
    from benchmarks.load import plot

    plot.draw(documents, path)


def run_loop(main_task: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop where there is one: the generator shares the machine with the server it measures."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main_task)
    return uvloop.run(main_task)


if __name__ == "__main__":
    sys.exit(main())
