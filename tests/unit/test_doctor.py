"""What costs a tenant's prompts their hits: sixty made cases, sums, and what another tenant does not see."""

import asyncio
import json
import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from raydix.engine.core.divergence import RUN, SEED, PromptRecord, Reason, num_again
from raydix.engine.core.doctor import ADVICE, EVICTED, LOST, NO_STATE, RECOMPUTED, Miss, Prompt, report
from raydix.engine.core.manager.explain import BlockSource, Decision, Decisions, Eviction
from raydix.engine.core.tenants import Tenant, Tenants, key_hash
from raydix.engine.serving.prompt_records import PromptRecords
from tests.unit.ingress import FakeLink, Replica, Served, body_of, call
from tests.unit.served_app import app
from tests.unit.test_divergence import (
    BLOCK,
    Pair,
    chat,
    goes_on,
    of_equal,
    of_keys,
    of_message,
    of_order,
    of_reasoning,
    of_space,
    of_system,
    of_template,
    of_volatile,
    record,
    text_of,
)

CASES_OF_EACH = 6
MADE: dict[str, Callable[[random.Random], Pair]] = {
    Reason.SYSTEM_CHANGED: of_system,
    Reason.TOOLS_REORDERED: of_order,
    Reason.KEYS_REORDERED: of_keys,
    Reason.VOLATILE: of_volatile,
    Reason.MESSAGE_EDITED: of_message,
    Reason.REASONING_LEFT_OUT: of_reasoning,
    Reason.WHITE_SPACE: of_space,
    Reason.TEMPLATE: of_template,
    Reason.ANOTHER_SALT: of_equal,
    EVICTED: of_equal,
}


def miss(name: str, num_cached: int, source: str | None = None) -> Miss:
    is_evicted = source == EVICTED
    return Miss((name,), num_cached, 0.001, source, 40.0 if is_evicted else None, 7 if is_evicted else None)


def found(records: Sequence[PromptRecord], misses: Sequence[Miss] = (), text: Any = text_of, now: float = 600.0) -> Any:
    """The report about these prompts, which came a second apart from 0 on."""
    prompts = [Prompt(str(number), float(number), each) for number, each in enumerate(records)]
    return report(prompts, {name: each for each in misses for name in each.names}, text, now)


def test_nine_of_sixty_made_cases_in_ten_have_their_reason() -> None:
    wrong = []
    for reason, made in MADE.items():
        for number in range(CASES_OF_EACH):
            before, now = made(random.Random(f"{reason}/{number}"))
            salts = (b"a", b"b") if reason is Reason.ANOTHER_SALT else (b"", b"")
            misses = [miss("1", 0, EVICTED)] if reason == EVICTED else []
            # Another application's prompt lies between, and another turn follows.
            records = [record(before, salts[0]), record(chat(random.Random(number))), record(now, salts[1])]
            findings = found([records[0], records[2], records[1]], misses)["findings"]
            if [finding["reason"] for finding in findings[:1]] != [reason]:
                wrong.append((reason, number, findings))
    assert len(wrong) <= 0.1 * CASES_OF_EACH * len(MADE), wrong


def test_prompts_that_ask_something_else_have_lost_nothing() -> None:
    """They part where they must: the same system prompt and tools, and another question."""
    first = chat(random.Random(1))
    others = [{**first, "messages": chat(random.Random(seed))["messages"]} for seed in (2, 3)]
    reported = found([record(first), *map(record, others), record(goes_on(random.Random(4), first))])
    assert reported["findings"] == [] and reported["prompts"] == 4


def ids(*parts: Sequence[int]) -> PromptRecord:
    return PromptRecord(array("I", [token for part in parts for token in part]), (), b"", BLOCK)


