"""The description of the HTTP API, as OpenAPI's document: routes as they are declared (`raydix.engine.api.routes`),
bodies from the models that validate them, responses from their shapes, errors from their classes."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from raydix.engine.api.response_models import ErrorResponse
from raydix.engine.api.responses import Json
from raydix.engine.api.route import Access, Route
from raydix.engine.api.schema_words import Schema
from raydix.engine.core.errors import ServiceError

REF = "#/components/schemas/{model}"
JSON = "application/json"
FORM = "multipart/form-data"
EVENTS = "text/event-stream"
RETRY_AFTER = {"description": "Seconds after which to try again.", "schema": {"type": "string"}}
UNFORESEEN = "`service_unavailable`: A fault of raydix; the message names its record in the logs."

Models: TypeAlias = Mapping[type[BaseModel], Schema]
"""References to models' schemas."""


def document(routes: Sequence[Route], *, version: str) -> Json:
    """OpenAPI's document of the routes, in their order."""
    every: list[type[BaseModel]] = [ErrorResponse, *(model for route in routes for model in route.models)]
    models = dict.fromkeys(every)
    schemas, definitions = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    references = {model: schemas[model, "validation"] for model in models}
    paths: dict[str, dict[str, Json]] = {}
    for route in routes:
        paths.setdefault(route.shown_path, {})[route.method.lower()] = _operation(route, references)
    return {
        "openapi": "3.1.0",
        "info": {"title": "raydix", "version": version, "description": "OpenAI's API over a shared prefix cache."},
        "paths": {**paths},
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Where there are tenants; or in x-api-key.",
                }
            },
        },
    }


def _operation(route: Route, models: Models) -> Json:
    described: Json = {
        "operationId": _operation_id(route),
        "summary": route.sentence.partition(". ")[0].rstrip("."),
        "description": route.sentence,
        "parameters": [
            *(_path_parameter(name) for name in route.path_parameters),
            *(each.object() for each in route.parameters),
        ],
        "responses": _success(route, models) | _errors(route, models),
        # The empty one: a server without tenants wants no key.
        "security": [] if route.access is Access.EVERYBODY else [{}, {"key": []}],
    }
    if route.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": models[route.body]}}}
    if route.form is not None:
        described["requestBody"] = {"required": True, "content": {FORM: {"schema": models[route.form]}}}
    return described


def _operation_id(route: Route) -> str:
    """A name that is unique in the document; clients that are generated from the document name methods by it."""
    place = re.sub(r"\W", "_", route.shown_path)
    return f"{route.operation or route.name}{place}_{route.method.lower()}"


def _path_parameter(name: str) -> Json:
    title = name.replace("_", " ").title()
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "title": title}}


def _success(route: Route, models: Models) -> Json:
    """The response of a success, by its status."""
    content: Json = {}
    if isinstance(route.response, str):
        content[route.response] = {"schema": {"type": "string"}}
    elif route.response is not None:
        content[JSON] = {"schema": models[route.response]}
    if route.events is not None:
        content[EVENTS] = {"schema": _event(models[route.events], ends_with_done=route.ends_with_done)}
    return {"200": {"description": "Success.", "content": content}} if content else {}


def _event(data: Schema, *, ends_with_done: bool) -> Schema:
    """A server-sent event whose data are JSON of a schema, in the form of OpenAPI 3.2."""
    payload: Schema = {"type": "string", "contentMediaType": JSON, "contentSchema": data}
    fields: Schema = {
        "data": {"anyOf": [payload, {"const": "[DONE]"}]} if ends_with_done else payload,
        "event": {"type": "string"},
        "id": {"type": "string"},
    }
    return {"type": "object", "properties": fields, "required": ["data"]}


def _errors(route: Route, models: Models) -> Json:
    """The responses of errors, by status."""
    words: dict[int, list[str]] = {500: [UNFORESEEN]}
    waits: set[int] = set()
    for kind in route.all_errors:
        status = route.wire.statuses.get(kind.status, kind.status)
        words.setdefault(status, []).append(f"`{kind.code}`: {inspect.getdoc(kind) or ''}")
        if issubclass(kind, ServiceError):
            waits.add(status)
    return {
        str(status): {
            "description": " ".join(words[status]),
            **({"headers": {"retry-after": RETRY_AFTER}} if status in waits else {}),
            "content": {JSON: {"schema": models[route.wire.error]}},
        }
        for status in sorted(words)
    }
