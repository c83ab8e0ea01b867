"""The engines of the comparison: the place of each, its settings, and its process's environment.

Each peer has the settings that measured best for it on a small machine; all have the same weights, all cores, and KV
pools of the same size, in bfloat16. raydix takes part a second time, with int8 weights.
"""

import ctypes.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raydix.engine.model.sources import cache_folder

ROOT = Path(__file__).parents[2]
DEFAULT_HOME = cache_folder() / "peers"

POOL_GIB = 2
MAX_REQUESTS = 128


@dataclass(frozen=True, slots=True)
class Site:
    """Machine and model of the comparison."""

    home: Path
    """Folder of the peers' environments."""
    model: Path
    """Folder of the model in Hugging Face's layout."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine of the comparison."""

    name: str
    title: str
    own_environment: bool
    """True if the peer has an environment below the peers' home; otherwise it runs in raydix's."""
    options: Callable[[Site], dict[str, Any]]
    """Options for the peer's `load`."""
    missing: Callable[[Site], str | None] = lambda site: None
    """Reason why the peer cannot run, if it cannot."""
    environment: Callable[[Site], Mapping[str, str]] = lambda site: {}
    """Variables added to the environment of the peer's process."""
    engine: str = ""
    """The peer's file in `engines`, if it has another name."""

    def python(self, site: Site) -> Path:
        return environment_python(site.home, self.name) if self.own_environment else Path(sys.executable)

    def why_not(self, site: Site) -> str | None:
        """Reason why the peer cannot be compared here, in a few words; None if it can."""
        if self.own_environment and not self.python(site).exists():
            return "not installed (make bench-peers)"
        return self.missing(site)


def environment_python(home: Path, name: str) -> Path:
    return home / name / "bin" / "python"


def ir_folder(home: Path, model: Path) -> Path:
    """Folder of the model in OpenVINO's intermediate representation."""
    return home / "openvino-models" / model.name


def _raydix(site: Site) -> dict[str, Any]:
    return {"model": str(site.model), "pool_gib": POOL_GIB, "token_budget": 512, "max_requests": MAX_REQUESTS}


def _raydix_int8(site: Site) -> dict[str, Any]:
    return _raydix(site) | {"quantization": "int8"}


def _raydix_environment(site: Site) -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT)}


def _openvino(site: Site) -> dict[str, Any]:
    return {
        "ir": str(ir_folder(site.home, site.model)),
        "pool_gib": POOL_GIB,
        "token_budget": 2048,
        "max_requests": MAX_REQUESTS,
        "properties": {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"},
    }


def _no_ir(site: Site) -> str | None:
    return None if ir_folder(site.home, site.model).is_dir() else "the model is not converted (make bench-peers)"


def _vllm(site: Site) -> dict[str, Any]:
    return {"model": str(site.model), "pool_gib": POOL_GIB, "token_budget": 4096, "max_requests": MAX_REQUESTS}


def _vllm_environment(site: Site) -> dict[str, str]:
    """vLLM's documented best on CPU: Intel's OpenMP and tcmalloc preloaded, threads that sleep soon.

    One process, whose OpenMP threads are all cores: with a process for the scheduler, vLLM leaves a core of every two
    to the scheduler, and its worker polls for a second after each request, beside the engine whose turn it is.
    """
    libraries = (ctypes.util.find_library("tcmalloc_minimal"), site.home / "vllm" / "lib" / "libiomp5.so")
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "LD_PRELOAD": ":".join(str(library) for library in libraries if library),
        "OMP_NUM_THREADS": str(os.cpu_count()),
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }


RAYDIX = Peer("raydix", "raydix", False, _raydix, environment=_raydix_environment)

PEERS = {
    peer.name: peer
    for peer in (
        Peer("raydix_int8", "raydix int8", False, _raydix_int8, environment=_raydix_environment, engine="raydix"),
        Peer(name="openvino", title="OpenVINO", own_environment=True, options=_openvino, missing=_no_ir),
        Peer("vllm", "vLLM CPU", True, _vllm, environment=_vllm_environment),
    )
}


def process_environment(peer: Peer, site: Site) -> dict[str, str]:
    """This process's environment without variables that would tie the peer to raydix's own, and with the peer's
    variables.

    No engine may reach for the hub during a measurement.
    """
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", **peer.environment(site)}
