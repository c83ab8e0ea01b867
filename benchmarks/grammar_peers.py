"""llguidance beside xgrammar on JSON Schemas: what each compiles, how fast, and how right.

    python -m benchmarks.grammar_peers [--made 500] [--suite FOLDER] [--folder NAME=FOLDER] [--json FILE]

xgrammar runs in an environment of its own (`make bench-peers PEERS=xgrammar`), llguidance in raydix's, each in a
process. The libraries take turns, schema by schema. Both follow the same texts, cut into the model's tokens: some that
are valid under the schema and some that are not. Times are CPU times, of schemas that both compile and of texts that
both accept.

Schemas are made (`benchmarks.made_schemas`) with made texts, judged by `jsonschema`; and where given, those of a copy
of JSON-Schema-Test-Suite with its own texts, and the files of a folder with made texts.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.distribution import AT, distribution
from benchmarks.machine import describe, public_name
from benchmarks.peers.process import LOAD_TIMEOUT_S, Process, WorkerError, serving
from benchmarks.peers.roster import DEFAULT_HOME, RAYDIX, Site, environment_python, process_environment
from benchmarks.peers.schemas import Case, folder_cases, made_cases, suite_cases
from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model
from raydix.engine.model.tokenizer import Tokenizer, forgo_torch

NAMES = ("llguidance", "xgrammar")
SCHEMA_TIMEOUT_S = 240.0
TIMED_ANSWERS = 2
"""Valid texts of each schema along which masks are timed; the others are only followed."""
SIMPLE = '{"type": "object", "properties": {"a": {"type": "string"}}}'
"""Compiled first and untimed, for all that a library loads late."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one library with one case; a text's verdict is True if the text was accepted."""

    compile_s: float = 0.0
    timed: list[dict[str, Any]] = field(default_factory=list)
    """Walks with masks, along the first valid texts."""
    valid: list[bool] = field(default_factory=list)
    invalid: list[bool] = field(default_factory=list)
    refused: str | None = None
    failed: str | None = None
    """Reason why the library's process ended or was ended."""

    @property
    def is_compiled(self) -> bool:
        return self.refused is None and self.failed is None

    @property
    def is_right(self) -> bool:
        return self.is_compiled and all(self.valid) and not any(self.invalid)


