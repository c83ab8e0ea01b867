"""The first day on a GPU: what a machine with an NVIDIA GPU has to show, in order, in one JSON.

    python -m benchmarks.gpu_day [--stages kernels serve] [--json FILE] [--folder FOLDER]

Needs no network. Each stage says what it expects and where to look first if it does not hold; the first one that fails
ends the run with exit code 1. The served model is a Llama-3-8B with random weights, written to FOLDER (16 GB) with the
default model's tokenizer; what is measured depends on the shapes only.
"""

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.command import begin, command_parser
from benchmarks.kernel_cases import VOCABULARY
from benchmarks.model_cases import NUM_LAYERS, PROMPT, llama
from benchmarks.served import Server, running
from raydix.engine.model.sizes import expected_shapes
from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model
from raydix.engine.model.tokenizer import Tokenizer
from raydix.engine.model.weights import RandomTensors

ROOT = Path(__file__).parents[1]
TENSORS_PER_FILE = 60  # tensors of one file of weights


class StageError(Exception):
    """What a stage found wrong."""


@dataclass(frozen=True, slots=True)
class DayStage:
    """A part of the day."""

    name: str
    expectation: str
    advice: str
    """Where to look first when the stage fails."""
    run: Callable[["Day"], dict[str, Any]]
    missed: Callable[[Mapping[str, Any]], list[str]] = lambda _: []
    """Which expectations the figures that `run` returned do not meet. They are kept, whatever is missed."""


@dataclass(frozen=True, slots=True)
class DayLoad:
    """Requests that run at the same time, each with a prompt of its own."""

    streams: int
    prompt_tokens: int
    output_tokens: int

    def __str__(self) -> str:
        return f"{self.streams} x {self.prompt_tokens}"


# What the `serve` stage expects: seconds until the server answers, and the deterministic mode's speed in tokens per
# second as a share of the fast mode's.
COLD_S = 180.0
WARM_S = 30.0
DETERMINISTIC_SHARE = 0.9
LOADS = (DayLoad(1, 1024, 128), DayLoad(64, 1024, 128), DayLoad(256, 384, 128), DayLoad(1, PROMPT - 64, 1))


class Day:
    """The folder of the day, and the model in it."""

    def __init__(self, folder: Path, tokenizer: Path, num_layers: int) -> None:
        self.folder = folder
        self._tokenizer = tokenizer
        self._num_layers = num_layers
        self.kernels = folder / "triton"
        """Where Triton keeps what it compiled."""

    def compiled(self) -> Counter[str]:
        """The kernels that the servers of this folder compiled, with how many variants of each."""
        return Counter(file.stem for file in self.kernels.glob("*/*.cubin"))

    def command(self, *arguments: str) -> None:
        """Run a program of the project's and show what it prints. Raises `StageError` where it fails."""
        done = subprocess.run(arguments, cwd=ROOT, check=False)
        if done.returncode:
            raise StageError(f"`{' '.join(arguments)}` ended with exit code {done.returncode}")

    def model(self) -> Path:
        """The folder of the model, written when first asked for."""
        folder = self.folder / "model"
        if not folder.exists():
            write_model(folder, Tokenizer(self._tokenizer), self._num_layers)
        return folder


