"""A server that makes drafts: the same answers with and without, and the counts of each source."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from raydix.engine.model.sources import DEFAULT_MODEL
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL, Server, eventually

FILE = "".join(f"def area_{name}(width, height):\n    return width * height\n\n\n" for name in ("a", "b", "c", "d"))
QUESTION = [{"role": "user", "content": f"Repeat this file:\n{FILE}"}]
SCHEMA = {
    "type": "object",
    "properties": {"function_name": {"type": "string", "maxLength": 12}, "number_of_arguments": {"type": "integer"}},
    "required": ["function_name", "number_of_arguments"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}


LIMITS = {"token_budget": 256, "max_requests": 8}


def ask(drafting: Server, salt: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 60, "logprobs": True, "cache_salt": salt, "seed": 5}
    status, _, data = drafting.request("POST", "/v1/chat/completions", {**body, **fields})
    assert status == 200, data
    answer: dict[str, Any] = json.loads(data)
    return answer


def drafts_of(drafting: Server, answer: dict[str, Any]) -> dict[str, dict[str, int]]:
    """By source, once the request's end is known."""
    found: dict[str, dict[str, int]] = attempt_of(drafting, answer)["drafts"]
    return found


def attempt_of(drafting: Server, answer: dict[str, Any]) -> dict[str, Any]:
    """The explanation of the last attempt, once its end is known."""

    def explained() -> dict[str, Any] | None:
        _, _, data = drafting.request("GET", f"/v1/requests/{answer['id']}/explain")
        attempt: dict[str, Any] = json.loads(data)["choices"][0]["attempts"][-1]
        return attempt if attempt["ended"] == "finished" else None

    found: dict[str, Any] = eventually(explained, "its end is known")
    return found


def ask_until_drafted(
    drafting: Server, salt: str, source: str | None, expected: dict[str, Any], **fields: Any
) -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
    """The first of equal answers with an accepted draft of `source`, of any where it is None, and its counts.

    What drafts cost is measured, and with little known of a busy machine they may seem not worth their time.
    """

    def drafted() -> tuple[dict[str, Any], dict[str, dict[str, int]]] | None:
        answer = ask(drafting, salt, **fields)
        assert answer["choices"] == expected["choices"]
        counts = drafts_of(drafting, answer)
        num_accepted = {name: each["accepted"] for name, each in counts.items() if source in (None, name)}
        return (answer, counts) if sum(num_accepted.values()) > 0 else None

    found: tuple[dict[str, Any], dict[str, dict[str, int]]] = eventually(drafted, "a draft is accepted")
    return found


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize(
    ("source", "fields"),
    [("prediction", {"prediction": {"type": "content", "content": FILE}}), ("grammar", {"response_format": FORM})],
)
def test_answers_are_the_same_with_drafts(
    one_process: Server, source: str, fields: dict[str, Any], temperature: float
) -> None:
    fields = {**fields, "temperature": temperature}
    salt = f"{source} {temperature}"
    plain = ask(one_process, salt, speculation=False, **fields)
    assert not drafts_of(one_process, plain)

    # Also where a guess from elsewhere promises more than the client's prediction.
    drafted, counts = ask_until_drafted(one_process, salt, "grammar" if source == "grammar" else None, plain, **fields)
    details = drafted["usage"]["completion_tokens_details"]
    num_accepted = sum(each["accepted"] for each in counts.values())
    assert details["accepted_prediction_tokens"] == num_accepted
    assert details["rejected_prediction_tokens"] == sum(each["drafted"] for each in counts.values()) - num_accepted


def is_new(text: str, begin: int) -> bool:
    """True if the eight characters there come nowhere before."""
    return text.index(text[begin : begin + 8]) == begin


