"""Drafts beside those of vLLM on CPUs: time per token, and whether drafts change the answers.

    python -m benchmarks.speculation_peers [--tokens 96] [--rounds 1] [--json FILE]

The prompts are those of `benchmarks.speculation`, without forms and predictions, answered greedily, one at a time, to
the same length. In each round each engine is started, in its own environment, and asked everything once: first for one
token, so that its prefix cache has the prompt, then for all; the difference is decoding. The prompts of the fresh chat
are asked once more for the retry. An answer has changed if its tokens are not those of the same engine without drafts.

vLLM is what `make bench-peers PEERS=vllm` installs, which tries to install the library of its suffix decoding, too.
What is missing, or does not start, is left out with a line.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.drafting.questions import Question, Reader
from benchmarks.drafting.statistics import markdown
from benchmarks.drafting.workloads import WORKLOADS
from benchmarks.machine import describe, public_name
from benchmarks.peers.process import Worker, WorkerError
from benchmarks.peers.roster import DEFAULT_HOME, PEERS, RAYDIX, Peer, Site
from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model

NAMES = ("edits", "documents", "extraction", "agents", "chats", "retry")
"""Workloads in the order in which each engine is asked: the retry after its first time."""
SPECULATIVE = {
    "n-gram": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 32},
}
"""vLLM's configurations."""
MAX_MODEL_LEN = 4096
WARM_PROMPT = [token_id for token_id in range(1000, 1040) for _ in range(4)] * 2


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine with or without drafts."""

    peer: Peer
    plain: str | None = None
    """Title of the same engine without drafts; None for that one."""

    @property
    def title(self) -> str:
        return self.peer.title


@dataclass(slots=True)
class Found:
    """Measurements of one contender."""

    introduction: Mapping[str, Any] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Per token, by workload, one for each round."""
    answers: dict[str, list[list[int]]] = field(default_factory=dict)
    """Tokens of the last round, by workload."""


def contenders() -> list[Contender]:
    """raydix and vLLM, each without drafts first."""
    vllm = PEERS["vllm"]
    drafting = replace(
        RAYDIX,
        name="raydix_drafts",
        title="raydix, drafts",
        engine="raydix",
        options=lambda site: RAYDIX.options(site) | {"drafts": True},
    )
    return [Contender(RAYDIX), Contender(drafting, RAYDIX.title), Contender(vllm), *map(_speculating, SPECULATIVE)]


def _speculating(method: str) -> Contender:
    """vLLM with drafts."""
    vllm = PEERS["vllm"]
    peer = replace(
        vllm,
        title=f"{vllm.title}, {method}",
        options=lambda site: vllm.options(site) | {"speculative": SPECULATIVE[method]},
        missing=_no_suffix_decoding if method == "suffix" else vllm.missing,
    )
    return Contender(peer, vllm.title)


def _no_suffix_decoding(site: Site) -> str | None:
    found = any((site.home / "vllm").glob("lib/python*/site-packages/arctic_inference"))
    return None if found else "its library of suffix decoding is not installed (make bench-peers PEERS=vllm)"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.speculation_peers", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--peers-home", type=Path, default=DEFAULT_HOME, help="where the peers' environments are")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each answer behind the first")
    parser.add_argument("--rounds", type=int, default=1, help="how often each engine is started")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args(arguments)

    result: dict[str, Any] = describe("benchmarks.speculation_peers", sys.argv[1:] if arguments is None else arguments)
    site = Site(options.peers_home.expanduser(), resolve_model(options.model), None)
    reader = Reader(site.model, MAX_MODEL_LEN)
    questions = {name: reader.questions(WORKLOADS[name]) for name in NAMES}
    found, left_out = run(contenders(), site, questions, options.tokens, options.rounds)

    figures = report(contenders(), found)
    print(table(figures))
    for title, reason in left_out.items():
        print(f"{title}: not run, {reason}")
    if options.json is not None:
        result |= {"model": public_name(options.model), "tokens": options.tokens, "rounds": options.rounds}
        result |= {"engines": figures, "not_run": left_out}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def run(
    asked: Sequence[Contender],
    site: Site,
    questions: Mapping[str, Sequence[Question]],
    num_tokens: int,
    rounds: int,
) -> tuple[dict[str, Found], dict[str, str]]:
    """The measurements of the contenders that can be run, and the reasons of the others."""
    found: dict[str, Found] = {}
    left_out = {each.title: reason for each in asked if (reason := each.peer.why_not(site)) is not None}
    with tempfile.TemporaryDirectory(prefix="raydix-peers-") as folder:
        for number in range(rounds):
            for contender in asked[:: -1 if number % 2 else 1]:
                if contender.title in left_out:
                    continue
                try:
                    log = Path(folder, f"{contender.title}.log")
                    measure(contender, site, log, questions, num_tokens, found.setdefault(contender.title, Found()))
                    print(f"{contender.title}: done", file=sys.stderr, flush=True)
                except WorkerError as error:
                    left_out[contender.title] = str(error)
                    found.pop(contender.title)
    return found, left_out