def write_model(folder: Path, tokenizer: Tokenizer, num_layers: int) -> None:
    """Write a Llama-3-8B of so many layers with random weights."""
    from safetensors.torch import save_file

    config = llama(num_layers)
    (partial := folder.with_suffix(".partial")).mkdir(parents=True)
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": PROMPT,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "eos_token_id": tokenizer.eos_token_ids[0],
    }
    (partial / "config.json").write_text(json.dumps(raw))
    (partial / "tokenizer.json").write_text(tokenizer.to_json())
    end = tokenizer.names([tokenizer.eos_token_ids[0]])[0]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": tokenizer.chat_template,
        "eos_token": end,
    }
    (partial / "tokenizer_config.json").write_text(json.dumps(settings))

    weights, names = RandomTensors(config, device="cuda"), list(expected_shapes(config))
    index: dict[str, str] = {}
    for number, first in enumerate(range(0, len(names), TENSORS_PER_FILE)):
        file = f"model-{number:05}.safetensors"
        tensors = {name: weights.tensor(name).cpu() for name in names[first : first + TENSORS_PER_FILE]}
        save_file(tensors, partial / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (partial / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    partial.rename(folder)


def _tests(day: Day) -> dict[str, Any]:
    day.command(
        *(sys.executable, "-m", "pytest", "-m", "gpu", "tests/kernels", "tests/model", "--numprocesses=8"),
    )
    return {}


def _sanitizer(day: Day) -> dict[str, Any]:
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {"skipped": "compute-sanitizer is not installed"}
    # The tests at the shapes of the interpreter: small, with every branch of every kernel.
    tests = ("-m", "pytest", "-m", "not gpu", "-k", "matches_reference", "tests/kernels/test_triton_rowwise.py")
    more = ("tests/kernels/test_triton_matmul.py", "tests/kernels/test_triton_attention.py")
    day.command(program, "--error-exitcode", "1", sys.executable, *tests, *more)
    return {}


def _kernels(day: Day) -> dict[str, Any]:
    file = day.folder / "kernels.json"
    day.command(sys.executable, "-m", "benchmarks.kernels", "--json", str(file))
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def _serve(day: Day) -> dict[str, Any]:
    """Start the server in each mode, and in the first one again with compiled kernels; compare answers, and load it.

    Raises `StageError` where an answer differs.
    """
    with _served(day, "deterministic", deterministic=True) as (url, cold_s):
        figures = _loaded(day, url, compare=True)
    with _served(day, "again", deterministic=True) as (_, warm_s):
        pass
    with _served(day, "fast", deterministic=False) as (url, _):
        fast = _loaded(day, url, compare=False)
    return {"ready_cold_s": cold_s, "ready_warm_s": warm_s, "deterministic": figures, "fast": fast}


@contextmanager
def _served(day: Day, name: str, *, deterministic: bool) -> Iterator[tuple[str, float]]:
    """A server's address, and the seconds until it answered."""
    config = day.folder / f"{name}.yaml"
    config.write_text(json.dumps({"model": {"deterministic": deterministic}}))  # JSON is YAML
    program = (sys.executable, "-m", "raydix.cli.main", "serve")
    options = ("--model", str(day.model()), "--config", "gpu_single", "--config", str(config), "--port")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(day.kernels)}
    began = time.monotonic()
    with running(Server("raydix", (*program, *options), environment), day.folder / f"{name}.log") as url:
        ready_s = round(time.monotonic() - began, 1)
        print(f"{name}: ready after {ready_s} s, {day.compiled().total()} kernels compiled", flush=True)
        yield url, ready_s


def _loaded(day: Day, url: str, *, compare: bool) -> dict[str, Any]:
    """What `_load` measures, and which kernels were compiled meanwhile, while requests waited."""
    before = day.compiled()
    found = asyncio.run(_load(url, compare=compare))
    compiled = dict(day.compiled() - before)
    print(f"compiled while serving: {compiled}", flush=True)
    return {**found, "compiled_while_serving": compiled}


def _missed(figures: Mapping[str, Any]) -> list[str]:
    """Which of the stage's expectations the figures of `_serve` do not meet."""
    missed = []
    if figures["ready_cold_s"] > COLD_S:
        missed.append(f"ready after {figures['ready_cold_s']} s with nothing compiled, expected {COLD_S:g} s")
    if figures["ready_warm_s"] > WARM_S:
        missed.append(f"ready after {figures['ready_warm_s']} s with compiled kernels, expected {WARM_S:g} s")
    for mode in ("deterministic", "fast"):
        if compiled := figures[mode]["compiled_while_serving"]:
            missed.append(f"kernels were compiled while requests waited ({mode} mode), expected none: {compiled}")
    for load in LOADS:
        figure = "decode_tokens_per_s" if load.output_tokens > 1 else "prefill_tokens_per_s"
        share = figures["deterministic"][str(load)][figure] / figures["fast"][str(load)][figure]
        if share < DETERMINISTIC_SHARE:
            missed.append(f"{load}: deterministic mode has {share:.2f} of fast mode's {figure}")
    return missed


async def _load(url: str, *, compare: bool) -> dict[str, Any]:
    """Tokens per second of each of `LOADS`, after `compare` has compared answers alone, in a crowd, and cached.

    Raises `StageError` where an answer differs.
    """
    found: dict[str, Any] = {}
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        if compare:
            prompts = _prompts(24, 700, seed=1)
            crowd = await asyncio.gather(*(_answer(session, prompt, 48) for prompt in prompts))
            cached = await asyncio.gather(*(_answer(session, prompt, 48) for prompt in reversed(prompts)))
            alone = [await _answer(session, prompt, 48) for prompt in prompts[:6]]
            if crowd != cached[::-1] or crowd[:6] != alone:
                raise StageError("answers differ between a crowd, the cache, and a request alone")
            found["equal_answers"] = len(crowd) + len(cached) + len(alone)

        for number, load in enumerate(LOADS):
            prompts = _prompts(load.streams, load.prompt_tokens, seed=100 + number)
            # Once without timing: whatever is prepared when first needed.
            began = time.monotonic()
            await asyncio.gather(*(_answer(session, prompt, 1) for prompt in prompts))
            prefill_s = time.monotonic() - began
            began = time.monotonic()
            await asyncio.gather(*(_answer(session, prompt, load.output_tokens) for prompt in prompts))
            seconds = time.monotonic() - began
            found[str(load)] = {
                "prefill_tokens_per_s": round(load.streams * load.prompt_tokens / prefill_s, 1),
                "decode_tokens_per_s": round(load.streams * load.output_tokens / seconds, 1),
            }
            print(f"{load}: {found[str(load)]}", flush=True)
    return found


def _prompts(count: int, length: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(1000, 40_000) for _ in range(length)] for _ in range(count)]


