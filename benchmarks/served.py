"""raydix beside `vllm serve`, over HTTP: the same weights, cores and load, in turns.

    python -m benchmarks.served [--config cpu_mixed] [--rounds 2] [--json FILE]

In each round each server is started, loaded by `benchmarks.serve` with every scenario, and stopped; every other round
goes the other way round. Medians over the rounds are reported, and raydix's figure over each other's. vLLM is what
`make bench-peers PEERS=vllm` installs, once as it starts by itself, which leaves a core of two to all but the engine,
and once with its engine on all cores and the libraries that measured best for it (see `peers.roster`).
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import describe
from benchmarks.peers.roster import DEFAULT_HOME, MAX_REQUESTS, PEERS, POOL_GIB, RAYDIX, ROOT, Site, process_environment
from cli.serve import free_port
from engine.model.sources import DEFAULT_MODEL, resolve_model

READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load, and the figure that tells how it was borne."""

    name: str
    load: str
    """Options of `benchmarks.serve`."""
    figure: tuple[str, ...]
    """Where it is in the report's summary."""
    unit: str

    def read(self, report: Mapping[str, Any]) -> float:
        value: Any = report["summary"]
        for key in self.figure:
            value = value[key]
        return float(value)


SCENARIOS = (
    Scenario(
        "512 in, 64 out, 8 streams",
        "--workload unique --input-tokens 512 --output-tokens 64 --concurrency 8 --requests 40",
        ("output_tokens_per_s",),
        "tok/s",
    ),
    Scenario(
        "1,024 shared + 64 in, 64 out, 8 streams",
        "--workload shared --shared-tokens 1024 --unique-tokens 64 --output-tokens 64 --concurrency 8 --requests 40",
        ("output_tokens_per_s",),
        "tok/s",
    ),
    Scenario(
        "chat, 8 users, 5 turns: first token of later turns",
        "--workload chat --users 8 --turns 5",
        ("later_turn_ttft_ms", "p50"),
        "ms",
    ),
)


@dataclass(frozen=True, slots=True)
class Server:
    """How a server is started."""

    name: str
    command: tuple[str, ...]
    """Without the port, which goes last."""
    environment: Mapping[str, str]


def servers(site: Site, config: str) -> list[Server]:
    """Raydix first."""
    raydix = (sys.executable, "-m", "cli.main", "serve", "--config", config, "--port")
    settings = {
        "--dtype": "bfloat16",
        "--max-model-len": "4096",
        "--max-num-seqs": str(MAX_REQUESTS),
        "--kv-cache-memory-bytes": str(POOL_GIB << 30),
        "--host": "127.0.0.1",
    }
    options = [word for pair in settings.items() for word in pair]
    program = PEERS["vllm"].python(site).with_name("vllm")
    vllm = (str(program), "serve", str(site.model), "--enable-prompt-tokens-details", *options, "--port")
    tuned = process_environment(PEERS["vllm"], site)
    plain = {name: value for name, value in tuned.items() if name not in PEERS["vllm"].environment(site)}
    tuned["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{(os.cpu_count() or 1) - 1}"
    del tuned["VLLM_ENABLE_V1_MULTIPROCESSING"]
    return [
        Server("raydix", raydix, process_environment(RAYDIX, site)),
        Server("vLLM CPU", vllm, plain),
        Server("vLLM CPU, all cores", vllm, tuned),
    ]


@contextmanager
def running(server: Server, log: Path) -> Iterator[str]:
    """The server's address, from when it answers on; every process of it ends with the block."""
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
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response:
            return bool(response.status == 200)
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


def measure(url: str, scenario: Scenario, report: Path) -> float:
    """Load the server and return the scenario's figure."""
    command = [sys.executable, "-m", "benchmarks.serve", "--url", url, "--no-progress", "--json", str(report)]
    subprocess.run([*command, *scenario.load.split()], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return scenario.read(json.loads(report.read_text()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.served", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--config", default="cpu_mixed", help="raydix's configuration")
    parser.add_argument("--rounds", type=int, default=2, help="how often each server is started; medians are reported")
    parser.add_argument("--peers-home", type=Path, default=DEFAULT_HOME, help="where the peers' environments are")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args(arguments)
    site = Site(options.peers_home.expanduser(), resolve_model(DEFAULT_MODEL), None)
    if reason := PEERS["vllm"].why_not(site):
        parser.error(f"vllm: {reason}")

    result = describe("benchmarks.served", sys.argv[1:] if arguments is None else list(arguments))
    contenders = servers(site, options.config)
    figures: dict[str, dict[str, list[float]]] = {scenario.name: {} for scenario in SCENARIOS}
    with tempfile.TemporaryDirectory(prefix="raydix-served-") as folder:
        for number in range(options.rounds):
            for server in contenders[:: -1 if number % 2 else 1]:
                with running(server, Path(folder, f"{server.name}.log")) as url:
                    for scenario in SCENARIOS:
                        value = measure(url, scenario, Path(folder, "report.json"))
                        figures[scenario.name].setdefault(server.name, []).append(round(value, 2))
                        print(f"{server.name}, {scenario.name}: {value:.1f} {scenario.unit}", file=sys.stderr)
    rows = [row(scenario, figures[scenario.name]) for scenario in SCENARIOS]
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps({**result, "rounds": options.rounds, "scenarios": rows}, indent=2) + "\n")
    return 0


def row(scenario: Scenario, figures: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """A scenario's medians, ready for JSON."""
    medians = {name: statistics.median(values) for name, values in figures.items()}
    ratios = {name: round(medians["raydix"] / median, 3) for name, median in medians.items() if name != "raydix"}
    return {
        "scenario": scenario.name,
        "load": scenario.load,
        "unit": scenario.unit,
        "medians": medians,
        "raydix_over": ratios,
        "rounds": dict(figures),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row for each scenario, a column for each server."""
    names = list(rows[0]["medians"])
    lines = [["", *names], ["---"] * (len(names) + 1)]
    for each in rows:
        ratios = {name: f" (raydix x {ratio:.2f})" for name, ratio in each["raydix_over"].items()}
        cells = [f"{each['medians'][name]:.1f}{ratios.get(name, '')}" for name in names]
        lines.append([f"{each['scenario']}, {each['unit']}", *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
