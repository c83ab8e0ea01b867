"""OpenAI's files and batches: requests, lines of input and output, and objects, as JSON."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias, get_args

import orjson
from pydantic import Field, StringConstraints, ValidationError

from raydix.engine.api.responses import Json
from raydix.engine.api.validation import StrictModel, request_error
from raydix.engine.api.wire import OPENAI, WireFormat
from raydix.engine.core.batches.batch_run import Progress
from raydix.engine.core.batches.records import Problem, Status
from raydix.engine.core.errors import RaydixError, RequestError, ServiceError

Endpoint: TypeAlias = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
"""Route of the lines of OpenAI's batches."""
MessagesEndpoint: TypeAlias = Literal["/v1/messages"]
"""Route of the lines of Anthropic's batches."""
LineEndpoint: TypeAlias = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages"]
ENDPOINTS: tuple[LineEndpoint, ...] = get_args(LineEndpoint)
MESSAGES: MessagesEndpoint = "/v1/messages"
MESSAGES_WINDOW = "24h"  # completion window of Anthropic's batches
MAX_CUSTOM_ID = 512  # characters of a line's `custom_id`
MIN_LIFE_S, MAX_LIFE_S = 3600, 30 * 86_400  # bounds of a file's life
UNIT_S = {"m": 60, "h": 3600, "d": 86_400}
MAX_WINDOW_S = 30 * 86_400
MODEL_FAILED = 500  # status of a request with which the model raises, and would again


# Requests


class ExpiresAfter(StrictModel):
    """The end of a file's life."""

    anchor: Literal["created_at"] = Field(description="From when on the seconds count.")
    seconds: Annotated[int, Field(ge=MIN_LIFE_S, le=MAX_LIFE_S)] = Field(description="An hour to 30 days.")


class UploadFields(StrictModel):
    """Fields of an upload beside the file, as OpenAI's client names them in a form."""

    purpose: Literal["batch"] = Field(description="Files are for batches.")
    anchor: Literal["created_at"] | None = Field(
        default=None, alias="expires_after[anchor]", description="From when on the seconds count."
    )
    seconds: str | None = Field(
        default=None,
        alias="expires_after[seconds]",
        description="When the file is erased, an hour to 30 days; by default as the configuration says.",
    )


MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]


class BatchRequest(StrictModel):
    """Body of `POST /v1/batches`."""

    input_file_id: str = Field(description="A file uploaded with the purpose `batch`.")
    endpoint: Endpoint = Field(description="The route of every line.")
    completion_window: str = Field(
        description="Time after which lines that have not run do not run any more: `24h`, or another number of "
        "minutes, hours or days up to `30d`."
    )
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = Field(
        default=None, description="Given back with the batch."
    )
    output_expires_after: ExpiresAfter | None = Field(
        default=None, description="When output and error file are erased; by default as the configuration says."
    )

    @property
    def window_s(self) -> int:
        """The completion window in seconds. Raises RequestError."""
        return window_s(self.completion_window)


def parse_batch(body: bytes) -> BatchRequest:
    """A body of `POST /v1/batches`. Raises RequestError naming the field at fault."""
    try:
        request = BatchRequest.model_validate_json(body)
    except ValidationError as error:
        raise request_error(error, BatchRequest) from None
    window_s(request.completion_window)
    return request


def window_s(window: str) -> int:
    """Seconds of a time such as `24h`. Raises RequestError."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})([mhd])", window)
    seconds = int(match[1]) * UNIT_S[match[2]] if match else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise RequestError(
            f"'completion_window' must be a time such as '24h', at most '30d', got '{window[:20]}'.",
            param="completion_window",
        )
    return seconds


# Lines


@dataclass(frozen=True, slots=True)
class LineLimits:
    """Limits of an input file; None: no limit."""

    max_lines: int | None = None
    max_line_bytes: int | None = None


NO_LIMITS = LineLimits()


class Line(StrictModel):
    """A line of an input file."""

    custom_id: Annotated[str, StringConstraints(min_length=1, max_length=MAX_CUSTOM_ID)]
    method: Literal["POST"]
    url: LineEndpoint
    body: dict[str, object]

    @property
    def prompt(self) -> str:
        """The beginning of the request as text: equal beginnings are equal beginnings of prompts."""
        body = self.body
        own = _text(body.get("cache_salt"))
        first = [body.get(name) for name in ("tools", "messages", "prompt")]
        return own + "".join(_text(value) for value in first if value is not None)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def parse_line(content: bytes, number: int, endpoint: LineEndpoint | None) -> Line | Problem:
    """A line of an input file, the `number`-th from 1. A batch has one endpoint; None: each line has its own."""
    try:
        line = Line.model_validate_json(content)
    except ValidationError as error:
        finding = request_error(error, Line)
        is_json = error.errors(include_url=False)[0]["type"] != "json_invalid"
        code = "invalid_request" if is_json else "invalid_json_line"
        message = finding.message.replace("The request body", "This line", 1).replace(" at line 1 column", " at column")
        return Problem(code, message, number, finding.param)
    if endpoint is not None and line.url != endpoint:
        message = f"'url' must be the batch's endpoint, {endpoint}, got {line.url}"
        return Problem("mismatched_url", message, number, "url")
    return line


def body_place(content: bytes) -> tuple[int, int]:
    """Place and length of the text of `body` in a valid line; of the last one where there are several."""
    text = content.decode()
    at = _behind_space(text, 0) + 1  # the object's opening bracket
    found = 0, 0
    while text[at := _behind_space(text, at)] != "}":
        at = _behind_space(text, at + 1) if text[at] == "," else at
        key, at = _PLACES.raw_decode(text, at)
        start = _behind_space(text, _behind_space(text, at) + 1)  # behind the colon
        _, at = _PLACES.raw_decode(text, start)
        if key == "body":
            found = start, at
    start, end = found
    place = start if text.isascii() else len(text[:start].encode())
    return place, len(text[start:end].encode())


# Finds the ends of values. Numbers are not read: Python refuses those of thousands of digits.
_PLACES = json.JSONDecoder(parse_int=len, parse_float=len, strict=False)
_SPACE = re.compile(r"[ \t\r\n]*")


def _behind_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The response to a line. `may_retry`: the server had no room or no worker, and may have one later."""

    status: int
    request_id: str
    body: bytes
    may_retry: bool = False


