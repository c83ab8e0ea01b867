"""The description of the HTTP API, as OpenAPI's document: bodies from the models that validate them, responses from
their shapes, errors from their classes."""

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from raydix.engine.api.response_models import ErrorResponse
from raydix.engine.api.responses import Json
from raydix.engine.api.schema_words import Schema
from raydix.engine.core.errors import AuthenticationError, PermissionDeniedError, RaydixError, ServiceError

REF = "#/components/schemas/{model}"
JSON = "application/json"
FORM = "multipart/form-data"
EVENTS = "text/event-stream"
RETRY_AFTER = {"description": "Seconds after which to try again.", "schema": {"type": "string"}}
UNFORESEEN = "`service_unavailable`: A fault of raydix; the message names its record in the logs."

Models: TypeAlias = Mapping[type[BaseModel], Schema]
"""References to models' schemas."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a route beside those of its path."""

    name: str
    place: Literal["query", "header"]
    description: str
    values: tuple[str, ...] | None = None
    """The values that it takes; None: any text."""

    def object(self) -> Json:
        """OpenAPI's parameter object."""
        schema: Json = {"type": "string"}
        if self.values is not None:
            schema["enum"] = list(self.values)
        return {"name": self.name, "in": self.place, "description": self.description, "schema": schema}


@dataclass(frozen=True, slots=True)
class Operation:
    """Contents of one route and method, beside its sentence."""

    response: type[BaseModel] | str | None
    """Model of a JSON response, or the media type of another one; None: only `events`, or never a success."""
    body: type[BaseModel] | None = None
    form: type[BaseModel] | None = None
    """A body that is a form."""
    events: type[BaseModel] | None = None
    """Data of server-sent events."""
    ends_with_done: bool = False
    """The last event is `[DONE]`."""
    parameters: tuple[Parameter, ...] = ()
    errors: tuple[type[RaydixError], ...] = ()
    """Besides those that any route may have."""
    error: type[BaseModel] = ErrorResponse
    """Model of an error."""
    statuses: Mapping[int, int] = field(default_factory=dict)
    """HTTP status by the status of an error, where the two differ."""

    @property
    def models(self) -> list[type[BaseModel]]:
        """All models of the route."""
        kinds = (self.body, self.form, self.response, self.events, self.error)
        return [each for each in kinds if isinstance(each, type)]


def document(
    paths: Mapping[str, Mapping[str, Json]],
    operations: Mapping[tuple[str, str], Operation],
    *,
    version: str,
    open_routes: Collection[str],
) -> Json:
    """OpenAPI's document.

    `paths` is FastAPI's account of the routes: methods, sentences, and the parameters in paths. `operations` are by
    method and path, in the order of the document. Paths in `open_routes` need no key.
    """
    every: list[type[BaseModel]] = [ErrorResponse, *(model for each in operations.values() for model in each.models)]
    models = dict.fromkeys(every)
    schemas, definitions = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    references = {model: schemas[model, "validation"] for model in models}
    return {
        "openapi": "3.1.0",
        "info": {"title": "raydix", "version": version, "description": "OpenAI's API over a shared prefix cache."},
        "paths": _paths(paths, operations, references, open_routes),
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


def _paths(
    paths: Mapping[str, Mapping[str, Json]],
    operations: Mapping[tuple[str, str], Operation],
    models: Models,
    open_routes: Collection[str],
) -> Json:
    described: dict[str, Json] = {}
    for (method, path), operation in operations.items():
        said = paths[path][method]
        described.setdefault(path, {})[method] = _operation(said, operation, models, is_open=path in open_routes)
    return {**described}


def _operation(said: Json, operation: Operation, models: Models, *, is_open: bool) -> Json:
    own = said.get("parameters", [])
    assert isinstance(own, list)
    sentence = " ".join(str(said.get("description", "")).split())
    described: Json = {
        "operationId": said["operationId"],
        "summary": sentence.partition(". ")[0].rstrip("."),
        "description": sentence,
        "parameters": [*own, *(each.object() for each in operation.parameters)],
        "responses": _success(operation, models) | _errors(operation, models, is_open=is_open),
        "security": [] if is_open else [{}, {"key": []}],
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": models[operation.body]}}}
    if operation.form is not None:
        described["requestBody"] = {"required": True, "content": {FORM: {"schema": models[operation.form]}}}
    return described


def _success(operation: Operation, models: Models) -> Json:
    """The response of a success, by its status."""
    content: Json = {}
    if isinstance(operation.response, str):
        content[operation.response] = {"schema": {"type": "string"}}
    elif operation.response is not None:
        content[JSON] = {"schema": models[operation.response]}
    if operation.events is not None:
        content[EVENTS] = {"schema": _event(models[operation.events], ends_with_done=operation.ends_with_done)}
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


def _errors(operation: Operation, models: Models, *, is_open: bool) -> Json:
    """The responses of errors, by status."""
    common = [PermissionDeniedError] if is_open else [AuthenticationError, PermissionDeniedError]
    words: dict[int, list[str]] = {500: [UNFORESEEN]}
    waits: set[int] = set()
    for kind in dict.fromkeys((*common, *operation.errors)):
        status = operation.statuses.get(kind.status, kind.status)
        words.setdefault(status, []).append(f"`{kind.code}`: {inspect.getdoc(kind) or ''}")
        if issubclass(kind, ServiceError):
            waits.add(status)
    return {
        str(status): {
            "description": " ".join(words[status]),
            **({"headers": {"retry-after": RETRY_AFTER}} if status in waits else {}),
            "content": {JSON: {"schema": models[operation.error]}},
        }
        for status in sorted(words)
    }
