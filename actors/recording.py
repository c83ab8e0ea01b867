"""Recordings of a process's state machine in files (`engine.core.stimuli`), where the configuration asks for them.

Each stimulus goes to the kernel in one write before the machine reacts, so neither an error nor SIGKILL loses the last
stimuli, which explain the failure. A file always has the first stimuli: when the file is full, the recording ends.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from configs.schema import LoggingSection
from engine.core.log_fields import about
from engine.core.stimuli import Notes, Recorder, Stimulus

logger = logging.getLogger(__name__)

P = ParamSpec("P")
M = TypeVar("M")


class StimulusFile:
    """A new file, written up to a number of bytes.

    Raises:
        OSError: the file cannot be made, or is there already.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._path = path
        self._num_left = max_bytes

    def keep(self, stimulus: Stimulus) -> bool:
        """Append a stimulus; False, with a warning and once, if this and all later ones are not kept."""
        dumped = stimulus.dump()
        self._num_left -= len(dumped)
        if self._num_left < 0:
            return self._close("the file is full")
        try:
            num_written = os.write(self._file, dumped)
        except OSError as error:  # recording must not stop the server
            return self._close(str(error))
        return num_written == len(dumped) or self._close("the disk is full")

    def _close(self, reason: str) -> bool:
        os.close(self._file)
        logger.warning("%s ends here: %s", self._path, reason, extra=about("recording_ended", reason=reason))
        return False


def recorded(
    process: str, settings: LoggingSection, notes: Notes, make: Callable[P, M], *args: P.args, **kwargs: P.kwargs
) -> M:
    """The machine that `make` makes of these arguments. If the settings name a folder, its making and its stimuli are
    recorded there."""
    machine = make(*args, **kwargs)
    record(process, settings, notes, machine, Stimulus(type(machine).__name__, args, kwargs))
    return machine


def record(process: str, settings: LoggingSection, notes: Notes, machine: object, made: Stimulus) -> None:
    """Record the stimuli of a fresh machine, `made` by this call, if the settings name a folder."""
    if settings.stimuli is None:
        return

    path = Path(settings.stimuli) / f"stimuli-{process}-{os.getpid()}.log"
    try:
        file = StimulusFile(path, settings.stimuli_mib << 20)
    except OSError as error:
        logger.warning("nothing is recorded: %s", error, extra=about("recording_ended", reason=str(error)))
        return
    if file.keep(made):
        Recorder(machine, notes, file.keep)
