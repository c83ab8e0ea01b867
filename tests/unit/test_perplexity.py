"""What the benchmark of perplexity makes of a text and of losses."""

import math

import pytest

from benchmarks.perplexity import python_help, report, windows


def test_windows_are_disjoint_and_spread_over_the_text() -> None:
    assert windows(range(100), 10, 3) == [range(10), range(30, 40), range(60, 70)]
    assert windows(range(39), 10, 8) == [range(10), range(10, 20), range(20, 30)]
    assert windows(range(9), 10, 8) == []


def test_perplexity_and_what_it_is_over_the_base() -> None:
    figures = report({"bfloat16": [1.0, 3.0], "int8": [1.0, 3.02]})
    assert figures["bfloat16"] == pytest.approx(
        {"perplexity": math.exp(2), "over_percent": 0, "over_standard_error_percent": 0}
    )
    assert figures["int8"]["perplexity"] == pytest.approx(math.exp(2.01))
    assert figures["int8"]["over_percent"] == pytest.approx(100 * (math.exp(0.01) - 1))
    assert figures["int8"]["over_standard_error_percent"] == pytest.approx(1.0)


def test_every_python_brings_a_text() -> None:
    assert len(python_help()) > 100_000
