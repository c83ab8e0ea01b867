"""What the benchmark of agents at work makes of their streams."""

import pytest

from benchmarks.agents_live import LiveAgent, figures


def test_the_figures_are_of_all_agents_together() -> None:
    quick, slow = LiveAgent(0, first_tokens_s=[0.1, 0.2]), LiveAgent(1, first_tokens_s=[5.0], num_pauses=1)
    usage = {"prompt_tokens": 50, "prompt_tokens_details": {"cached_tokens": 20}}
    for agent in (quick, slow):
        assert agent._piece({"choices": [{"delta": {"content": "a"}}, {"delta": {}}]}) == "a"
        assert agent._piece({"choices": [], "usage": usage}) == ""
    assert figures([quick, slow], seconds=9.0) == {
        "steps_per_h": 1200.0,
        "first_token_p50_s": 0.2,
        "first_token_p90_s": 5.0,
        "first_token_max_s": 5.0,
        "computed_tokens": 60,
        "cached_share": 0.4,
        "pauses": 1,
    }


def test_an_agent_whose_stream_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"agent 3: .*no room"):
        LiveAgent(3)._piece({"error": {"message": "no room"}})
