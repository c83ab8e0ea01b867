"""What requests and tenants may wish of the object store and the disk. Both hold four segments of a block."""

from collections.abc import Callable, Iterable

import pytest

from raydix.engine.core.manager.block_index import BlockIndex, Segment
from raydix.engine.core.manager.cache_statistics import CacheStatistics
from raydix.engine.core.manager.instructions import WriteFile
from raydix.engine.core.manager.segment_store import SegmentStore
from raydix.engine.core.tenants import Tenant
from raydix.engine.core.types import BlockHash, CacheHints, CacheMark, Retention, SegmentHeader

NUM_BYTES = 10


class Tier:
    """A store that keeps segments in one place only."""

    def __init__(self, place: str, tenants: Iterable[Tenant]) -> None:
        budgets = (4 * NUM_BYTES, 0) if place == "object store" else (0, 4 * NUM_BYTES)
        self.now = 0.0
        self.blocks = BlockIndex(CacheStatistics(16))
        self.store = SegmentStore(self.blocks, *budgets, tenants)

    def put(self, *names: BlockHash, tenant: str = "", priority: int = 0, expires_at: float | None = None) -> None:
        """Export blocks, each in a segment of its own."""
        for name in names:
            header = SegmentHeader("m", (name,), NUM_BYTES, 0, retention=Retention(tenant, priority, expires_at))
            for instruction in self.store.exported(header, "ref", self.now)[1]:
                if isinstance(instruction, WriteFile):
                    self.store.written(instruction.segment.segment_id, header, self.now)
            self.store.check_integrity([])

    def end(self, *names: BlockHash, hints: CacheHints) -> None:
        """A request with these blocks ends."""
        self.store.released([], names, hints, self.now)
        self.store.check_integrity([])

    @property
    def kept(self) -> set[BlockHash]:
        return {name for name, record in self.blocks.items() if record.segment is not None}


MakeTier = Callable[..., Tier]


@pytest.fixture(params=["object store", "disk"])
def make(request: pytest.FixtureRequest) -> MakeTier:
    return lambda *tenants: Tier(request.param, tenants)


def test_without_wishes_the_least_recently_used_goes(make: MakeTier) -> None:
    tier = make()
    tier.put(b"a", b"b", b"c", b"d")
    tier.end(b"a", hints=CacheHints())
    tier.put(b"e", b"f")
    assert tier.kept == {b"a", b"d", b"e", b"f"}


def test_one_tenant_cannot_flush_another_below_its_floor(make: MakeTier) -> None:
    tier = make(Tenant("small", cache_min=0.5))
    tier.put(b"a", b"b", b"c", tenant="small")
    tier.put(*(bytes([number]) for number in range(20)), tenant="large", priority=10)
    assert {b"b", b"c"} <= tier.kept and b"a" not in tier.kept


@pytest.mark.parametrize("is_leased", [False, True], ids=["being written", "leased"])
def test_what_one_tenant_holds_on_disk_grows_only_to_another_s_floor(is_leased: bool) -> None:
    tier = Tier("disk", [Tenant("small", cache_min=0.5)])
    tier.put(b"a", b"b", tenant="small")
    leased: list[Segment] = []
    for name in (b"1", b"2", b"3", b"4"):
        header = SegmentHeader("m", (name,), NUM_BYTES, 0, retention=Retention("large"))
        segment, instructions = tier.store.exported(header, "ref", 0.0)
        if is_leased and instructions:
            tier.store.written(segment.segment_id, header, 0.0)
            leased += [kept for kept in [tier.store.get(segment.segment_id)] if kept is not None]
            tier.store.lease(leased[-1], "w")
        tier.store.check_integrity(leased)
    assert {b"a", b"b"} <= tier.kept and tier.store.disk_bytes == 4 * NUM_BYTES


def test_a_tenant_below_its_floor_pays_for_its_own_need() -> None:
    tier = Tier("disk", [Tenant("all", cache_min=1.0)])
    tier.put(b"a", b"b", b"c", b"d", b"e", tenant="all")
    assert tier.kept == {b"b", b"c", b"d", b"e"}


