"""A server that makes drafts: the same answers with and without, and the counts of each source."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.core.errors import StartupError
from engine.model.sources import DEFAULT_MODEL, resolve_model
from tests.integration.conftest import MODEL, Server, eventually
from tests.integration.test_disk import server

FILE = "".join(f"def area_{name}(width, height):\n    return width * height\n\n\n" for name in ("a", "b", "c", "d"))
QUESTION = [{"role": "user", "content": f"Repeat this file:\n{FILE}"}]
SCHEMA = {
    "type": "object",
    "properties": {"function_name": {"type": "string", "maxLength": 12}, "number_of_arguments": {"type": "integer"}},
    "required": ["function_name", "number_of_arguments"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    try:
        resolve_model(DEFAULT_MODEL)
    except StartupError as error:
        pytest.skip(str(error))
    config: Path = tmp_path_factory.mktemp("drafts") / "drafts.yaml"
    workers = {"mixed": {"token_budget": 256, "max_requests": 8}}
    parts = {"model": {"max_model_len": 2048}, "cache": {"num_blocks": 300}, "speculation": {"mode": "auto"}}
    config.write_text(yaml.safe_dump({**parts, "workers": workers}))
    with server(config) as terminal:
        yield Server("127.0.0.1", terminal.port)


def ask(drafting: Server, salt: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 60, "logprobs": True, "cache_salt": salt, "seed": 5}
    status, _, data = drafting.request("POST", "/v1/chat/completions", {**body, **fields})
    assert status == 200, data
    answer: dict[str, Any] = json.loads(data)
    return answer


def drafts_of(drafting: Server, answer: dict[str, Any]) -> dict[str, dict[str, int]]:
    """By source, once the request's end is known."""

    def explained() -> dict[str, Any] | None:
        _, _, data = drafting.request("GET", f"/v1/requests/{answer['id']}/explain")
        attempt: dict[str, Any] = json.loads(data)["choices"][0]["attempts"][-1]
        return attempt if attempt["ended"] == "finished" else None

    found: dict[str, dict[str, int]] = eventually(explained, "its end is known")["drafts"]
    return found


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize(
    ("source", "fields"),
    [("prediction", {"prediction": {"type": "content", "content": FILE}}), ("grammar", {"response_format": FORM})],
)
def test_answers_are_the_same_with_drafts(
    drafting: Server, source: str, fields: dict[str, Any], temperature: float
) -> None:
    fields = {**fields, "temperature": temperature}
    salt = f"{source} {temperature}"
    plain = ask(drafting, salt, speculation=False, **fields)
    drafted = ask(drafting, salt, **fields)
    again = ask(drafting, salt, **fields)
    assert plain["choices"] == drafted["choices"] == again["choices"]
    assert not drafts_of(drafting, plain)

    counts = drafts_of(drafting, drafted)
    details = drafted["usage"]["completion_tokens_details"]
    num_accepted = sum(each["accepted"] for each in counts.values())
    assert details["accepted_prediction_tokens"] == num_accepted > 0
    assert details["rejected_prediction_tokens"] == sum(each["drafted"] for each in counts.values()) - num_accepted
    assert source == "prediction" or counts["grammar"]["drafted"] == counts["grammar"]["accepted"] > 0
    assert sum(each["accepted"] for each in drafts_of(drafting, again).values()) > 0


def test_another_salt_has_no_past(drafting: Server) -> None:
    ask(drafting, "mine", temperature=0)
    assert "past" not in drafts_of(drafting, ask(drafting, "others", temperature=0))
    assert drafts_of(drafting, ask(drafting, "mine", temperature=0))["past"]["accepted"] > 0


def test_a_prediction_of_another_form_is_refused(drafting: Server) -> None:
    body = {"messages": QUESTION, "prediction": {"type": "content", "content": [{"type": "image_url"}]}}
    status, _, data = drafting.request("POST", "/v1/chat/completions", body)
    assert status == 400 and json.loads(data)["error"]["param"] == "prediction.content"
