"""Silent processes, and a listener standing still itself."""

from raydix.engine.core.signs_of_life import COMPUTING_S, SignsOfLife


def test_a_process_is_silent_after_its_last_sign() -> None:
    signs = SignsOfLife()
    signs.heard("a", 0.0)
    signs.heard("b", 0.0)
    signs.heard("b", 1.0)
    assert signs.silent(2.0, 2.0) == [] and signs.silent(2.5, 2.0) == ["a"] and signs.silent(3.5, 2.0) == ["a", "b"]
    signs.forget("a")
    assert "a" not in signs and list(signs) == ["b"] and signs.silent(9.0, 2.0) == ["b"]


def test_a_process_that_computes_is_quiet_and_not_silent_for_a_while() -> None:
    signs = SignsOfLife()
    signs.heard("a", 0.0)
    for now in range(1, 60):
        signs.computes("a", float(now))
        assert signs.quiet(now + 0.5, 1.0) == ["a"]
        assert signs.silent(now + 0.5, 3.0) == (["a"] if now + 0.5 > COMPUTING_S + 3.0 else [])
    signs.heard("a", 60.0)
    assert signs.quiet(61.0, 1.0) == [] and signs.silent(63.0, 3.0) == []
    assert signs.silent(63.5, 3.0) == ["a"], "what was seen before the last answer does not count"
    signs.computes("a", 63.5)
    signs.stood_still(5.0)
    assert signs.silent(71.5, 3.0) == [] and signs.silent(72.0, 3.0) == ["a"]
    signs.forget("a")
    signs.computes("a", 73.0)
    assert "a" not in signs and signs.silent(99.0, 3.0) == []


def test_a_listener_that_stood_still_missed_no_sign() -> None:
    signs = SignsOfLife()
    signs.heard("a", 0.0)
    signs.stood_still(5.0)
    assert signs.silent(7.0, 2.0) == [] and signs.silent(7.5, 2.0) == ["a"]
