"""The clients' methods are those of the actors."""

import inspect
from collections.abc import Callable, Sequence

import pytest

from raydix.actors.manager.client_memory import ClientMemory
from raydix.actors.manager.kv_cache_manager import KVCacheManager
from raydix.actors.rpc import ActorClient, AdaptersClient, ManagerClient, ReportsClient, SuccessionClient, WorkerClient
from raydix.actors.worker.worker import Worker
from raydix.engine.serving.answer_keeper import AnswerKeeper

PAIRS: Sequence[tuple[type, type]] = (
    (Worker, WorkerClient),
    (KVCacheManager, ManagerClient),
    (KVCacheManager, AdaptersClient),
    (KVCacheManager, ReportsClient),
    (KVCacheManager, SuccessionClient),
)
METHODS = [
    (actor, client, name)
    for actor, client in PAIRS
    for name, member in inspect.getmembers(client, inspect.isfunction)
    if not name.startswith("_") and member is not ActorClient.kill
]


def parameters(method: Callable[..., object]) -> list[str]:
    """Return the names of a method's parameters.

    Once a process has made an actor of a class, Ray's own parameters stand in
    the signatures of the class's methods; they are left out.
    """
    return [name for name in inspect.signature(method).parameters if not name.startswith("_ray_")]


@pytest.mark.parametrize(("actor", "client", "name"), METHODS)
def test_a_client_calls_what_its_actor_has(actor: type, client: type, name: str) -> None:
    theirs = parameters(getattr(actor, name))
    assert theirs == parameters(getattr(client, name))


@pytest.mark.parametrize("name", [name for name in vars(AnswerKeeper) if not name.startswith("_")])
def test_the_manager_keeps_answers_as_the_replicas_ask_for_it(name: str) -> None:
    """`of_answers` sends the name of a method, which the memory has with the same parameters."""
    assert parameters(getattr(ClientMemory, name)) == parameters(getattr(AnswerKeeper, name))