def failed_answer(error: RaydixError, request_id: str, wire: WireFormat = OPENAI) -> LineAnswer:
    """The response of a failed line, in the words of its route's API."""
    may_retry = isinstance(error, ServiceError) and error.status != MODEL_FAILED
    return LineAnswer(wire.status(error), request_id, wire.error_body(error), may_retry)


def output_line(line_id: str, custom_id: str, answer: LineAnswer) -> bytes:
    """The line of an output or error file."""
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": orjson.Fragment(answer.body)}
    return orjson.dumps({"id": line_id, "custom_id": custom_id, "response": response, "error": None})


def unanswered_line(line_id: str, custom_id: str, outcome: Status) -> bytes:
    """The line of an error file for a request not run before the batch ended."""
    reason = {
        Status.EXPIRED: ("batch_expired", "The request did not run before the completion window was over."),
        Status.CANCELLED: ("batch_cancelled", "The request did not run before the batch was cancelled."),
    }
    code, message = reason.get(outcome, ("batch_failed", "The request did not run before the batch failed."))
    error = {"code": code, "message": message}
    return orjson.dumps({"id": line_id, "custom_id": custom_id, "response": None, "error": error})


# Objects


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a tenant. Times are seconds since 1970."""

    id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: float
    expires_at: float | None

    def object(self) -> Json:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": int(self.created_at),
            "expires_at": _seconds(self.expires_at),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch at the request."""

    id: str
    tenant: str
    model: str
    endpoint: LineEndpoint
    input_file_id: str
    completion_window: str
    created_at: float
    expires_at: float
    output_file_id: str
    error_file_id: str
    output_life_s: float | None
    """Life of output and error file, in seconds."""
    metadata: Mapping[str, str] | None = None


def batch_object(record: BatchRecord, progress: Progress, cancelled_at: float | None = None) -> Json:
    """OpenAI's batch object. `cancelled_at`: when the client cancelled."""
    status = progress.status
    if cancelled_at is not None and status in (Status.VALIDATING, Status.IN_PROGRESS):
        status = Status.CANCELLING
    outcome, ended_at, stopped_at = progress.outcome, _seconds(progress.ended_at), _seconds(progress.stopped_at)
    has_ended = progress.ended_at is not None
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "model": record.model,
        "errors": _errors(progress.problems),
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": status,
        "output_file_id": record.output_file_id if has_ended and progress.num_completed else None,
        "error_file_id": record.error_file_id if has_ended and progress.has_errors else None,
        "created_at": int(record.created_at),
        "in_progress_at": _seconds(progress.opened_at),
        "expires_at": int(record.expires_at),
        "finalizing_at": stopped_at if outcome is Status.COMPLETED else None,
        "completed_at": ended_at if outcome is Status.COMPLETED else None,
        "failed_at": ended_at if outcome is Status.FAILED else None,
        "expired_at": ended_at if outcome is Status.EXPIRED else None,
        "cancelling_at": _seconds(cancelled_at) if outcome in (None, Status.CANCELLED) else None,
        "cancelled_at": ended_at if outcome is Status.CANCELLED else None,
        "request_counts": {
            "total": progress.num_lines,
            "completed": progress.num_completed,
            "failed": progress.num_failed,
        },
        "metadata": None if record.metadata is None else dict(record.metadata),
    }


def page_body(objects: Sequence[Json], *, has_more: bool) -> bytes:
    """OpenAI's list of objects."""
    return orjson.dumps(
        {
            "object": "list",
            "data": list(objects),
            "first_id": objects[0]["id"] if objects else None,
            "last_id": objects[-1]["id"] if objects else None,
            "has_more": has_more,
        }
    )


def deleted_body(file_id: str) -> bytes:
    """The answer to the erasure of a file."""
    return orjson.dumps({"id": file_id, "object": "file", "deleted": True})


def _errors(problems: Sequence[Problem]) -> Json | None:
    if not problems:
        return None
    data = [{"code": p.code, "line": p.line, "message": p.message, "param": p.param} for p in problems]
    return {"object": "list", "data": data}


def _seconds(at: float | None) -> int | None:
    return None if at is None else int(at)