@pytest.mark.parametrize("num_choices", [1, 3])
def test_choices_that_end_with_a_stop_string_are_the_same_with_drafts(one_process: Server, num_choices: int) -> None:
    fields: dict[str, Any] = {"n": num_choices, "temperature": 0.7 if num_choices > 1 else 0}
    salt = f"{num_choices} choices"
    whole = ask(one_process, salt, speculation=False, **fields)["choices"][0]["message"]["content"]
    # Ends the first answer three quarters of its way, where steps with drafts have come before.
    stop = next(whole[begin : begin + 8] for begin in range(len(whole) * 3 // 4, len(whole)) if is_new(whole, begin))
    fields |= {"stop": [stop], "prediction": {"type": "content", "content": whole}}
    plain = ask(one_process, salt, speculation=False, **fields)
    assert plain["choices"][0]["matched_stop"] == stop and len(plain["choices"]) == num_choices
    if num_choices == 1:
        ask_until_drafted(one_process, salt, None, plain, **fields)
    else:  # where a draft is not worth its time beside the other choices, on some machines never
        assert ask(one_process, salt, **fields)["choices"] == plain["choices"]


def test_another_salt_has_no_past(one_process: Server) -> None:
    mine = ask(one_process, "mine", temperature=0)
    assert "past" not in drafts_of(one_process, ask(one_process, "others", temperature=0))
    ask_until_drafted(one_process, "mine", "past", mine, temperature=0)


def test_a_prediction_of_another_form_is_refused(one_process: Server) -> None:
    body = {"messages": QUESTION, "prediction": {"type": "content", "content": [{"type": "image_url"}]}}
    status, _, data = one_process.request("POST", "/v1/chat/completions", body)
    assert status == 400 and json.loads(data)["error"]["param"] == "prediction.content"


def test_a_question_asked_again_is_drafted_from_the_answer_of_another_worker(cluster: Cluster) -> None:
    config = {
        "model": {"source": DEFAULT_MODEL, "max_model_len": 2048},  # whose steps cost enough for drafts
        "cache": {"num_blocks": 300, "segment_gib": 0.25, "swap_gib": 0.05},
        "speculation": {"mode": "auto", "sources": ["cluster"]},
        "workers": {"prefill": LIMITS, "decode": {**LIMITS, "replicas": 2}},
    }
    drafting = cluster.serve(config).server
    with ThreadPoolExecutor(4) as pool:
        first = ask(drafting, "mine", temperature=0.7)
        told = attempt_of(drafting, first)
        assert told["drafts"] == {}

        # Several at a time, so that both decode workers get some; a worker that knows no times yet is careful.
        elsewhere = list[int]()
        for _ in range(20):
            for again in pool.map(lambda _: ask(drafting, "mine", temperature=0.7), range(4)):
                assert again["choices"] == first["choices"]
                attempt = attempt_of(drafting, again)
                assert attempt["drafts"].keys() <= {"cluster"}
                if attempt["decode_worker"] != told["decode_worker"]:
                    elsewhere.append(attempt["drafts"].get("cluster", {"accepted": 0})["accepted"])
            if max(elsewhere, default=0) > 20:
                break
        assert elsewhere, "none went to the other worker"
        assert max(elsewhere) > 20

        others = ask(drafting, "others", temperature=0.7)
        plain = ask(drafting, "mine", temperature=0.7, speculation=False)
        assert drafts_of(drafting, others) == {} == drafts_of(drafting, plain)
        assert others["choices"] == first["choices"] == plain["choices"]
        eventually(lambda: accepted_by_cluster(drafting) > 20, "the workers' metrics")

        assert drafting.request("POST", "/reset_prefix_cache")[0] == 200
        assert drafts_of(drafting, ask(drafting, "mine", temperature=0.7)) == {}, "a reset forgets the answers"


def accepted_by_cluster(drafting: Server) -> float:
    """Of all workers."""
    _, _, data = drafting.request("GET", "/metrics")
    lines = [line for line in data.decode().splitlines() if line.startswith("raydix_accepted_draft_tokens")]
    return sum(float(line.split()[-1]) for line in lines if 'source="cluster"' in line)
