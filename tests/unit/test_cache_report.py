"""What of the cache's state is shown to whom."""

from collections.abc import Callable
from typing import Any

import pytest

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.manager.cache_report import cache_report
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.manager.stock import MOST_PAIRS
from raydix.engine.core.types import AdmitRequest, BlockHash, CacheHints, Role

OF_ADMINISTRATORS = {
    "known_blocks",
    "elastic_workers_wanted",
    "workers",
    "object_store",
    "links",
    "moved",
    "disk",
    "hit_blocks",
    "missed_blocks",
    "evicted_blocks",
}


def ask(directory: Directory, request_id: str, tenant: str, *hashes: BlockHash) -> None:
    """A request of blocks of four tokens, which are computed at once."""
    preview = tuple(hashes[0])
    request = AdmitRequest(request_id, 0, hashes, 4 * len(hashes) + 2, cache=CacheHints(tenant), preview=preview)
    admission, _ = directory.admit(request, 0.0)
    directory.blocks_changed(admission.prefill, 1, hashes, ())
    directory.end_request(request_id, 0.0)


@pytest.fixture
def directory(make_directory: Callable[..., Directory]) -> Directory:
    """Two tenants and an administrator have asked: acme twice the same, the others once each."""
    directory = make_directory()
    directory.register("w", Role.MIXED, 1, 10, ())
    ask(directory, "r1", "acme", b"a1", b"a2")
    ask(directory, "r2", "acme", b"a1", b"a2")
    ask(directory, "r3", "zoo", b"z1")
    ask(directory, "r4", "root", b"r1")
    return directory


@pytest.mark.parametrize(("tenant", "first_block", "num_requests"), [("acme", b"a1", 2), ("zoo", b"z1", 1)])
def test_a_tenant_sees_its_own(directory: Directory, tenant: str, first_block: BlockHash, num_requests: int) -> None:
    report = cache_report(directory, tenant, is_admin=False)
    assert not OF_ADMINISTRATORS & report.keys()
    assert report["tenants"].keys() == {tenant}  # type: ignore[attr-defined]
    prefixes: Any = report["hottest_prefixes"]
    [prefix] = prefixes
    assert prefix["token_ids"] == list(first_block) and prefix["requests"] == num_requests
    assert report["hit_rate"] == (8 / 20 if tenant == "acme" else 0.0)


def test_an_administrator_sees_the_use_of_all_and_its_own_prefixes(directory: Directory) -> None:
    report = cache_report(directory, "root", is_admin=True)
    assert report.keys() >= OF_ADMINISTRATORS
    assert report["tenants"].keys() == {"acme", "zoo", "root"}  # type: ignore[attr-defined]
    assert [prefix["token_ids"] for prefix in report["hottest_prefixes"]] == [list(b"r1")]  # type: ignore[attr-defined]
    assert report["hit_rate"] == 8 / 32
    workers: Any = report["workers"]
    [worker] = workers
    assert WorkerCosts(**worker["costs"]) == WorkerCosts()


def test_a_worker_is_shown_with_its_load_and_its_pool(directory: Directory) -> None:
    report: Any = cache_report(directory, "root", is_admin=True)
    assert [report["workers"][0][name] for name in ("blocks", "requests", "queued")] == [None, 0, 0]
    request = AdmitRequest("r5", 0, (b"q1",), 6, cache=CacheHints("acme"))
    directory.admit(request, 0.0)
    directory.fleet.measured("w", 1, None, 7, 3, num_blocks=9)
    report = cache_report(directory, "root", is_admin=True)
    shown = {name: report["workers"][0][name] for name in ("blocks", "available_blocks", "empty_blocks")}
    assert shown == {"blocks": 9, "available_blocks": 7, "empty_blocks": 3}
    assert [report["workers"][0][name] for name in ("requests", "decoding", "queued", "leaving")] == [1, 1, 1, False]
    assert report["workers"][0]["queued_s"] > 0


def test_hits_save_the_time_of_computing_them(directory: Directory) -> None:
    report: Any = cache_report(directory, "root", is_admin=True)
    saved = {name: use["saved_s"] for name, use in report["tenants"].items()}
    assert saved["zoo"] == saved["root"] == 0
    decisions = [decision.as_json() for [decision] in directory.decisions.of("r2").values()]
    assert [decision["saved_s"] for decision in decisions] == [saved["acme"]]

    # Ten tokens, eight of them cached, in one step either way.
    assert decisions[0]["uncached_s"] == WorkerCosts().prefill_s(10, 0, 10, 0)
    assert saved["acme"] == round(WorkerCosts().prefill_s(10, 0, 10, 0) - WorkerCosts().prefill_s(2, 8, 10, 0), 6)


def test_what_moved_between_workers_is_summed_with_the_last_move_first(directory: Directory) -> None:
    moves = directory.stock.moves
    moves.add("a", "b", 2, 20)
    moves.add("", "b", 1, 10)
    moves.add("a", "b", 3, 30)
    report: Any = cache_report(directory, "root", is_admin=True)
    assert report["moved"] == [
        {"source": "a", "target": "b", "segments": 2, "blocks": 5, "bytes": 50},
        {"source": "disk", "target": "b", "segments": 1, "blocks": 1, "bytes": 10},
    ]
    for number in range(MOST_PAIRS):
        moves.add(f"a{number}", "b", 1, 1)
    assert len(moves.latest()) == MOST_PAIRS and moves.latest()[-1][0] == "a0", "the oldest pair is forgotten"