def test_a_floor_holds_to_the_byte(make: MakeTier) -> None:
    tier = make(Tenant("small", cache_min=0.45))
    tier.put(b"a", b"b", b"c", tenant="small")
    tier.put(*(bytes([number]) for number in range(20)), tenant="large")
    assert {b"b", b"c"} <= tier.kept, "1.8 segments are granted"


def test_a_tenant_above_its_ceiling_pays_with_its_own(make: MakeTier) -> None:
    tier = make(Tenant("bounded", cache_max=0.5))
    tier.put(b"a", tenant="other")
    tier.put(b"1", b"2", b"3", tenant="bounded")
    tier.put(b"b", tenant="other")
    assert tier.kept == {b"a", b"2", b"3", b"b"}


def test_what_has_expired_goes_first(make: MakeTier) -> None:
    tier = make()
    tier.put(b"a", b"b")
    tier.put(b"c", expires_at=5.0)
    tier.put(b"d")
    tier.now = 6.0
    tier.put(b"e")
    assert tier.kept == {b"a", b"b", b"d", b"e"}


def test_a_tenant_s_higher_priority_stays_longer(make: MakeTier) -> None:
    tier = make()
    tier.put(b"a", tenant="t", priority=1)
    tier.put(b"b", b"c", b"d", b"e", tenant="t")
    assert tier.kept == {b"a", b"c", b"d", b"e"}


def test_a_request_s_wish_counts_when_it_ends(make: MakeTier) -> None:
    tier = make()
    tier.put(b"a", b"b", b"c", b"d", tenant="t", expires_at=5.0)
    tier.now = 4.0
    tier.end(b"a", hints=CacheHints("t", priority=1, ttl_s=10.0))
    tier.end(b"b", hints=CacheHints("another", priority=9))
    tier.now = 6.0
    tier.put(b"e", b"f", tenant="t")
    assert tier.kept == {b"a", b"b", b"e", b"f"}, "nobody wants c and d any longer"
    tier.put(b"g", tenant="t")
    assert tier.kept == {b"a", b"e", b"f", b"g"}, "another's wish gives b no priority"


def test_of_a_prompt_the_end_goes_first(make: MakeTier) -> None:
    tier = make()
    tier.put(b"a", b"b", b"c", b"d")
    tier.end(b"a", b"b", b"c", hints=CacheHints())
    tier.end(b"a", b"b", b"d", hints=CacheHints())
    tier.put(b"1", b"2")
    assert tier.kept == {b"a", b"b", b"1", b"2"}


def test_what_was_found_on_disk_is_kept_as_was_wished() -> None:
    tier = Tier("disk", [Tenant("small", cache_min=0.5)])
    files = [SegmentHeader("m", (name,), NUM_BYTES, 0, retention=Retention("small")) for name in (b"a", b"b")]
    assert tier.store.files_found(files, 0.0) == []
    tier.put(*(bytes([number]) for number in range(20)), tenant="large")
    assert {b"a", b"b"} <= tier.kept


def test_a_mark_keeps_the_segments_before_it(make: MakeTier) -> None:
    tier = make()
    tier.put(b"a", b"b", b"c", b"d")
    tier.end(b"a", b"b", b"c", b"d", hints=CacheHints(marks=(CacheMark(2, 1, 60.0),)))
    tier.put(*(bytes([number]) for number in range(20)))
    assert {b"a", b"b"} <= tier.kept and not {b"c", b"d"} & tier.kept
    tier.put(*(bytes([number]) for number in range(20)), priority=1)
    assert not {b"a", b"b"} & tier.kept, "used less recently, with the same priority"


def test_other_shares_hold_for_the_segments_that_are_there(make: MakeTier) -> None:
    tier = make()
    tier.put(b"1", b"2", tenant="a")
    tier.put(b"3", b"4", tenant="b")
    tier.store.limit([Tenant("a", cache_min=0.5)])
    tier.put(b"5", b"6", tenant="b")
    assert tier.kept == {b"1", b"2", b"5", b"6"}
