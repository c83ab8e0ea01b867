"""What is said of a decision afterwards; `test_directory` has how decisions are kept."""

from raydix.engine.core.manager.explain import HITS, WHY, BlockSource, Decision, Decisions
from raydix.engine.core.manager.placement import PredictedTimes
from raydix.engine.core.types import DraftSource, DraftUse


def test_regret_is_of_the_best_other_candidate() -> None:
    def regret_s(ttft_s: float | None, *considered: tuple[str, float]) -> float | None:
        """Where `a` was chosen; for several names, alike workers."""
        predictions = tuple(
            PredictedTimes(names.split(), 0, 0, 0.0, 0.0, predicted_s) for names, predicted_s in considered
        )
        return Decision(0, "", 10, 4, (), "a", "a", 0.25, predictions, ttft_s).regret_s

    assert regret_s(None, ("a", 0.25), ("b", 0.5)) is None
    assert regret_s(2.0, ("a", 0.25)) == 0.0, "nobody else could have had it"
    assert regret_s(0.75, ("a", 0.25), ("c", 1.0), ("b", 0.5)) == 0.25
    assert regret_s(0.375, ("a", 0.25), ("b", 0.5)) == 0.0, "later than predicted, and sooner than elsewhere"
    assert regret_s(0.75, ("a b", 0.25), ("c", 0.5)) == 0.5, "one of those alike was chosen"


def test_drafts_are_told_by_source() -> None:
    decision = Decision(
        attempt=0,
        tenant="",
        num_tokens=10,
        block_size=4,
        runs=(),
        prefill="a",
        decode="a",
        predicted_ttft_s=0.25,
        considered=(),
    )
    assert decision.as_json()["drafts"] == {}
    decision.drafts = (DraftUse(DraftSource.GRAMMAR, 7, 7), DraftUse(DraftSource.REQUEST, 9, 2))
    assert decision.as_json()["drafts"] == {
        "grammar": {"drafted": 7, "accepted": 7},
        "request": {"drafted": 9, "accepted": 2},
    }


def test_an_answer_with_a_name_of_its_own_is_found_by_both_names() -> None:
    """As a stored response is, whose id is not the request's; a tenant finds its own alone."""
    decisions = Decisions()
    decision = Decision(0, "alice", 10, 4, (), "a", "a", 0.25, ())
    for request_id in ("x-request-ab12-0", "x-request-0f0f.ab12-0", "x-request-0f0f.ab12-1", "plain"):
        decisions.admitted(request_id, decision)
    assert [*decisions.of("0f0f", "alice")] == ["x-request-0f0f.ab12-0", "x-request-0f0f.ab12-1"]
    assert len(decisions.of("x-request")) == 3 and [*decisions.of("plain")] == ["plain"]
    assert not decisions.of("0f0f", "bob") and not decisions.of("ab12") and not decisions.of("")


def test_a_miss_has_a_place_and_a_sentence() -> None:
    def shown(*runs: tuple[BlockSource, int]) -> tuple[object, object]:
        decision = Decision(0, "", 50, 4, runs, "a", "a", 0.25, ())
        return decision.as_json()["left_cache_at"], decision.as_json()["why"]

    assert shown() == shown((BlockSource.LOCAL, 3)) == (None, None)
    assert shown(
        (BlockSource.LOCAL, 3), (BlockSource.STORE, 2), (BlockSource.EVICTED, 1), (BlockSource.NEVER_SEEN, 9)
    ) == (
        20,
        WHY[BlockSource.EVICTED],
    )
    assert shown((BlockSource.NEVER_SEEN, 1)) == (0, WHY[BlockSource.NEVER_SEEN])
    assert {*BlockSource} - HITS == {*WHY}, "each reason has a sentence"
