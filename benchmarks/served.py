"""raydix beside `vllm serve`, over HTTP: the same weights, cores and load, in turns.

    python -m benchmarks.served [--config cpu_mixed cpu] [--rounds 2] [--alone] [--json FILE]

In each round each server is started, loaded with every scenario, and stopped; every other round goes the other way
round. Medians over the rounds are reported, and the first server's figure over each other's. `vllm bench serve` sends
unique and shared prompts, and `benchmarks.conversations` the turns of chats. raydix is started with each configuration.
vLLM is what `make bench-peers PEERS=vllm` installs, once as it starts by itself, which leaves a core of two to all but
the engine, and once with its engine on all cores and the libraries that measured best for it (see `peers.roster`);
`--alone` leaves its server out.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks import conversations
from benchmarks.command import begin, command_parser, markdown
from benchmarks.peers.roster import DEFAULT_HOME, MAX_REQUESTS, PEERS, POOL_GIB, RAYDIX, ROOT, Site, process_environment
from raydix.cli.cluster import free_port
from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model

READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
WARM_UP = conversations.ConversationLoad(users=1, turns=1, output_tokens=8)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load, and the figure that measures the server under it."""

    name: str
    load: str
    """Options of `vllm bench serve` with its random prompts, or the module of another load."""
    figure: str
    """Name of the figure in what `measure` returns."""
    unit: str

    def readings(self) -> list["Scenario"]:
        """The scenario, and the same load by its first tokens and its longest gap."""
        return [self, *(replace(self, name=f"{self.name}: {name}", figure=at, unit="ms") for name, at in LATENCIES)]


LATENCIES = (("first token, median", "first_token_ms"), ("longest gap", "longest_gap_ms"))
CONVERSATIONS = "benchmarks.conversations"
SCENARIOS = (
    Scenario(
        "512 in, 64 out, 8 streams",
        "--random-input-len 512 --random-output-len 64 --max-concurrency 8 --num-prompts 40 --seed 1",
        "output_tokens_per_s",
        "tok/s",
    ),
    Scenario(
        "1,024 shared + 64 in, 64 out, 8 streams",
        "--random-prefix-len 1024 --random-input-len 64 --random-output-len 64 --max-concurrency 8 --num-prompts 40"
        " --seed 2",
        "output_tokens_per_s",
        "tok/s",
    ),
    Scenario("chat, 8 users, 5 turns", CONVERSATIONS, "later_first_token_ms", "ms to the first token of later turns"),
)


@dataclass(frozen=True, slots=True)
class Server:
    """Way to start a server."""

    name: str
    command: tuple[str, ...]
    """Command line without the port, which goes last."""
    environment: Mapping[str, str]


def raydix_servers(site: Site, configs: Sequence[str]) -> list[Server]:
    command = (sys.executable, "-m", "raydix.cli.main", "serve", "--config")
    environment = process_environment(RAYDIX, site)
    return [Server(f"raydix {config}", (*command, config, "--port"), environment) for config in configs]


def vllm_servers(site: Site) -> list[Server]:
    """vLLM as it starts by itself, and with its best measured settings."""
    settings = {
        "--dtype": "bfloat16",
        "--max-model-len": "4096",
        "--max-num-seqs": str(MAX_REQUESTS),
        "--kv-cache-memory-bytes": str(POOL_GIB << 30),
        "--host": "127.0.0.1",
    }
    options = [word for pair in settings.items() for word in pair]
    command = (str(vllm_program(site)), "serve", str(site.model), "--enable-prompt-tokens-details", *options, "--port")
    tuned = process_environment(PEERS["vllm"], site)
    tuned["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{(os.cpu_count() or 1) - 1}"
    del tuned["VLLM_ENABLE_V1_MULTIPROCESSING"]
    return [
        Server("vLLM CPU", command, vllm_environment(site)),
        Server("vLLM CPU, all cores", command, tuned),
    ]


def vllm_program(site: Site) -> Path:
    return PEERS["vllm"].python(site).with_name("vllm")


def vllm_environment(site: Site) -> dict[str, str]:
    """The environment of vLLM's programs without the settings that measured best."""
    tuned = process_environment(PEERS["vllm"], site)
    return {name: value for name, value in tuned.items() if name not in PEERS["vllm"].environment(site)}


@contextmanager
def running(server: Server, log: Path) -> Iterator[str]:
    """Yield the server's address, once it answers; every process of it ends with the block."""
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*server.command, str(port)], env=dict(server.environment), stdout=output, stderr=output, cwd=ROOT
        )

    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"benchmarks.served: {server.name} does not start; it said:\n{log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield url
    finally:
        _end(process)


