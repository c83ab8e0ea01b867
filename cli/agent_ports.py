"""Ports of Ray's agents, chosen before Ray's raylet starts.

A raylet waits until the agent that it starts has written its ports down, and dies where that takes more than 15 s,
which no setting changes: a machine with other work may need longer for what the agent imports. A raylet that finds the
ports written down goes on, and reaches its agents once they listen (`RAY_agent_register_timeout_ms`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
"""Parameters of Ray's node."""
START = "start_raylet"
"""Method of Ray's node that starts its raylet."""


@contextmanager
def with_agent_ports(free_port: Callable[[], int]) -> Iterator[None]:
    """Have a raylet that is started while the block runs know the ports of its agents. There is no public way to name
    all of them."""
    from ray import _raylet
    from ray._private.node import Node

    library: Any = _raylet  # has no stubs for these names
    start_raylet = getattr(Node, START)

    def started(node: Any, *arguments: Any, **named: Any) -> None:
        for name in AGENT_PORTS:
            setattr(node._ray_params, name, free_port())
        # The raylet waits for this one although it is given, since the agent may fail to listen at it. The agent writes
        # the same file again.
        listen_port = node._ray_params.dashboard_agent_listen_port
        library.persist_port(node._session_dir, node._node_id, library.DASHBOARD_AGENT_LISTEN_PORT_NAME, listen_port)
        start_raylet(node, *arguments, **named)

    setattr(Node, START, started)
    try:
        yield
    finally:
        setattr(Node, START, start_raylet)
