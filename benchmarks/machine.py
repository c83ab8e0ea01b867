"""Circumstances of a figure: machine, versions and command, for every benchmark's result file.

Results are published, so nothing here names a host, a user or a folder: paths in the command keep only their last part
(`public_name` defines a path), and a server that is not on this machine appears as `HOST`.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

FILE_SUFFIXES = frozenset({".csv", ".gguf", ".json", ".jsonl", ".png", ".svg", ".txt", ".yaml", ".yml"})
PACKAGES = ("raydix", "ray", "torch", "triton", "transformers", "numpy", "aiohttp", "uvloop")


def describe(module: str, argv: Sequence[str], packages: Sequence[str] = PACKAGES) -> dict[str, object]:
    """Machine, versions, command and time of a run of `python -m module argv`, ready for JSON."""
    return {
        "machine": describe_machine(),
        "versions": describe_versions(packages),
        "command": command_line(module, argv),
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def describe_machine() -> dict[str, object]:
    """CPU, cores this process may use, memory, system, GPUs, and how busy the machine already was."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine: dict[str, object] = {
        "cpu": _cpu_model(),
        "cpus": usable,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average_1min": round(os.getloadavg()[0], 2),
    }
    gpus = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return machine | ({"gpus": gpus.splitlines()} if gpus else {})


def describe_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python, of the installed ones among `packages`, and the commit of the source tree, marked
    `-dirty` if more than results has changed since."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    git = ("git", "-C", str(Path(__file__).parent))
    commit = _output(*git, "describe", "--always", "--exclude=*")
    changed = _output(*git, "status", "--porcelain", "-uno", "--", ":/", ":(top,exclude)benchmarks/results")
    return versions | ({"commit": commit + ("-dirty" if changed else "")} if commit else {})


def command_line(module: str, argv: Sequence[str]) -> str:
    """The command as one would type it again elsewhere, without folders or host names."""
    return f"python -m {module} {shlex.join(map(_public_argument, argv))}".rstrip()


def public_name(text: str) -> str:
    """Return `text`, or its last part if it is a path: absolute or relative to a home, to here or to a parent, of three
    parts or more, or of two of which the last is a file by its suffix. `org/name` and `package:name/file` are names of
    models."""
    parts = text.split("/")
    is_relative = len(parts) > 2 or (len(parts) == 2 and Path(text).suffix in FILE_SUFFIXES)
    is_path = text.startswith(("/", "~", "./", "../")) or (is_relative and not re.search(r"[\s:]", parts[0]))
    return Path(text).name if is_path else text


def public_url(url: str) -> str:
    """Return `url` with credentials dropped, and with `HOST` for a host that is not this machine."""
    parts = urlsplit(url)
    host = (parts.hostname or "") if is_loopback(parts.hostname or "") else "HOST"
    host = f"[{host}]" if ":" in host else host
    return parts._replace(netloc=host + (f":{parts.port}" if parts.port else "")).geturl()


def is_loopback(host: str) -> bool:
    """True if `host` names this machine's loopback interface, decided without asking a name server."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _public_argument(argument: str) -> str:
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    value = public_url(value) if re.match(r"https?://", value) else public_name(value)
    return option + equals + value


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.M) if cpuinfo.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def _output(*command: str) -> str:
    """Output of `command`; empty if the command is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