def _answers(url: str) -> bool:
    """Whether the server has its model, and can serve it: each has /health but one, which has nothing there."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response:
            if response.status != 200:
                return False
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except urllib.error.HTTPError as error:
        return error.code == 404
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    process.kill()
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()


def measure(url: str, scenario: Scenario, site: Site, folder: Path) -> dict[str, float]:
    """Load the server and return each reading of the scenario by its name."""
    if scenario.load == CONVERSATIONS:
        found = asyncio.run(conversations.measure(url, conversations.ConversationLoad()))
    else:
        found = random_prompts(url, scenario.load, site, folder)
    return {reading.name: round(found[reading.figure], 2) for reading in scenario.readings()}


def random_prompts(url: str, load: str, site: Site, folder: Path) -> dict[str, float]:
    """Figures of `vllm bench serve`. Raises CalledProcessError if it fails, RuntimeError if a request does."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response:
        model = json.load(response)["data"][0]["id"]
    command = [str(vllm_program(site)), "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"]
    command += ["--base-url", url, "--model", model, "--tokenizer", str(site.model), "--dataset-name", "random"]
    command += ["--temperature", "0", "--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]
    command += ["--result-dir", str(folder), "--result-filename", "load.json"]
    # A ready check would send the first prompt beforehand, and the cache would have it.
    command += ["--ready-check-timeout-sec", "0", *load.split()]
    subprocess.run(command, check=True, cwd=folder, env=vllm_environment(site), stdout=subprocess.DEVNULL)

    result = json.loads((folder / "load.json").read_text())
    if result["completed"] < result["num_prompts"]:
        raise RuntimeError(f"{result['completed']} of {result['num_prompts']} requests were answered")
    return {
        "output_tokens_per_s": result["output_throughput"],
        "first_token_ms": result["median_ttft_ms"],
        "longest_gap_ms": 1e3 * max(itertools.chain.from_iterable(result["itls"])),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("benchmarks.served", __doc__)
    parser.add_argument("--config", nargs="+", default=["cpu_mixed"], help="raydix's configurations")
    parser.add_argument("--alone", action="store_true", help="without vLLM's server")
    parser.add_argument("--rounds", type=int, default=2, help="how often each server is started; medians are reported")
    parser.add_argument("--peers-home", type=Path, default=DEFAULT_HOME, help="where the peers' environments are")
    options, output = begin(parser, arguments)
    site = Site(options.peers_home.expanduser(), resolve_model(DEFAULT_MODEL))
    if reason := PEERS["vllm"].why_not(site):
        parser.error(f"vllm, which loads the servers: {reason}")

    contenders = raydix_servers(site, options.config) + ([] if options.alone else vllm_servers(site))
    readings = [reading for scenario in SCENARIOS for reading in scenario.readings()]
    figures: dict[str, dict[str, list[float]]] = {reading.name: {} for reading in readings}

    with tempfile.TemporaryDirectory(prefix="raydix-served-") as folder:
        for number in range(options.rounds):
            for server in contenders[:: -1 if number % 2 else 1]:
                with running(server, Path(folder, f"{server.name}.log")) as url:
                    asyncio.run(conversations.measure(url, WARM_UP))
                    for scenario in SCENARIOS:
                        for name, value in measure(url, scenario, site, Path(folder)).items():
                            figures[name].setdefault(server.name, []).append(value)
                            print(f"{server.name}, {name}: {value:.1f}", file=sys.stderr)

    rows = [row(reading, figures[reading.name], contenders[0].name) for reading in readings]
    print(table(rows))
    output.write({"rounds": options.rounds, "scenarios": rows})
    return 0


def row(scenario: Scenario, figures: Mapping[str, Sequence[float]], first: str) -> dict[str, Any]:
    """A reading's medians, ready for JSON, and those of the server `first` over the others'."""
    medians = {name: statistics.median(values) for name, values in figures.items()}
    medians = {first: medians.pop(first), **medians}
    ratios = {name: round(medians[first] / median, 3) for name, median in medians.items() if name != first}
    return {
        "scenario": scenario.name,
        "load": scenario.load,
        "unit": scenario.unit,
        "medians": medians,
        "first_over": ratios,
        "rounds": dict(figures),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row for each reading, a column for each server, and the first one's figure over the others'."""
    names = list(rows[0]["medians"])
    lines = []
    for each in rows:
        ratios = {name: f" (x {ratio:.2f})" for name, ratio in each["first_over"].items()}
        cells = [f"{each['medians'][name]:.1f}{ratios.get(name, '')}" for name in names]
        lines.append([f"{each['scenario']}, {each['unit']}", *cells])
    return markdown(["", *names], lines)


if __name__ == "__main__":
    sys.exit(main())
