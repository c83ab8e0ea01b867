"""Duties of elastic workers: measured, divided, kept, and set aside for single requests."""

from collections.abc import Callable
from typing import Any

import pytest

from raydix.engine.core.costs import WorkerCosts
from raydix.engine.core.manager.cache_report import cache_report
from raydix.engine.core.manager.directory import Directory
from raydix.engine.core.manager.elastic import HOLD_S, SHRINK_S, WINDOW_S, Highest, Level, Rate
from raydix.engine.core.manager.planner import Division
from raydix.engine.core.objectives import LATE_PRIORITY, NO_OBJECTIVES, Objectives
from raydix.engine.core.types import Admission, AdmitRequest, Role

MakeDirectory = Callable[..., Directory]
COSTS = WorkerCosts(0.01, 1e-3, 1e-3, import_s=1e-3, import_byte_s=0.0, spread=0.0)
"""A step of 64 prompt tokens takes 74 ms, one of 10 streams 20 ms."""
TIGHT = Objectives(ttft_s=1.0, tpot_s=0.025)


@pytest.fixture
def pool(make_directory: MakeDirectory) -> Directory:
    """Three elastic workers with costs of their own, and an objective that whole chunks miss."""
    directory = make_directory()
    for name in ("a", "b", "c"):
        directory.register(name, Role.ELASTIC, 1, 10, (), token_budget=64)
        directory.fleet.measured(name, 1, COSTS, num_free_blocks=1000)
    directory.change_limits(0, COSTS, (), TIGHT)
    return directory


