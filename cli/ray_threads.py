"""Errors of Ray's own threads, which would print a traceback over the messages of `raydix serve`.

Ray's client starts threads that follow the cluster's messages. Where the cluster is stopped while it starts, they lose
their connections in whatever way; the process itself notices and tells of the end.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

from raydix.engine.core.log_fields import about

logger = logging.getLogger(__name__)


def log_errors_of_rays_threads() -> None:
    """Have errors that end one of Ray's threads logged, and no longer printed; those of other threads stay as they
    are."""
    before = threading.excepthook
    if isinstance(before, _Hook):
        return
    threading.excepthook = _Hook(before)


class _Hook:
    """A `threading.excepthook` in front of another one."""

    def __init__(self, before: Callable[[threading.ExceptHookArgs], object]) -> None:
        self._before = before

    def __call__(self, args: threading.ExceptHookArgs) -> None:
        own = next((name for name in _modules(args.exc_traceback) if name != threading.__name__), "")
        if own.partition(".")[0] != "ray" or issubclass(args.exc_type, SystemExit):
            self._before(args)
            return
        thread = "a thread" if args.thread is None else args.thread.name
        logger.info(
            "%s of Ray's ended by %s: %s",
            thread,
            args.exc_type.__name__,
            args.exc_value,
            extra=about("ray_thread_ended", thread=thread, reason=args.exc_type.__name__),
        )


def _modules(traceback: TracebackType | None) -> Iterator[str]:
    """The modules whose functions an error passed through."""
    while traceback is not None:
        yield str(traceback.tb_frame.f_globals.get("__name__", ""))
        traceback = traceback.tb_next
