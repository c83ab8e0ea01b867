"""raydix beside other CPU engines on the same weights, without HTTP: prefill, decode and full prefix hits.

    python -m benchmarks.engine [--peers all|none|NAME ...] [--rounds 3] [--json FILE]

Each engine is loaded in a process and an environment of its own (`make bench-peers` makes them; what is not installed
is left out with a line). They stay loaded and idle while one of them works; a round goes through all cases and, in
each, through all engines, starting with another one each time. Medians over the rounds are reported, and how many times
as long as raydix each peer takes. That all compute the same model is checked by comparing their greedy tokens for a
fixed text.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import begin, command_parser, markdown
from benchmarks.machine import public_name
from benchmarks.peers.comparison import CASES, CHECK_TOKENS, Comparison, ComparisonCase, Contender
from benchmarks.peers.roster import DEFAULT_HOME, PEERS, RAYDIX, Peer, Site
from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("benchmarks.engine", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--peers", nargs="+", default=["all"], help=f"all, none, or of: {', '.join(PEERS)}")
    parser.add_argument("--peers-home", type=Path, default=DEFAULT_HOME, help="where their environments are")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repetitions; the medians are reported")
    options, output = begin(parser, arguments)
    try:
        peers = chosen(options.peers)
    except ValueError as error:
        parser.error(str(error))

    site = Site(options.peers_home.expanduser(), resolve_model(options.model))
    comparison = Comparison(site)

    try:
        comparison.load([RAYDIX, *peers])
        if RAYDIX.name in comparison.left_out:
            return 1
        comparison.run(CASES, options.rounds)
    finally:
        comparison.close()

    print(table(comparison.contenders))
    output.write({"model": public_name(options.model), "rounds": options.rounds, **report(comparison)})

    return 0


def chosen(names: Sequence[str]) -> list[Peer]:
    """Return the peers that `--peers` names.

    Raises:
        ValueError: there is no such peer.
    """
    if list(names) in (["all"], ["none"]):
        return list(PEERS.values()) if names[0] == "all" else []
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ValueError(f"no such peer: {', '.join(unknown)}; there are: {', '.join(PEERS)}")
    return [PEERS[name] for name in names]


def report(comparison: Comparison) -> dict[str, Any]:
    """All measurements, ready for JSON."""
    raydix = comparison.contenders[0]
    return {
        "engines": {
            contender.peer.name: {
                "version": contender.worker.introduction.version,
                "settings": _public(contender.worker.introduction.settings),
                "greedy_tokens_as_raydix": f"{contender.agrees} of {CHECK_TOKENS}",
                "cases": {case.name: _case(case, contender, raydix) for case in CASES if contender.median(case)},
            }
            for contender in comparison.contenders
        },
        "left_out": comparison.left_out,
    }


def table(contenders: Sequence[Contender]) -> str:
    """Markdown: a row for each case, a column for each engine, with the ratio of its time to raydix's."""
    raydix = contenders[0]
    header = ["", *(f"{it.peer.title} {it.worker.introduction.version}" for it in contenders)]
    rows = [[case.name, *(_cell(case, contender, raydix) for contender in contenders)] for case in CASES]
    agreement = [f"{contender.agrees} of {CHECK_TOKENS}" for contender in contenders]
    rows.append(["greedy tokens as raydix", *agreement])
    return markdown(header, rows)


def _case(case: ComparisonCase, contender: Contender, raydix: Contender) -> dict[str, Any]:
    median = contender.median(case)
    assert median is not None
    figures = {name: round(value, 2) for name, value in case.figures(median).items()}
    ratio = _ratio(case, contender, raydix)
    return {
        **figures,
        "rounds_s": [round(seconds, 6) for seconds in contender.seconds[case.name]],
        "time_over_raydix": None if ratio is None else round(ratio, 3),
    }


def _cell(case: ComparisonCase, contender: Contender, raydix: Contender) -> str:
    median = contender.median(case)
    if median is None:
        return "–"
    units = {"tokens_per_s": "{:,.0f} tok/s", "ms_per_step": "{:.1f} ms", "first_token_ms": "{:.1f} ms"}
    text = ", ".join(units[name].format(value) for name, value in case.figures(median).items())
    ratio = _ratio(case, contender, raydix)
    return text if contender is raydix or ratio is None else f"{text} (x {ratio:.2f})"


def _ratio(case: ComparisonCase, contender: Contender, raydix: Contender) -> float | None:
    """Ratio of the contender's time to raydix's: above 1, raydix is faster."""
    own, other = raydix.median(case), contender.median(case)
    return other / own if own and other else None


def _public(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: public_name(value) if isinstance(value, str) else value for name, value in settings.items()}


if __name__ == "__main__":
    sys.exit(main())
