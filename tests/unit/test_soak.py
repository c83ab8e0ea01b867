"""The long load: its bodies are determined by their numbers, and its report tells growth from a plateau."""

import json
from typing import Any

import pytest

from benchmarks.mixed_bodies import KINDS, SHARED, as_collected, ask, collected, essence, prompt
from benchmarks.soak import ProcessSample, ServerSample, slope_per_hour, summary, table


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_is_determined_by_its_kind_and_number(kind: str) -> None:
    one, same, other = (ask(kind, number, 40, 8) for number in (5, 5, 6))
    assert one == same
    assert one.data() != other.data()
    assert json.loads(one.data(stream=True)) == {**one.body, "stream": True}


def test_neighbours_share_the_beginning_of_their_prompts() -> None:
    first, *others = (prompt("chat", number, 40).split() for number in range(SHARED + 1))
    assert [words[:30] == first[:30] for words in others] == [True] * (SHARED - 1) + [False]
    assert len({tuple(words) for words in [first, *others]}) == SHARED + 1


ANSWER: dict[str, Any] = {
    "choices": [
        {
            "index": 0,
            "text": " is not",
            "token_ids": [314, 441],
            "logprobs": {
                "tokens": [" is", " not"],
                "token_logprobs": [-2.5, -3.25],
                "top_logprobs": [{" is": -2.5, " of": -1.5}, {" not": -3.25}],
                "text_offset": [0, 3],
            },
            "finish_reason": "length",
        }
    ]
}


def chunks() -> list[dict[str, Any]]:
    """The same answer as a stream sends it."""
    whole = ANSWER["choices"][0]
    found: list[dict[str, Any]] = [{"choices": [{"index": 0, "text": "", "logprobs": None}]}]
    for at, token_id in enumerate(whole["token_ids"]):
        logprobs = {key: [values[at]] for key, values in whole["logprobs"].items()}
        found.append({"choices": [{"index": 0, "token_ids": [token_id], "logprobs": logprobs}]})
    return [*found, {"choices": [], "usage": {}}]


def test_a_stream_has_the_tokens_and_log_probabilities_of_the_answer() -> None:
    assert collected(chunks()) == as_collected(ANSWER)
    assert collected(chunks()[:-2]) != as_collected(ANSWER)


@pytest.mark.parametrize(
    "path", [("token_ids", 1), ("logprobs", "token_logprobs", 1), ("logprobs", "top_logprobs", 0, " of"), ("text",)]
)
def test_one_other_token_text_or_log_probability_is_a_difference(path: tuple[Any, ...]) -> None:
    other = json.loads(json.dumps(ANSWER))
    assert essence(other) == essence(ANSWER)
    *way, last = path
    place = other["choices"][0]
    for step in way:
        place = place[step]
    place[last] = "x" if isinstance(place[last], str) else place[last] + 1e-9 if "logprobs" in path else 7
    assert essence(other) != essence(ANSWER)


def sample(at_s: float, uss: float) -> ServerSample:
    return ServerSample(
        at_s, {"Worker 7": ProcessSample(uss + 50, uss, 40, 9), f"Reader {at_s}": ProcessSample(9, 9, 3, 1)}, 1.0, {}, 0
    )


def test_the_slope_is_that_of_the_second_half() -> None:
    growing = [sample(30.0 * number, 800.0 + 2 * min(number, 10)) for number in range(21)]
    [row] = summary(growing)
    assert row["process"] == "Worker"
    assert row["uss"] == [802.0, 820.0, 820.0]
    assert row["slope_mib_per_h"] == 0.0
    assert slope_per_hour(growing[:11], "Worker 7") == pytest.approx(240.0)
    assert "+0.0" in table([row])