class Contestant:
    """A library's process, started again when the process fails."""

    def __init__(self, name: str, site: Site, load: Mapping[str, Any]) -> None:
        self.name = name
        self._site = site
        self._load = load
        self._process: Process | None = None
        self.introduction = self._started().ask({"load": load}, LOAD_TIMEOUT_S)
        self._ask(Case(SIMPLE), [], [])

    def try_case(self, case: Case, valid: Sequence[list[int]], invalid: Sequence[list[int]]) -> Outcome:
        """Compile a case's schema and follow its texts, which are given as tokens."""
        try:
            reply = self._ask(case, valid, invalid)
        except WorkerError as error:
            self.close()
            self._started().ask({"load": self._load}, LOAD_TIMEOUT_S)
            self._ask(Case(SIMPLE), [], [])
            return Outcome(failed=str(error))
        if "refused" in reply:
            return Outcome(refused=reply["refused"])
        verdicts = [walk["is_accepted"] for walk in [*reply["timed"], *reply["untimed"]]]
        return Outcome(reply["compile_s"], reply["timed"], verdicts[: len(valid)], verdicts[len(valid) :])

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    def _ask(self, case: Case, valid: Sequence[list[int]], invalid: Sequence[list[int]]) -> dict[str, Any]:
        assert self._process is not None
        untimed = [*valid[TIMED_ANSWERS:], *invalid]
        request = {"schema": case.schema, "timed": valid[:TIMED_ANSWERS], "untimed": untimed}
        return self._process.ask(request, SCHEMA_TIMEOUT_S)

    def _started(self) -> Process:
        logs = self._site.home / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        own = self.name == "xgrammar"
        python = environment_python(self._site.home, self.name) if own else RAYDIX.python(self._site)
        environment = process_environment(RAYDIX, self._site)
        if own:
            environment.pop("PYTHONPATH")
        command = serving(python, f"grammars/{self.name}.py")
        self._process = Process(command, logs / f"grammars-{self.name}.log", environment)
        return self._process


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.grammar_peers", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--peers-home", type=Path, default=DEFAULT_HOME, help="where the environments are")
    parser.add_argument("--made", type=int, default=500, help="made schemas")
    parser.add_argument("--instances", type=int, default=8, help="most valid and most invalid texts made for a schema")
    parser.add_argument("--suite", type=Path, metavar="FOLDER", help="a copy of JSON-Schema-Test-Suite")
    parser.add_argument("--folder", metavar="NAME=FOLDER", help="a folder of schemas, and a name for them")
    parser.add_argument("--max-kib", type=float, default=16, help="the longest schema taken from the folder")
    parser.add_argument("--minutes", type=float, default=60, help="time for each set of schemas, at most")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args(arguments)

    forgo_torch()
    site = Site(options.peers_home.expanduser(), resolve_model(options.model), None)
    if not environment_python(site.home, "xgrammar").exists():
        print("xgrammar is not installed (make bench-peers PEERS=xgrammar)", file=sys.stderr)
        return 1
    result: dict[str, Any] = describe("benchmarks.grammar_peers", sys.argv[1:] if arguments is None else arguments)
    result |= {"model": public_name(options.model)} | compare(site, sets_of(options), 60 * options.minutes)
    print(table(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def sets_of(options: argparse.Namespace) -> dict[str, Iterable[Case]]:
    """The sets of schemas that the command line asks for, by name."""
    sets: dict[str, Iterable[Case]] = {"made": made_cases(options.made, options.instances)}
    if options.suite is not None:
        sets["JSON-Schema-Test-Suite"] = suite_cases(options.suite)
    if options.folder is not None:
        name, _, folder = options.folder.rpartition("=")
        sets[name or public_name(folder)] = folder_cases(Path(folder), options.max_kib, options.instances)
    return sets


def compare(site: Site, sets: Mapping[str, Iterable[Case]], limit_s: float) -> dict[str, Any]:
    """Take both libraries through all sets, for `limit_s` each."""
    tokenizer = Tokenizer(site.model)
    load = {"model": str(site.model), "vocab_size": tokenizer.vocab_size, "end_ids": tokenizer.eos_token_ids}
    contestants = [Contestant(name, site, load) for name in NAMES]
    try:
        figures: dict[str, Any] = {}
        for name, cases in sets.items():
            figures[name] = report(run(contestants, cases, tokenizer, time.monotonic() + limit_s))
            print(f"{name}: {figures[name]['schemas']} schemas", file=sys.stderr, flush=True)
    finally:
        for contestant in contestants:
            contestant.close()
    return {"libraries": {it.name: it.introduction for it in contestants}, "sets": figures}


def run(
    contestants: Sequence[Contestant], cases: Iterable[Case], tokenizer: Tokenizer, deadline: float
) -> dict[str, list[Outcome]]:
    """Return the outcomes of each contestant in the order of the cases, as many as there is time for."""
    outcomes: dict[str, list[Outcome]] = {contestant.name: [] for contestant in contestants}
    for number, case in enumerate(cases):
        if time.monotonic() > deadline:
            break
        valid, invalid = ([tokenizer.encode(text, False) for text in texts] for texts in (case.valid, case.invalid))
        first = number % len(contestants)
        for contestant in [*contestants[first:], *contestants[:first]]:
            outcomes[contestant.name].append(contestant.try_case(case, valid, invalid))
    return outcomes


def report(outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """The figures of one set: how many schemas, and each library's."""
    rounds = [dict(zip(outcomes, each, strict=True)) for each in zip(*outcomes.values(), strict=True)]
    both = [each for each in rounds if all(outcome.is_compiled for outcome in each.values())]
    return {
        "schemas": len(rounds),
        "compiled_by_both": len(both),
        **{name: counts(outcomes[name]) | times(name, both) for name in outcomes},
    }


def counts(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Schemas compiled and refused, and texts judged wrongly under the compiled ones."""
    compiled = [outcome for outcome in outcomes if outcome.is_compiled]
    valid = [verdict for outcome in compiled for verdict in outcome.valid]
    invalid = [verdict for outcome in compiled for verdict in outcome.invalid]
    return {
        "compiled": len(compiled),
        "refused": sum(outcome.refused is not None for outcome in outcomes),
        "failed": sum(outcome.failed is not None for outcome in outcomes),
        "compiled_and_never_wrong": sum(outcome.is_right for outcome in compiled),
        "valid_texts": len(valid),
        "wrongly_rejected": valid.count(False),
        "invalid_texts": len(invalid),
        "wrongly_accepted": invalid.count(True),
    }


def times(name: str, rounds: Sequence[Mapping[str, Outcome]]) -> dict[str, float]:
    """One library's times over schemas that all compile and texts that all accept."""
    compiles = [each[name].compile_s for each in rounds]
    walks = [
        walk
        for each in rounds
        for number, walk in enumerate(each[name].timed)
        if all(other.timed[number]["is_accepted"] for other in each.values())
    ]
    firsts = [walk["mask_s"][0] for walk in walks if walk["mask_s"]]
    masks = [seconds for walk in walks for seconds in walk["mask_s"]]
    steps = [seconds for walk in walks for seconds in walk["consume_s"]]
    return {
        "masks": len(masks),
        **distribution("compile_ms", compiles, 1e3),
        **distribution("first_mask_us", firsts, 1e6),
        **distribution("mask_us", masks, 1e6),
        **distribution("consume_us", steps, 1e6),
    }


Cell = Callable[[Mapping[str, Any], int], str]

ROWS: tuple[tuple[str, Cell], ...] = (
    ("schemas compiled", lambda it, total: f"{it['compiled'] / total:.1%} of {total}"),
    ("refused, failed", lambda it, total: f"{it['refused']}, {it['failed']}"),
    ("compiled, and no text judged wrongly", lambda it, total: f"{it['compiled_and_never_wrong'] / total:.1%}"),
    ("valid texts rejected", lambda it, total: f"{it['wrongly_rejected']:,} of {it['valid_texts']:,}"),
    ("invalid texts accepted", lambda it, total: f"{it['wrongly_accepted']:,} of {it['invalid_texts']:,}"),
    ("compiling, ms", lambda it, total: _three(it, "compile_ms")),
    ("first mask, µs", lambda it, total: _three(it, "first_mask_us")),
    ("mask, µs", lambda it, total: _three(it, "mask_us")),
    ("consuming a token, µs", lambda it, total: _three(it, "consume_us")),
)


def table(result: Mapping[str, Any]) -> str:
    """Markdown: a row for each measure, a column for each library and set; times are p50, p99 and maximum."""
    libraries = result["libraries"]
    columns = [(figures, name) for figures in result["sets"].values() for name in libraries]
    titles = [f"{title}, {name}" for title in result["sets"] for name in libraries]
    rows = [[label, *(cell(each[name], each["schemas"]) for each, name in columns)] for label, cell in ROWS]
    builds = [f"{libraries[name]['tokenizer_s']:.2f}" for _, name in columns]
    lines = [["", *titles], ["---"] * (len(titles) + 1), *rows, ["building the tokenizer, s", *builds]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _three(figures: Mapping[str, Any], name: str) -> str:
    values = [figures[f"{name}_{label}"] for label in AT if f"{name}_{label}" in figures]
    return ", ".join(f"{value:,.1f}" if value < 100 else f"{value:,.0f}" for value in values) or "–"


if __name__ == "__main__":
    sys.exit(main())