def admit(
    directory: Directory,
    name: str,
    num_tokens: int,
    now: float = 0.0,
    objectives: Objectives = NO_OBJECTIVES,
    priority: int = 0,
) -> Admission:
    hashes = tuple(f"{name}{index}".encode() for index in range(num_tokens // 4))
    request = AdmitRequest(name, 0, hashes, num_tokens, objectives=objectives, priority=priority)
    return directory.admit(request, now)[0]


def prompts(directory: Directory, count: int = 16, since: float = 0.0, priority: int = 0) -> None:
    """Long prompts in four seconds, whose answers end at once; 16 keep one and a half workers busy."""
    for number in range(count):
        name, now = f"p{since:g}-{number}", since + 4 * number / count
        admit(directory, name, 500, now, priority=priority)
        directory.first_token(name, 0, 0.1)
        directory.end_request(name, now)


def answers(directory: Directory, count: int, now: float) -> None:
    """Short prompts whose answers go on."""
    for number in range(count):
        admit(directory, f"a{number}", 8, now)
        directory.first_token(f"a{number}", 0, 0.1)


def duties(directory: Directory) -> dict[str, Role]:
    return {name: worker.duty for name, worker in directory.fleet.items()}


def test_before_the_first_look_all_do_both(pool: Directory) -> None:
    admission = admit(pool, "r", 400)
    assert admission.prefill == admission.decode
    assert set(duties(pool).values()) == {Role.MIXED}


def test_duties_follow_the_load(pool: Directory) -> None:
    prompts(pool)
    answers(pool, 12, 4.0)
    plan = pool.fleet.divide(pool.objectives, 4.0)
    assert plan is not None and plan.division == Division(2, 1)
    assert plan.duties == duties(pool)
    assert sorted(duties(pool).values()) == [Role.DECODE, Role.PREFILL, Role.PREFILL]

    for number in range(12):
        pool.end_request(f"a{number}", 20.0)
    prompts(pool, 8, 20.0)
    answers(pool, 28, 24.0)
    later = pool.fleet.divide(pool.objectives, 24.0)
    assert later is not None and later.division == Division(1, 2)
    assert list(later.duties.values()) == [Role.DECODE], "the others keep their duties"


def test_a_split_request_goes_where_the_duties_say(pool: Directory) -> None:
    prompts(pool)
    answers(pool, 12, 4.0)
    pool.fleet.divide(pool.objectives, 4.0)
    admission = admit(pool, "r", 400, 4.0)
    assert (duties(pool)[admission.prefill], duties(pool)[admission.decode]) == (Role.PREFILL, Role.DECODE)
    [decision] = pool.decisions.of("r")["r"]
    assert decision.as_json()["duties"] == {name: str(duty) for name, duty in decision.duties.items()}
    assert (
        decision.duties.items() <= duties(pool).items()
        and {admission.prefill, admission.decode} <= decision.duties.keys()
    )


def test_a_decode_worker_takes_a_prompt_that_fits_beside_its_decodes(pool: Directory) -> None:
    split(pool)
    assert {admit(pool, name, 400).prefill for name in ("x", "y")} == {"a", "b"}
    short = admit(pool, "short", 8)
    assert short.prefill == short.decode
    strict = admit(pool, "strict", 8, objectives=Objectives(tpot_s=0.012))
    assert duties(pool)[strict.prefill] is Role.PREFILL


def test_the_strictest_stream_of_a_worker_counts(pool: Directory) -> None:
    split(pool, decoders=("c",))
    admit(pool, "strict", 400, objectives=Objectives(tpot_s=0.0125))
    assert pool.fleet["c"].load.tpot_s == 0.0125
    assert admit(pool, "short", 8).prefill != "c"
    pool.end_request("strict", 0.0)
    assert pool.fleet["c"].load.tpot_s == 0.025, "of the other stream"


def test_a_prefill_worker_decodes_when_the_others_cannot(pool: Directory) -> None:
    split(pool, decoders=("c",))
    for number in range(15):
        assert admit(pool, f"r{number}", 400).decode == "c"
    full = admit(pool, "full", 400)
    assert full.prefill == full.decode != "c"


def test_a_prefill_worker_decodes_when_the_others_are_gone(pool: Directory) -> None:
    split(pool, decoders=("c",))
    pool.remove_worker("c")
    alone = admit(pool, "r", 400)
    assert alone.prefill == alone.decode


def test_divisions_are_held_for_a_while(pool: Directory) -> None:
    prompts(pool)
    answers(pool, 12, 4.0)
    first = pool.fleet.divide(pool.objectives, 4.0)
    answers(pool, 40, 4.0)
    held = pool.fleet.divide(pool.objectives, 4.0 + HOLD_S / 2)
    moved = pool.fleet.divide(pool.objectives, 4.0 + 2 * HOLD_S)
    assert first is not None and held is not None and moved is not None
    assert held.division == first.division != moved.division


def test_a_worker_that_leaves_or_joins_changes_the_division_at_once(pool: Directory) -> None:
    prompts(pool)
    answers(pool, 12, 4.0)
    pool.fleet.divide(pool.objectives, 4.0)
    pool.leave("a")
    plan = pool.fleet.divide(pool.objectives, 4.1)
    assert plan is not None and sum(plan.division) in (0, 2)
    pool.register("d", Role.ELASTIC, 1, 10, (), token_budget=64)
    assert pool.fleet["d"].duty is Role.MIXED
    plan = pool.fleet.divide(pool.objectives, 4.2)
    assert plan is not None and sum(plan.division) in (0, 3)
    assert pool.fleet["d"].duty in plan.duties.values() or pool.fleet["d"].duty is Role.MIXED


def test_the_last_worker_goes_where_nobody_asks_for_long_enough(make_directory: MakeDirectory) -> None:
    directory = make_directory()

    def join() -> None:
        directory.register("a", Role.ELASTIC, 1, 10, (), token_budget=64)
        directory.fleet.measured("a", 1, COSTS, num_free_blocks=1000)

    def look(now: float) -> tuple[int, bool]:
        plan = directory.fleet.divide(directory.objectives, now, most=3, shrink_after_s=10.0, least=0)
        assert plan is not None
        return plan.num_wanted, plan.may_shrink

    join()
    assert look(0.0) == (0, False)
    prompts(directory)
    assert look(4.0) == (2, False)
    looks = [look(float(now)) for now in range(5, 60)]
    assert looks[0] == (2, False) and looks[-1] == (0, True)

    directory.remove_worker("a")
    assert directory.fleet.divide(directory.objectives, 60.0, 3, 10.0, 0) is None
    join()
    assert look(61.0) == (0, False), "the request that had it started has not come yet"


def test_without_elastic_workers_there_is_no_plan(make_directory: MakeDirectory) -> None:
    directory = make_directory()
    directory.register("m", Role.MIXED, 1, 10, ())
    assert directory.fleet.divide(directory.objectives, 1.0) is None
    assert admit(directory, "r", 8).prefill == "m"
    report: Any = cache_report(directory, "", is_admin=True)
    assert [worker["duty"] for worker in report["workers"]] == [None]
    assert directory.decisions.of("r")["r"][0].as_json()["duties"] == {}


def test_reports_show_duties(pool: Directory) -> None:
    split(pool, decoders=("c",))
    report: Any = cache_report(pool, "", is_admin=True)
    shown = {worker["id"]: (worker["role"], worker["duty"]) for worker in report["workers"]}
    assert shown == {"a": ("elastic", "prefill"), "b": ("elastic", "prefill"), "c": ("elastic", "decode")}


def test_fixed_roles_stay_as_they_are(pool: Directory) -> None:
    pool.register("p", Role.PREFILL, 1, 10, (), token_budget=64)
    prompts(pool)
    pool.fleet.divide(pool.objectives, 4.0)
    assert pool.fleet["p"].load.role is Role.PREFILL and not pool.fleet["p"].load.is_elastic


def split(directory: Directory, decoders: tuple[str, ...] = ("c",)) -> None:
    """Give the workers duties, whatever their load."""
    duties = {name: Role.DECODE if name in decoders else Role.PREFILL for name in directory.fleet}
    directory.fleet.assign(duties)


def test_a_rate_fades() -> None:
    rate = Rate()
    assert rate.at(5.0) == 0.0
    for tenth in range(300):
        rate.add(0.05, tenth / 10)
    assert rate.at(30.0) == pytest.approx(0.5, rel=0.05)
    assert rate.at(30.0 + WINDOW_S) == pytest.approx(0.5 / 2.718, rel=0.05)
    assert rate.at(29.0) == rate.at(29.9), "time that goes backwards counts as none"


def test_a_rate_fades_also_after_the_clock_was_put_back() -> None:
    rate = Rate()
    rate.add(120.0, 7200.0)
    rate.add(60.0, 3600.0)
    assert rate.at(3600.0 + 100 * WINDOW_S) == pytest.approx(0.0)


def test_another_time_before_the_number_falls_begins_at_once(pool: Directory) -> None:
    def may_shrink(now: float, shrink_after_s: float) -> bool:
        plan = pool.fleet.divide(pool.objectives, now, 8, shrink_after_s=shrink_after_s)
        assert plan is not None
        return plan.may_shrink

    assert [may_shrink(0.0, 10.0), may_shrink(10.0, 10.0)] == [False, True]
    assert [may_shrink(11.0, 20.0), may_shrink(30.0, 20.0), may_shrink(31.0, 20.0)] == [False, False, True]


@pytest.mark.parametrize("shrink_after_s", [60.0, 86_400.0])
def test_the_number_grows_as_fast_however_long_it_stays(pool: Directory, shrink_after_s: float) -> None:
    for second in range(30):
        prompts(pool, since=float(second), count=12)
        plan = pool.fleet.divide(pool.objectives, float(second), 8, shrink_after_s=shrink_after_s)
    assert plan is not None and plan.num_wanted > 3


def test_requests_behind_all_others_want_no_worker(pool: Directory) -> None:
    prompts(pool, 48, priority=LATE_PRIORITY)
    plan = pool.fleet.divide(pool.objectives, 4.0, 8)
    assert plan is not None
    assert (plan.num_wanted, plan.load.queued_s, plan.load.prefill_rate) == (1, 0.0, 0.0)


def test_more_are_wanted_at_once_and_fewer_after_a_while(pool: Directory) -> None:
    """Load of three workers, of seven, and then none."""

    def look(now: float, most: int = 8) -> tuple[int, bool]:
        plan = pool.fleet.divide(pool.objectives, now, most, shrink_after_s=10.0)
        assert plan is not None
        return plan.num_wanted, plan.may_shrink

    assert look(0.0) == (1, False), "the load before is not known"
    for since in (0.0, 4.0, 8.0):
        prompts(pool, since=since)
    assert look(12.0) == (3, True)
    prompts(pool, 48, since=12.0)
    assert look(16.0) == (7, True)
    assert look(25.0) == (7, True)
    assert look(60.0) == (1, True)
    prompts(pool, 48, since=60.0)
    assert look(64.0, most=3) == (3, True)


def test_a_new_manager_does_not_ask_for_fewer(pool: Directory) -> None:
    looks = [pool.fleet.divide(pool.objectives, float(now), most=8, shrink_after_s=10.0) for now in range(12)]
    assert [look.may_shrink for look in looks if look is not None] == [False] * 10 + [True] * 2


def test_a_level_follows_slowly() -> None:
    level = Level(10.0)
    assert level.look(8.0, 0.0) == 8.0
    assert 8.0 < level.look(16.0, 1.0) < 9.0
    assert level.look(16.0, 100.0) == pytest.approx(16.0, abs=0.01)
    assert 0 < level.look(0.0, 150.0) < 1
    assert level.look(0.0, 200.0) == 0, "an objective that nobody can meet asks for workers no longer"


def test_the_highest_number_of_the_last_minute_counts() -> None:
    highest = Highest()
    assert [highest.look(number, now) for number, now in ((3, 0.0), (5, 10.0), (2, 20.0), (4, 30.0))] == [3, 5, 5, 5]
    assert highest.look(1, 10.0 + SHRINK_S + 1) == 4
    assert highest.look(1, 30.0 + SHRINK_S + 1) == 1


def test_the_number_does_not_fall_while_the_queue_is_long(pool: Directory) -> None:
    """Clients that wait for their answers send nothing."""
    for number in range(24):
        admit(pool, f"w{number}", 500, 0.0)
    numbers = []
    for second in range(0, 600, 60):
        plan = pool.fleet.divide(pool.objectives, float(second), 3)
        assert plan is not None
        numbers.append(plan.num_wanted)
    assert numbers == [3] * 10
    for number in range(24):
        pool.end_request(f"w{number}", 600.0)
    plans = [pool.fleet.divide(pool.objectives, now, 3) for now in (661.0, 722.0)]
    assert [plan.num_wanted for plan in plans if plan is not None] == [1, 1]