async def _answer(session: aiohttp.ClientSession, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """The tokens of a greedy answer, in full length."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    async with session.post("/v1/completions", json=body) as response:
        content = await response.json()
        if response.status != 200:
            raise StageError(f"a request was answered {response.status}: {content}")
    return tuple(content["choices"][0]["token_ids"])


STAGES = (
    DayStage("tests", "every test for GPUs passes", "the bits of the noise, shared memory", _tests),
    DayStage("sanitizer", "no access out of bounds", "padding, and the ends of block tables", _sanitizer),
    DayStage(
        "kernels",
        "all are right; decode attention at least 0.8 of a copy's speed, prefill at least 0.5 of the product's",
        "prefill attention; the deterministic mode of few rows",
        _kernels,
    ),
    DayStage(
        "serve",
        f"ready in {COLD_S:g} s cold and {WARM_S:g} s warm, equal answers, no kernel compiled while requests wait, "
        f"deterministic at least {DETERMINISTIC_SHARE} as fast",
        "the log in the folder: compile time and memory; near ties in the fast mode",
        _serve,
        _missed,
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages in order; returns the exit code."""
    parser = command_parser("benchmarks.gpu_day", __doc__)
    names = [stage.name for stage in STAGES]
    parser.add_argument("--stages", nargs="+", choices=names, default=names, help="by default all")
    parser.add_argument("--folder", type=Path, help="for the model and the logs; by default a temporary one")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer; by default the default model's")
    parser.add_argument("--layers", type=int, default=NUM_LAYERS, help="layers of the served model; by default all")
    options, output = begin(parser, argv)

    import torch

    if not torch.cuda.is_available():
        print("benchmarks.gpu_day needs an NVIDIA GPU that torch can use; found none", file=sys.stderr)
        return 2

    with tempfile.TemporaryDirectory(prefix="raydix-gpu-day-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        day = Day(folder, options.tokenizer or resolve_model(DEFAULT_MODEL), options.layers)
        stages: dict[str, Any] = {}
        for stage in STAGES:
            if stage.name not in options.stages:
                continue
            print(f"== {stage.name}: expected: {stage.expectation}", flush=True)
            began, problem = time.monotonic(), None
            try:
                stages[stage.name] = stage.run(day)
                problem = "; ".join(stage.missed(stages[stage.name])) or None
            except (StageError, OSError, SystemExit) as error:
                stages[stage.name], problem = {}, str(error)
            if problem is not None:
                stages[stage.name]["problem"] = problem
            stages[stage.name]["seconds"] = round(time.monotonic() - began, 1)
            output.write({"stages": stages})
            if problem is not None:
                print(f"{stage.name} failed: {problem}\nlook first at: {stage.advice}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
