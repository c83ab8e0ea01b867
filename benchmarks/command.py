"""What the benchmarks' command lines have in common: the parser, the file of the result, tables in Markdown, and
a few figures of many measurements."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import PACKAGES, describe

AT = {"p50": 0.5, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, slots=True)
class ResultFile:
    """The file that `--json` names, and the circumstances of the run."""

    path: Path | None
    circumstances: Mapping[str, object]

    def write(self, figures: Mapping[str, Any]) -> None:
        """Write the circumstances and the figures, anew at each call; without `--json` nothing."""
        if self.path is not None:
            self.path.write_text(json.dumps({**self.circumstances, **figures}, indent=2) + "\n")


def command_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser of the command line of `python -m module`, described by the first line of the module's docstring."""
    parser = argparse.ArgumentParser(prog=module, description=(doc or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the result")
    return parser


def begin(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, packages: Sequence[str] = PACKAGES
) -> tuple[argparse.Namespace, ResultFile]:
    """The options, and the file for the result. `arguments`: None for those of this process."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(given)
    # The machine is described now: at the end its load would be that of the benchmark itself.
    return options, ResultFile(options.json, describe(parser.prog, given, packages))


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table, a line for each row."""
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [header, ["---"] * len(header), *rows])


def distribution(name: str, values: Sequence[float], scale: float) -> dict[str, float]:
    """The median, the 99th percentile and the maximum of scaled values, by name; nothing of no values."""
    ordered = sorted(value * scale for value in values)
    if not ordered:
        return {}
    return {f"{name}_{label}": ordered[min(int(share * len(ordered)), len(ordered) - 1)] for label, share in AT.items()}
