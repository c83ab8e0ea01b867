"""Processes of Ray that a cluster of one machine and one server has no use for, and that cost seconds of its start.

* The monitor asks a cloud for more machines.
* The dashboard's server, started even without the dashboard, reports usage statistics, which are off.
* The log monitor sends what workers print to programs that want it; `raydix` has log files instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager

SPARED = ("start_monitor", "start_api_server", "start_log_monitor")
"""Methods of Ray's node that start these processes. There is no public way to leave them out."""


@contextmanager
def without_spare_processes() -> Iterator[None]:
    """Have Ray start none of them while the block runs."""
    from ray._private.node import Node

    before = {name: getattr(Node, name) for name in SPARED if hasattr(Node, name)}
    for name in before:
        setattr(Node, name, _start_nothing)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Node, name, method)


def _start_nothing(*_: object, **__: object) -> None: ...
