"""The slow parts of every worker's start, done once beforehand, and without torch where nothing has to be built."""

from collections.abc import Callable, Iterable

from raydix.engine.core.settings import EngineSettings
from raydix.engine.model.sources import resolve_model
from raydix.kernels.cpp.loader import cpu_ops, is_at_hand


def prepare(engines: Iterable[EngineSettings], progress: Callable[[str], None]) -> None:
    """Do the slow parts of every worker's start beforehand, once and with progress shown: find the model
    (fetch or convert it), build the CPU kernels where an engine computes on CPUs.

    Raises:
        StartupError: as `build_engine`.
    """
    engines = list(engines)
    for settings in engines:
        progress("looking at the model")
        resolve_model(settings.source, progress, quantization=settings.quantization)
    # Workers on GPUs have kernels of their own, which depend on the card and are compiled there.
    if any(settings.device != "cuda" for settings in engines) and not is_at_hand():
        progress("building the CPU kernels, once per machine")
        cpu_ops()
