"""What is learnt of the links between nodes, and which requests are handed over because of it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.manager.fleet import PATIENCE, PATIENCE_S
from raydix.engine.core.manager.instructions import DeliverSegment
from raydix.engine.core.manager.links import FADE_S, LinkCosts, Links
from raydix.engine.core.manager.placement import CostModel, Demand, Placement, WorkerLoad, WorkersAlike, place
from raydix.engine.core.objectives import NO_OBJECTIVES
from raydix.engine.core.types import Admission, AdmitRequest, BlockHash, Ended, Handover, Role, SegmentHeader

BLOCK_BYTES = 368_640
"""16 positions of a model with 30 layers and 3 KV heads, in two bytes."""
MEGABYTE_S = {"slow": 0.16, "fast": 8e-4}
"""Seconds per megabyte at 50 Mbit/s, and at 10 Gbit/s."""
COSTS = WorkerCosts(prefill_token_s=4e-4, spread=0.02)
MINUTE_S = 60.0
NUM_IMPORTS = 100


def learnt(link: str, source: str = "a", target: str = "b", links: Links | None = None) -> Links:
    """Links after many imports over one of them, one each second."""
    links = Links() if links is None else links
    for second in range(NUM_IMPORTS):
        links.look(float(second))
        num_bytes = (1 + second % 16) * BLOCK_BYTES
        links.imported(source, target, num_bytes, 2e-3 + num_bytes * MEGABYTE_S[link] / 1e6, COSTS)
    return links


@pytest.mark.parametrize("link", MEGABYTE_S)
def test_a_link_is_learnt(link: str) -> None:
    links = learnt(link)
    expected = 2e-3 + 10_000_000 * MEGABYTE_S[link] / 1e6
    assert links.import_s("a", "b", 10_000_000, COSTS) == pytest.approx(expected, rel=0.2)


def test_a_link_never_seen_costs_what_the_worker_has_fitted() -> None:
    links = learnt("slow")
    assert links.costs("b", "a") is None and links.costs("a", "c") is None
    for source, target in (("b", "a"), ("a", "c"), ("a", "a")):
        assert links.import_s(source, target, 1000, COSTS) == COSTS.import_all_s(1000)


def test_one_slow_import_does_not_make_a_link_slow() -> None:
    links = Links()
    links.imported("a", "b", BLOCK_BYTES, 10.0, COSTS)
    assert links.import_s("a", "b", BLOCK_BYTES, COSTS) < 4 * COSTS.import_all_s(BLOCK_BYTES)


def test_a_link_that_was_slow_is_tried_again_after_minutes() -> None:
    links = learnt("slow")
    before = links.import_s("a", "b", 10_000_000, COSTS)
    links.look(NUM_IMPORTS + FADE_S / 2)
    assert links.import_s("a", "b", 10_000_000, COSTS) == before
    links.look(NUM_IMPORTS + MINUTE_S)
    assert links.import_s("a", "b", 10_000_000, COSTS) > before / 2, "a minute later it is not forgotten"
    links.look(NUM_IMPORTS + 20 * MINUTE_S)
    assert links.import_s("a", "b", 10_000_000, COSTS) < 3 * COSTS.import_all_s(10_000_000)
    links.look(0.0)
    assert links.import_s("a", "b", 10_000_000, COSTS) < 3 * COSTS.import_all_s(10_000_000), "time does not go back"


def test_all_pairs_of_200_nodes_are_remembered() -> None:
    links = Links()
    nodes = [str(number) for number in range(200)]
    for source in nodes:
        for target in nodes:
            links.imported(source, target, 1000, 0.1, COSTS)
    assert len(links) == 200 * 200 and links.costs("0", "0") is not None


def test_few_links_are_remembered() -> None:
    links = Links(capacity=2)
    for target in ("b", "c", "b", "d"):
        links.imported("a", target, 1000, 0.1, COSTS)
    assert list(links.known()) == [("a", "b"), ("a", "d")] and len(links) == 2
    assert isinstance(links.known()["a", "b"], LinkCosts)


# Placement


def candidate(worker_id: str, role: Role, node: str, num_decoding: int = 0, num_local: int = 0) -> WorkersAlike:
    return WorkersAlike([worker_id], WorkerLoad(role, COSTS, 256, num_decoding=num_decoding, node=node), num_local)


def choose(links: Links, *others: WorkersAlike, num_tokens: int = 640, **demand: object) -> Placement:
    """The placement of a prompt, on a prefill worker on `a`, a decode worker on `b`, and others."""
    model = CostModel(16, BLOCK_BYTES, links=links)
    workers = [candidate("p", Role.PREFILL, "a"), candidate("d", Role.DECODE, "b"), *others]
    needs = replace(Demand(num_tokens, session="s", sources=()), **demand)  # type: ignore[arg-type]
    return place(needs, workers, model)


def test_over_a_slow_link_the_decode_worker_computes() -> None:
    """Computing takes 0.27 s, and sending 2.4 s."""
    placement = choose(learnt("slow"))
    assert (placement.prefill, placement.decode) == ("d", "d") and placement.handover_s is None
    [split, alone] = sorted(placement.considered, key=lambda each: each.transfer_s, reverse=True)
    assert split.worker_ids == ["p"] and split.transfer_s == pytest.approx(2.42 - split.ttft_s, rel=0.2)
    assert (alone.worker_ids, alone.transfer_s) == (["d"], 0.0)
    assert split.cost_s > alone.cost_s


@pytest.mark.parametrize("links", [Links(), learnt("fast"), learnt("slow", "a", "elsewhere")])
def test_over_a_fast_link_or_an_unknown_one_the_prompt_is_handed_over(links: Links) -> None:
    for session in map(str, range(20)):
        placement = choose(links, session=session)
        assert (placement.prefill, placement.decode) == ("p", "d")
        assert [each.worker_ids for each in placement.considered] == [["p"]], "decode workers are spared"
        assert placement.handover_s is not None and placement.handover_s < 0.02


def test_on_one_node_links_make_no_difference() -> None:
    placement = choose(learnt("slow"), sources=None)
    assert (placement.prefill, placement.decode) == ("p", "d")
    assert placement.chosen.transfer_s == 0.0
    assert placement.handover_s is not None and placement.handover_s > 0


def test_the_decode_worker_behind_the_faster_link_is_preferred() -> None:
    links = learnt("fast", "a", "c", learnt("slow"))
    near = candidate("d2", Role.DECODE, "c", num_decoding=3)
    assert {choose(links, near, session=str(index)).decode for index in range(20)} == {"d2"}
    assert {choose(links, near, session=str(index)).prefill for index in range(20)} == {"p"}


def test_the_prefill_worker_behind_the_faster_link_is_preferred() -> None:
    links = learnt("fast", "c", "b", learnt("slow"))
    other = candidate("p2", Role.PREFILL, "c")
    assert {choose(links, other, session=str(index)).prefill for index in range(20)} == {"p2"}


def test_a_prompt_without_an_answer_is_not_handed_over() -> None:
    placement = choose(learnt("slow"), generates=False)
    assert placement.prefill == "p" and placement.chosen.transfer_s == 0.0


def test_many_streams_are_worth_more_than_a_sooner_second_token() -> None:
    """The computation would delay each of the streams, so sending is not much dearer for all together."""
    few, many = (candidate("d", Role.DECODE, "b", num_decoding=count) for count in (1, 200))
    model = CostModel(16, BLOCK_BYTES, links=learnt("slow"))
    prefill = candidate("p", Role.PREFILL, "a")
    needs = Demand(640, session="s", sources=())
    assert place(needs, [prefill, few], model).prefill == "d"
    assert place(needs, [prefill, many], model).prefill == "p"


def test_a_prefix_is_imported_from_near_and_computed_instead_of_fetched_from_far() -> None:
    links = learnt("slow")
    for source, num_imported in (("a", 0), ("b", 30)):
        model = CostModel(16, BLOCK_BYTES, links=links)
        needs = Demand(640, num_reachable_blocks=30, session="s", sources=[(source, 30)])
        chosen = place(needs, [candidate("m", Role.MIXED, "b")], model).chosen
        assert chosen.num_imported_blocks == num_imported
    needs = Demand(640, num_reachable_blocks=30, session="s", sources=[("b", 10), ("a", 20)])
    mixed = place(needs, [candidate("m", Role.MIXED, "b", num_local=10)], CostModel(16, BLOCK_BYTES, links=links))
    assert mixed.chosen.num_imported_blocks == 0, "what is left comes from far"


# The directory


class Cluster:
    """A prefill worker and a decode worker, on nodes `a` and `b`."""

    def __init__(self, make_directory: Callable[..., Directory]) -> None:
        self.directory = make_directory(segment_budget_bytes=1 << 30)
        self.directory.register("p", Role.PREFILL, 1, BLOCK_BYTES // 4, (), 256, node="a")
        self.directory.register("d", Role.DECODE, 1, BLOCK_BYTES // 4, (), 256, node="b")
        for worker_id in ("p", "d"):
            self.directory.fleet.measured(worker_id, 1, COSTS, 1000)
        self.num_requests = 0
        self.now = 0.0

    def ask(self) -> Admission:
        """Place a prompt that was never seen."""
        self.num_requests += 1
        name = f"r{self.num_requests}"
        hashes = tuple(f"{name} {index}".encode() for index in range(160))
        admission, _ = self.directory.admit(AdmitRequest(name, 0, hashes, 642), self.now)
        return admission

    def answered(self, admission: Admission, megabyte_s: float) -> None:
        """The chunks of a prompt are sent, and the request ends."""
        for num_blocks in (64, 64, 32) if admission.prefill != admission.decode else ():
            num_bytes = num_blocks * BLOCK_BYTES // 4
            self.directory.fleet.imported("d", "a", num_bytes, 2e-3 + num_bytes * megabyte_s / 1e6, self.now)
        self.directory.end_request(admission.request_id, self.now)
        self.now += 1.0


@pytest.fixture
def cluster(make_directory: Callable[..., Directory]) -> Cluster:
    return Cluster(make_directory)


def split_share(cluster: Cluster, link: str, num_requests: int) -> float:
    """Share of requests that are handed over, one request a second."""
    split = 0
    for _ in range(num_requests):
        admission = cluster.ask()
        split += admission.prefill != admission.decode
        cluster.answered(admission, MEGABYTE_S[link])
    return split / num_requests


def test_handing_over_ends_soon_on_a_slow_link_and_begins_again_on_a_fast_one(cluster: Cluster) -> None:
    assert split_share(cluster, "fast", 30) == 1.0
    assert split_share(cluster, "slow", 30) < 0.3
    assert split_share(cluster, "slow", 30) == 0.0
    cluster.now += 20 * MINUTE_S
    assert split_share(cluster, "fast", 30) == 1.0, "it was tried again"


def test_reports_without_a_node_teach_nothing(cluster: Cluster) -> None:
    for worker_id, source, num_bytes in (("gone", "a", 100), ("d", "", 100), ("d", "a", 0)):
        cluster.directory.fleet.imported(worker_id, source, num_bytes, 1.0, 0.0)
    assert len(cluster.directory.fleet.links) == 0


def test_explain_has_the_hand_over_as_predicted_and_as_it_was(cluster: Cluster) -> None:
    admission = cluster.ask()
    [[before]] = cluster.directory.decisions.of(admission.request_id).values()
    assert before.as_json()["actual_handover_s"] is None
    cluster.directory.decisions.ended(Ended(admission.request_id, 0, handover_s=0.25))
    [[after]] = cluster.directory.decisions.of(admission.request_id).values()
    told = after.as_json()
    assert told["actual_handover_s"] == 0.25
    assert isinstance(told["predicted_handover_s"], float) and 0 < told["predicted_handover_s"] < 0.5

    for _ in range(10):
        cluster.answered(admission, MEGABYTE_S["slow"])
    whole = cluster.ask()
    assert whole.prefill == whole.decode == "d"
    [[alone]] = cluster.directory.decisions.of(whole.request_id).values()
    assert alone.as_json()["predicted_handover_s"] is None


def test_blocks_come_from_the_nodes_of_segments_producers_and_holders(make_directory: Callable[..., Directory]) -> None:
    directory = make_directory()
    for worker_id, node in (("w1", "a"), ("w2", "b"), ("w3", "c")):
        directory.register(worker_id, Role.MIXED, 1, 10, (), node=node)
    directory.blocks_changed("w1", 1, sealed=[b"held"], evicted=())
    directory.segment_exported("w2", 1, SegmentHeader("m", (b"stored",), 10, 0), None, 0.0)
    directory.admit(AdmitRequest("r", 0, (b"computed", b"computed 2"), 9, avoided=("w1", "w2")), 0.0)
    hashes: tuple[BlockHash, ...] = (b"held", b"stored", b"computed", b"computed 2", b"unknown", b"held")
    request = AdmitRequest("s", 0, hashes, 30)
    demand, _ = directory._options(request, directory.stock.blocks.find(hashes), NO_OBJECTIVES)
    assert demand.sources == [("a", 1), ("b", 1), ("c", 2)] and demand.num_reachable_blocks == 4
    for worker_id in ("w2", "w3"):
        directory.remove_worker(worker_id)
    demand, _ = directory._options(request, directory.stock.blocks.find(hashes), NO_OBJECTIVES)
    assert demand.sources is None, "one node is left"


# The object stores


def exported(directory: Directory, worker_id: str, number: int) -> None:
    header = SegmentHeader("m", (f"{worker_id} {number}".encode(),), 10, 0)
    directory.segment_exported(worker_id, 1, header, None, float(number))


def test_each_node_keeps_its_own_segments(make_directory: Callable[..., Directory]) -> None:
    directory = make_directory(segment_budget_bytes=20)
    for worker_id, node in (("w1", "a"), ("w2", "a"), ("w3", "b")):
        directory.register(worker_id, Role.MIXED, 1, 10, (), node=node)
    for number in range(3):
        exported(directory, "w3", number)
    assert directory.stock.segments.node_bytes == {"b": 20}
    for number in range(3):
        exported(directory, "w1", number)
        exported(directory, "w2", number)
    assert directory.stock.segments.node_bytes == {"a": 20, "b": 20}, "what is exported here takes no room there"
    kept = [directory.stock.blocks.get(name) for name in (b"w1 2", b"w2 2", b"w3 1", b"w3 2")]
    assert all(record is not None for record in kept) and len(directory.stock.blocks) == 4


def test_nodes_without_workers_share_one_budget(make_directory: Callable[..., Directory]) -> None:
    """Nodes that come and go do not fill the index with what they held."""
    directory = make_directory(segment_budget_bytes=30)
    directory.register("stays", Role.MIXED, 1, 10, (), node="stays")
    for index in range(4):
        directory.register(f"w{index}", Role.MIXED, 1, 10, (), node=f"n{index}")
        for number in range(2):
            exported(directory, f"w{index}", number)
    assert directory.stock.segments.store_bytes == 80
    for index in range(4):
        directory.remove_worker(f"w{index}")
    exported(directory, "stays", 0)
    assert directory.stock.segments.node_bytes == {"n2": 10, "n3": 20, "stays": 10}
    directory.register("w3", Role.MIXED, 2, 10, (), node="n3")
    exported(directory, "stays", 1)
    assert directory.stock.segments.node_bytes == {"n2": 10, "n3": 20, "stays": 20}, "n3 is back with what it held"


def test_a_fetch_from_another_node_is_awaited_as_long_as_its_link_may_take(cluster: Cluster) -> None:
    admission = cluster.ask()
    header = SegmentHeader("model", (b"block",), 10_000_000, 0)
    *_, delivered = cluster.directory.segment_exported("p", 1, replace(header, handover=bare(admission)), "ref", 0.0)
    assert isinstance(delivered, DeliverSegment)

    def patience_s(worker_id: str) -> float | None:
        return cluster.directory.fleet.patience_s(worker_id, delivered.segment.node, header.num_bytes, cluster.now)

    unknown = patience_s("d")
    assert unknown is not None and PATIENCE_S < unknown < 2 * PATIENCE_S
    assert patience_s("p") is None, "on its own node"
    assert patience_s("gone") is None
    for _ in range(20):
        cluster.answered(admission, MEGABYTE_S["slow"])
    slow = patience_s("d")
    assert slow == pytest.approx(PATIENCE_S + PATIENCE * 1.6, rel=0.3)


def bare(admission: Admission) -> Handover:
    return Handover(admission.request_id, admission.attempt, 7, None)