def of_ids(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


OPENING, REST = range(100, 164), range(1000, 1320)


def test_the_cost_is_that_of_the_tokens_that_both_have_behind_the_place() -> None:
    records = [ids(OPENING, [number], REST, range(5000 * number, 5000 * number + 30)) for number in range(1, 5)]
    misses = [miss(str(number), 64) for number in range(4)]
    reported = found(records, misses)
    [finding] = reported["findings"]
    assert (finding["prompts"], finding["lost_tokens"]) == (3, 3 * len(REST))
    assert finding["lost_s"] == pytest.approx(0.96)
    assert finding["lost_tokens_per_day"] == 144 * 3 * len(REST), "found in ten minutes"
    assert finding["lost_s_per_day"] == pytest.approx(144 * 0.96)
    example = finding["example"]
    assert (example["id"], example["token_index"], example["lost_tokens"]) == ("1", 64, len(REST))
    assert (reported["observed_s"], reported["cached_tokens"]) == (600.0, 4 * 64)
    unknown = found(records, misses[:3])["findings"]
    assert unknown[0]["lost_s"] is None and unknown[0]["lost_tokens"] == 3 * len(REST)


def test_what_was_evicted_is_told_with_the_room_that_was_short() -> None:
    same = ids(OPENING, REST)
    [finding] = found([same, same, same], [miss("1", 384 - BLOCK), miss("2", 64, EVICTED)])["findings"]
    assert (finding["reason"], finding["lost_tokens"]) == (EVICTED, 320)
    assert (finding["evicted_ago_s"], finding["more_blocks"]) == (40.0, 7)
    assert found([same, same], [miss("1", 64, LOST)])["findings"][0]["reason"] == LOST
    assert found([same, same], [miss("1", 64, "never_seen")])["findings"][0]["reason"] == "not_found"
    assert not found([same, same], [miss("1", 64, RECOMPUTED)])["findings"], "it was quicker so"
    assert not found([same, same], [miss("1", 64, NO_STATE)])["findings"], "the next one hits"


def test_a_prompt_of_which_more_was_found_than_is_known_has_lost_nothing() -> None:
    one, other = ids(OPENING, [1], REST), ids(OPENING, [2], REST)
    assert found([one, other])["findings"] and not found([one, other], [miss("1", 320)])["findings"]


def test_prompts_are_of_the_last_hour_and_each_is_compared_with_earlier_ones() -> None:
    one, other = ids(OPENING, [1], REST), ids(OPENING, [2], REST)
    assert found([one, other], now=3599.0)["prompts"] == 2
    reported = found([one, other], now=3601.0)
    assert (reported["prompts"], reported["findings"]) == (1, [])
    assert found([], now=1.0) == {
        "object": "cache.doctor",
        "observed_s": 0.0,
        "prompts": 0,
        "prompt_tokens": 0,
        "cached_tokens": 0,
        "findings": [],
    }


def test_applications_are_told_apart_by_how_their_prompts_begin() -> None:
    records = [
        ids(range(start, start + 64), [number], range(10 * start, 10 * start + 320))
        for start in (100, 200)
        for number in (1, 2)
    ]
    assert [finding["prompts"] for finding in found(records, text=of_ids)["findings"]] == [1, 1]


@pytest.mark.parametrize("shift", [0, 1, 5, SEED])
def test_runs_are_found_wherever_they_are(shift: int) -> None:
    there = array("I", [*range(7), *REST])
    now = array("I", [*range(500, 500 + shift), *REST])
    assert num_again(there, now) == len(REST)
    assert num_again(there, array("I", range(5000, 5100))) == 0
    assert num_again(there, array("I", [1, *REST[: RUN + SEED], 2, *REST[-RUN - SEED :], 3])) == 2 * (RUN + SEED)
    assert num_again(there, array("I", [1, *REST[: RUN - 1], 2])) == 0, "a frame around other texts"
    assert num_again(array("I"), now) == num_again(there, array("I")) == 0


def test_each_reason_has_advice() -> None:
    assert {*Reason, EVICTED, LOST} == {*ADVICE}
    assert {EVICTED, LOST, NO_STATE, RECOMPUTED} <= {*map(str, BlockSource)}


def test_the_manager_tells_of_a_tenants_own_prompts_since_a_time() -> None:
    decisions = Decisions()
    runs = ((BlockSource.LOCAL, 3), (BlockSource.EVICTED, 2))
    for number, tenant in enumerate("abaa"):
        decision = Decision(0, tenant, 50, 4, runs, "w", "w", 0.25, ())
        decision.admitted_at, decision.uncached_s = 100.0 + number, 0.5
        decision.eviction = Eviction(90.0, 5)
        decisions.admitted(f"r{number}-ff-0", decision)
        decisions.admitted(f"r{number}-ff-1", decision)
    assert decisions.misses("a", 102.0) == [
        Miss(("r3",), 12, 0.01, EVICTED, 13.0, 5),
        Miss(("r2",), 12, 0.01, EVICTED, 12.0, 5),
    ]
    assert [each.names for each in decisions.misses("b", 0.0)] == [("r1",)]


def test_decisions_are_found_by_each_name_until_they_are_forgotten() -> None:
    decisions = Decisions(capacity=3)

    def admit(request_id: str, tenant: str = "a") -> None:
        decisions.admitted(request_id, Decision(0, tenant, 50, 4, (), "w", "w", 0.25, ()))
        decisions.check_integrity()

    admit("mine-ff-0")
    admit("mine-ff-1", "b")
    admit("other-mine.aa-0")
    assert [*decisions.of("mine")] == ["mine-ff-0", "mine-ff-1", "other-mine.aa-0"], "in the order of their admissions"
    assert [*decisions.of("mine", "b")] == ["mine-ff-1"] and [*decisions.of("mine-ff-1")] == ["mine-ff-1"]
    admit("alone")
    assert [*decisions.of("mine")] == ["mine-ff-1", "other-mine.aa-0"] and decisions.of("mine-ff-0") == {}
    assert [*decisions.of("alone")] == ["alone"] and decisions.of("unknown") == {}
    admit("mine-ff-0")
    assert [*decisions.of("mine")] == ["other-mine.aa-0", "mine-ff-0"], "admitted again, it is a later one"


# Over HTTP

SECRETS = {"a": "of apples and acorns", "b": "of beets and birches"}


def asked(served: Served, made: Replica, key: str, **fields: Any) -> Any:
    headers = {"x-api-key": key}
    return served(made, lambda: call(app, "POST", "/v1/messages", body_of("messages", **fields), headers=headers)).json


def doctor(served: Served, made: Replica, key: str) -> bytes:
    headers = {"authorization": f"Bearer {key}"}
    return bytes(served(made, lambda: call(app, "GET", "/v1/cache/doctor", headers=headers)).body)


def test_a_tenant_sees_its_own_prompts_alone(served: Served) -> None:
    names = [Tenant("a"), Tenant("b", is_admin=True), Tenant("c")]
    made = Replica(max_model_len=1000, tenants=Tenants(names, {key_hash(name): name for name in "abc"}))
    for key, secret in SECRETS.items():
        for day in ("one", "two", "six"):
            system = f"you speak {secret} on day {day} and on no other day of them all, but of nothing else"
            asked(served, made, key, system=system, messages=[{"role": "user", "content": "hi"}])
    for key, other in (("a", "b"), ("b", "a")):
        told = doctor(served, made, key)
        findings = json.loads(told)["findings"]
        assert findings and any("day" in finding["example"]["text_before"] for finding in findings)
        assert SECRETS[other] not in told.decode() and not any(
            word in told.decode() for word in SECRETS[other].split() if len(word) > 3
        )
    assert json.loads(doctor(served, made, "c"))["prompts"] == 0


def test_without_the_manager_the_texts_still_tell(served: Served) -> None:
    manager = FakeLink()
    made = Replica(max_model_len=1000, manager=manager)
    for day in ("one", "two"):
        asked(served, made, "", system=f"on day {day} and on no other day of them all, but of nothing else")
    manager.is_away = True
    told = json.loads(doctor(served, made, ""))
    assert told["findings"] and told["findings"][0]["lost_s"] is None and told["cached_tokens"] is None


def test_a_report_is_made_once_for_all_who_ask_at_a_time(served: Served) -> None:
    made = Replica()
    first = doctor(served, made, "")
    asked(served, made, "", messages=[{"role": "user", "content": "hi"}])
    assert doctor(served, made, "") == first


def test_decisions_are_found_by_the_ids_of_answers() -> None:
    records = PromptRecords(of_ids, clock=lambda: 10.0)
    one, other = ids(OPENING, [1], REST), ids(OPENING, [2], REST)
    records.add("chatcmpl-x", "a", None, one)
    records.add("msg_y", "a", None, other)
    told: Any = asyncio.run(records.doctor("a", [miss("y", 64), miss("x", 0), miss("y", 0)]))
    assert told["findings"][0]["lost_s"] == pytest.approx(0.001 * len(REST))
    assert told["cached_tokens"] == 64, "of two of the same name the latest"