def measure(
    contender: Contender,
    site: Site,
    log: Path,
    questions: Mapping[str, Sequence[Question]],
    num_tokens: int,
    found: Found,
) -> None:
    """Start an engine and ask everything once. Raises WorkerError if the engine fails."""
    worker = Worker(contender.peer, site, log)
    try:
        found.introduction = {"version": worker.introduction.version, "settings": worker.introduction.settings}
        for _ in range(2):
            worker.generate([WARM_PROMPT], 32)
        for name, asked in questions.items():
            answered = [_ask(worker, list(question.prompt), num_tokens) for question in asked]
            per_token = [seconds / num_tokens for seconds, _ in answered]
            found.seconds.setdefault(name, []).append(statistics.fmean(per_token))
            found.answers[name] = [tokens for _, tokens in answered]
    finally:
        worker.close()


def _ask(worker: Worker, prompt: list[int], num_tokens: int) -> tuple[float, list[int]]:
    """Seconds of decoding, and the tokens."""
    worker.generate([prompt], 1)
    first_s, _ = worker.generate([prompt], 1)
    whole_s, [tokens] = worker.generate([prompt], 1 + num_tokens)
    return whole_s - first_s, tokens


def report(asked: Sequence[Contender], found: Mapping[str, Found]) -> dict[str, Any]:
    """The figures of each contender that was run, ready for JSON."""
    plain = {each.title: found.get(each.plain or each.title) for each in asked}
    return {
        title: {
            **measured.introduction,
            "workloads": {name: figures(name, measured, plain[title]) for name in measured.seconds},
        }
        for title, measured in found.items()
    }


def figures(name: str, found: Found, plain: Found | None) -> dict[str, Any]:
    """The figures of one workload, compared with the same engine without drafts, which may be missing."""
    seconds = statistics.median(found.seconds[name])
    measured: dict[str, Any] = {
        "ms_per_token": round(1e3 * seconds, 3),
        "rounds": [round(1e3 * each, 3) for each in found.seconds[name]],
    }
    if plain is None or plain is found:
        return measured
    pairs = list(zip(found.answers[name], plain.answers[name], strict=True))
    return measured | {
        "times_as_fast": round(statistics.median(plain.seconds[name]) / seconds, 3),
        "answers": len(pairs),
        "changed_answers": sum(one != other for one, other in pairs),
    }


def table(engines: Mapping[str, Any]) -> str:
    """A row for each workload, a column for each engine: ms per token, how many times as fast as without drafts, and
    how many answers have changed."""
    names = list(next(iter(engines.values()))["workloads"]) if engines else []
    rows = [[WORKLOADS[name].title, *(_cell(each["workloads"][name]) for each in engines.values())] for name in names]
    return markdown(["ms per token", *engines], rows)


def _cell(measured: Mapping[str, Any]) -> str:
    text = f"{measured['ms_per_token']:.2f}"
    if "times_as_fast" not in measured:
        return text
    changed = f"{measured['changed_answers']} of {measured['answers']} changed"
    return f"{text} (x {measured['times_as_fast']:.2f}, {changed})"


if __name__ == "__main__":
    sys.exit(main())
