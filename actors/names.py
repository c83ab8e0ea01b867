"""Names under which the parts of one application find each other in the cluster.

Ray keeps the name of a killed actor taken for minutes in the process that created the actor. So each incarnation of an
actor has a name of its own, made of the actor's lasting id and the incarnation's epoch. Workers are found by the id and
epoch told by the manager; the manager's current name is kept in Ray's control store by its host.
"""

import asyncio
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.experimental import internal_kv

from raydix.configs.sections import MANAGER

_STORE_NAMESPACE = b"raydix"


def namespace(app_name: str) -> str:
    """Ray namespace of a Serve application: one each, so that several can share a cluster."""
    return f"raydix:{app_name}"


def incarnation_name(actor_id: str, epoch: int) -> str:
    """The name in Ray of one incarnation of an actor."""
    return f"{actor_id}:{epoch}"


def own_node() -> str:
    """Ray's id of the node that this process runs on."""
    return ray.get_runtime_context().get_node_id()


async def named_actor(name: str, app_name: str) -> ActorHandle[Any] | None:
    """Find the actor of this name, alive or not; None if there is none. Asks Ray's control store beside the event
    loop."""
    try:
        return await asyncio.to_thread(ray.get_actor, name, namespace=namespace(app_name))
    except ValueError:
        return None


async def manager_name(app_name: str) -> str | None:
    """Name of the last announced manager; None if there is none."""
    name = await asyncio.to_thread(internal_kv._internal_kv_get, _manager_key(app_name), namespace=_STORE_NAMESPACE)
    return None if name is None else name.decode()


async def announce_manager(name: str, app_name: str) -> None:
    """Make `name` the answer of `manager_name`."""
    await asyncio.to_thread(
        internal_kv._internal_kv_put, _manager_key(app_name), name.encode(), overwrite=True, namespace=_STORE_NAMESPACE
    )


def _manager_key(app_name: str) -> bytes:
    return f"{app_name}:{MANAGER}".encode()
