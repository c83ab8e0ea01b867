"""Silent processes, and a listener standing still itself."""

from engine.core.signs_of_life import SignsOfLife


def test_a_process_is_silent_after_its_last_sign() -> None:
    signs = SignsOfLife()
    signs.heard("a", 0.0)
    signs.heard("b", 0.0)
    signs.heard("b", 1.0)
    assert signs.silent(2.0, 2.0) == [] and signs.silent(2.5, 2.0) == ["a"] and signs.silent(3.5, 2.0) == ["a", "b"]
    signs.forget("a")
    assert "a" not in signs and list(signs) == ["b"] and signs.silent(9.0, 2.0) == ["b"]


def test_a_listener_that_stood_still_missed_no_sign() -> None:
    signs = SignsOfLife()
    signs.heard("a", 0.0)
    signs.stood_still(5.0)
    assert signs.silent(7.0, 2.0) == [] and signs.silent(7.5, 2.0) == ["a"]
