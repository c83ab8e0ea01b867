"""Where the processes of a running server spend their time: a flame graph of each.

    python -m benchmarks.profile [--pid PID] [--seconds 20] [--folder build/profile] [--native]

Samples the stacks of every Python process of a `raydix serve` for the same seconds, with py-spy, which needs no change
of the server and the rights to trace it (root, or `kernel.yama.ptrace_scope` 0). Send the load that you want to see
meanwhile. Prints the processor time of each process in these seconds, and names its graph. `--native`: the functions
of C and C++, too, as the kernels are; each sample takes longer then.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import psutil

from benchmarks.start import name_of

PY_SPY = Path(sys.executable).with_name("py-spy")
SAMPLES_PER_S = 100


class ProfileError(Exception):
    """Nothing can be profiled; the message says why."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pid", type=int, help="the process `raydix serve` (default: the only one of this machine)")
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("build/profile"))
    parser.add_argument("--native", action="store_true")
    arguments = parser.parse_args()
    try:
        server = found(arguments.pid)
        for line in profile(server, arguments.seconds, arguments.folder, native=arguments.native):
            print(line)
    except (ProfileError, psutil.Error) as error:
        sys.exit(f"error: {error}")


def found(pid: int | None) -> psutil.Process:
    """The server to be profiled. Raises ProfileError unless it is the only one."""
    if pid is not None:
        return psutil.Process(pid)
    servers = [process for process in psutil.process_iter(["cmdline"]) if _is_server(process.info["cmdline"] or [])]
    outermost = [server for server in servers if server.parent() not in servers]
    if len(outermost) != 1:
        pids = ", ".join(str(server.pid) for server in outermost) or "none"
        raise ProfileError(f"choose a `raydix serve` with --pid; running: {pids}")
    return outermost[0]


def profile(server: psutil.Process, seconds: int, folder: Path, *, native: bool) -> list[str]:
    """Sample all Python processes below a server at once; returns a line for each, those first that used most."""
    folder.mkdir(parents=True, exist_ok=True)
    before: dict[psutil.Process, float] = {}
    spies: dict[psutil.Process, tuple[str, Path, subprocess.Popen[str]]] = {}
    for process in (server, *server.children(recursive=True)):
        if not _is_python(process):
            continue
        name = name_of(process.cmdline(), process.name()).replace("ray::", "").replace("/", "-").replace(" ", "-")
        graph = folder / f"{name.replace(':', '-')}-{process.pid}.svg"
        command = [str(PY_SPY), "record", "--pid", str(process.pid), "--output", str(graph), "--duration", str(seconds)]
        command += ["--rate", str(SAMPLES_PER_S), "--nonblocking", *(["--native"] if native else [])]
        before[process] = sum(process.cpu_times()[:2])
        spy = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        spies[process] = name, graph, spy
    if not spies:
        raise ProfileError(f"process {server.pid} runs no Python")

    time.sleep(seconds)
    used = {process: sum(process.cpu_times()[:2]) - before[process] for process in spies if process.is_running()}
    lines = []
    for process in sorted(spies, key=lambda each: -used.get(each, 0.0)):
        name, graph, spy = spies[process]
        said = spy.communicate()[1].strip().splitlines()
        why = next((line for line in said if line.startswith("Error")), f"py-spy ended with {spy.returncode}")
        shown = str(graph) if spy.returncode == 0 else f"no graph: {why}"
        lines.append(f"{used.get(process, 0.0):7.2f} s  {name}  {shown}")
    return lines


def _is_server(command: list[str]) -> bool:
    return "serve" in command and any(Path(word).name in ("raydix", "raydix.cli.main") for word in command[:4])


def _is_python(process: psutil.Process) -> bool:
    return "python" in Path(process.exe()).name


if __name__ == "__main__":
    main()
