"""The corpus of hostile bodies covers every field of every route, within the limit of a body."""

import json
import re
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import pytest

from benchmarks.hostile_bodies import BodySizes, HostileBody, fields_of, hostile_bodies
from raydix.engine.api.openapi import document as document_of
from raydix.engine.api.requests import ChatCompletionRequest
from raydix.engine.api.routes import ROUTES
from tests.unit.ingress import call
from tests.unit.served_app import app
from tests.unit.test_batch_routes import quick, serving

__all__ = ["quick", "serving"]

SMALL = BodySizes(max_body_bytes=16 << 10)
"""A corpus of small bodies has the same cases."""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return dict(document_of(ROUTES, version="0"))


@pytest.fixture(scope="module")
def bodies(document: dict[str, Any]) -> Sequence[HostileBody]:
    return list(hostile_bodies(document, SMALL))


def test_every_field_of_every_route_is_at_its_limit(document: dict[str, Any], bodies: Sequence[HostileBody]) -> None:
    fields = fields_of(document)

    assert {(body.path, body.field) for body in bodies} == fields
    assert len(bodies) >= 200
    assert {path for path, operations in document["paths"].items() if "requestBody" in operations.get("post", {})} == {
        path for path, _ in fields
    }


def test_bodies_are_within_the_limit_and_have_names_of_their_own(bodies: Sequence[HostileBody]) -> None:
    assert [body.name for body in bodies if len(body.data()) > SMALL.max_body_bytes] == []
    assert len({body.name + str(len(body.data())) for body in bodies}) > 0.9 * len(bodies)


def test_a_field_without_effect_leaves_the_rest_of_a_chat_valid(bodies: Sequence[HostileBody]) -> None:
    body = next(body for body in bodies if body.path == "/v1/chat/completions" and body.field == "ignore_eos")

    assert ChatCompletionRequest.model_validate_json(body.data()).messages


def test_bodies_of_the_largest_size_are_near_the_limit(document: dict[str, Any]) -> None:
    sizes = BodySizes()
    started = time.process_time()
    large = [len(body.data()) for body in islice(hostile_bodies(document, sizes), 0, 40)]
    assert max(large) > 0.9 * sizes.max_body_bytes
    assert max(large) <= sizes.max_body_bytes
    assert time.process_time() - started < 60, "far above what forty bodies take"


def test_a_new_field_and_its_bounds_are_covered_by_themselves() -> None:
    schema = {
        "type": "object",
        "required": ["text"],
        "properties": {
            "text": {"type": "string"},
            "number": {"type": "integer", "minimum": 3, "exclusiveMaximum": 9},
            "names": {"type": "array", "maxItems": 5, "items": {"$ref": "#/components/schemas/Name"}},
        },
    }
    document = {
        "paths": {"/new": {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}},
        "components": {"schemas": {"Name": {"type": "string", "maxLength": 7}}},
    }
    sent = [json.loads(body.data()) for body in hostile_bodies(document, SMALL)]

    assert {each["number"] for each in sent if "number" in each} == {3, 8}
    assert max(len(each["names"]) for each in sent if "names" in each) == 5
    assert max(len(name) for each in sent for name in each.get("names", ())) == 7
    assert max(len(each["text"]) for each in sent) == SMALL.value_bytes


def test_no_deep_body_is_a_fault_of_the_server(bodies: Sequence[HostileBody], serving: Callable[..., Any]) -> None:
    """Levels that are read may be too many to be written, and either may be more than a parser takes."""
    deep = [
        body
        for body in bodies
        if body.case.endswith((": deep", ": deepest", ": deep schema", ": too deep to be written"))
    ]
    assert len({body.path for body in deep}) > 10
    assert any(body.path == "/v1/messages/batches" and body.case.endswith("deep schema") for body in deep)

    async def send_all() -> list[str]:
        faults = []
        for body in deep:
            path = re.sub(r"\{\w+\}", "unknown", body.path)
            reply = await call(app, "POST", path, body.data(), headers={"content-type": body.content_type})
            if reply.status >= 500:
                faults.append(f"{reply.status} {body.name}")
        return faults

    assert serving(send_all) == []
