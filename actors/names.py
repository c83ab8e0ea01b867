"""Names under which the parts of one application find each other in the cluster."""

import asyncio
from typing import Any

import ray
from ray.actor import ActorHandle

MANAGER = "kv_cache_manager"


def namespace(app_name: str) -> str:
    """Each Serve application has its own Ray namespace, so several can share a cluster."""
    return f"raydix:{app_name}"


async def find_actor(name: str, app_name: str) -> ActorHandle[Any] | None:
    """The living actor of that name; None while there is none. Asks Ray's control store beside the event loop."""
    try:
        return await asyncio.to_thread(ray.get_actor, name, namespace=namespace(app_name))
    except ValueError:
        return None
