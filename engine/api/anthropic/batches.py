"""Anthropic's message batches: requests of a batch as lines of a file, and the state and results of one.

A batch of messages is a batch as any other (`raydix.engine.batches`), whose lines have bodies of `/v1/messages`. Its
id is that of the batch with another prefix.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Literal

import orjson
from pydantic import Field, StringConstraints

from raydix.engine.api.anthropic.requests import MessagesRequest
from raydix.engine.api.batches import MESSAGES, BatchRecord, LineLimits, parse_line
from raydix.engine.api.responses import Json
from raydix.engine.api.validation import LenientModel, describe
from raydix.engine.core.batches.batch_run import Progress
from raydix.engine.core.batches.records import Problem, Status
from raydix.engine.core.errors import NotFoundError, RequestError

ID_PREFIX, STORED_PREFIX = "msgbatch_", "batch_"
MAX_CUSTOM_ID = 64  # characters of a request's `custom_id`, as at Anthropic


class BatchedMessage(LenientModel):
    """A request of a batch."""

    custom_id: Annotated[str, StringConstraints(min_length=1, max_length=MAX_CUSTOM_ID)] = Field(
        description="Names the request in the results; unique in the batch."
    )
    params: MessagesRequest = Field(description="Body of `/v1/messages`, which is checked when the request runs.")


class MessageBatchRequest(LenientModel):
    """Body of `POST /v1/messages/batches`."""

    requests: Annotated[list[BatchedMessage], Field(min_length=1)] = Field(description="The requests, in any order.")


def lines_of(body: bytes, limits: LineLimits) -> tuple[bytes, int]:
    """The lines of a batch's file, and their number, of a body of `POST /v1/messages/batches`.

    Only what belongs to the batch is checked: a request that is not valid fails alone. Every line is one that the
    batch's runner takes, which would refuse all of the file for one. The body is read as a whole, so that a large one
    is for a process beside (`raydix.engine.batches.beside`). Raises RequestError naming the field at fault.
    """
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"The request body is not valid JSON: {error}.") from None
    requests = asked.get("requests") if isinstance(asked, dict) else None
    if not isinstance(requests, list) or not requests:
        raise RequestError(f"'requests' must be a list of requests, got {describe(requests)}.", param="requests")
    if (max_lines := limits.max_lines) is not None and len(requests) > max_lines:
        raise RequestError(f"'requests' must have at most {max_lines} elements, got {len(requests)}.", param="requests")
    lines: list[bytes] = []
    places: dict[str, int] = {}
    for number, request in enumerate(requests):
        name = f"requests[{number}]"
        if not isinstance(request, dict):
            raise RequestError(f"'{name}' must be an object, got {describe(request)}.", param=name)
        custom_id = _custom_id(request.get("custom_id"), f"{name}.custom_id")
        if (other := places.setdefault(custom_id, number)) != number:
            param = f"{name}.custom_id"
            raise RequestError(f"'{param}' must be unique, and requests[{other}] has the same.", param=param)
        if not isinstance(params := request.get("params"), dict):
            raise RequestError(f"'{name}.params' must be an object, got {describe(params)}.", param=f"{name}.params")
        lines.append(_line(custom_id, params, f"{name}.params", limits.max_line_bytes))
    return b"\n".join(lines) + b"\n", len(lines)


def _line(custom_id: str, params: Json, param: str, max_bytes: int | None) -> bytes:
    too_deep = RequestError(f"'{param}' is nested too deeply.", param=param)
    try:
        line = orjson.dumps({"custom_id": custom_id, "method": "POST", "url": MESSAGES, "body": params})
    except orjson.JSONEncodeError:  # what was read from JSON has one fault only: orjson writes 254 levels
        raise too_deep from None
    # Numbers may be longer than the client wrote them: 1e9 becomes 1000000000.0.
    if max_bytes is not None and len(line) > max_bytes:
        raise RequestError(f"'{param}' has {len(line):,} bytes as a line, and at most {max_bytes:,} run.", param=param)
    if isinstance(parse_line(line, 1, MESSAGES), Problem):  # which reads fewer levels
        raise too_deep
    return line


def _custom_id(value: object, param: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_CUSTOM_ID:
        shown = f"{len(value)} characters" if isinstance(value, str) else describe(value)
        raise RequestError(f"'{param}' must be a text of 1 to {MAX_CUSTOM_ID} characters, got {shown}.", param=param)
    return value


def stored_id(message_batch_id: str) -> str:
    """The id of the batch that is one of messages. Raises NotFoundError for an id of another form."""
    if not message_batch_id.startswith(ID_PREFIX):
        raise not_found(message_batch_id)
    return STORED_PREFIX + message_batch_id.removeprefix(ID_PREFIX)


def not_found(message_batch_id: str) -> NotFoundError:
    return NotFoundError(f"There is no message batch '{message_batch_id[:64]}'.")


def message_batch(record: BatchRecord, progress: Progress, cancelled_at: float | None, address: str) -> Json:
    """Anthropic's object of a batch; `address` is the server's, as its client knows it."""
    has_ended = progress.ended_at is not None
    batch_id = ID_PREFIX + record.id.removeprefix(STORED_PREFIX)
    status: Literal["in_progress", "canceling", "ended"] = "in_progress" if cancelled_at is None else "canceling"
    return {
        "id": batch_id,
        "type": "message_batch",
        "processing_status": "ended" if has_ended else status,
        "request_counts": _counts(progress),
        "created_at": _time(record.created_at),
        "expires_at": _time(record.expires_at),
        "ended_at": _time(progress.ended_at),
        "cancel_initiated_at": _time(cancelled_at),
        "archived_at": None,
        "results_url": f"{address}{MESSAGES}/batches/{batch_id}/results" if has_ended else None,
    }


def _counts(progress: Progress) -> Json:
    """Requests by outcome. All are `processing` until the batch has ended, as at Anthropic."""
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if progress.ended_at is None:
        return {**counts, "processing": progress.num_lines}
    counts |= {"succeeded": progress.num_completed, "errored": progress.num_failed}
    counts[_OUTCOMES.get(progress.outcome or Status.FAILED, "errored")] += progress.num_unanswered
    return {**counts}


# Names of requests that have not run, by the end of their batch.
_OUTCOMES = {Status.CANCELLED: "canceled", Status.EXPIRED: "expired"}
_CODES = {"batch_cancelled": "canceled", "batch_expired": "expired"}  # the same, by the code in a line of an error file


def results(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Lines of the results, of those of output and error file."""
    for line in lines:
        answered = orjson.loads(line)
        yield orjson.dumps({"custom_id": answered["custom_id"], "result": _result(answered)}) + b"\n"


def _result(answered: Json) -> Json:
    response, error = answered["response"], answered["error"]
    if isinstance(response, dict):
        if response["status_code"] == 200:
            return {"type": "succeeded", "message": response["body"]}
        return {"type": "errored", "error": response["body"]}
    assert isinstance(error, dict)
    kind = _CODES.get(str(error["code"]))
    if kind is not None:
        return {"type": kind}
    shown = {"type": "api_error", "message": error["message"]}
    return {"type": "errored", "error": {"type": "error", "error": shown, "request_id": None}}


def page(objects: list[Json], *, has_more: bool) -> Json:
    """Anthropic's list of objects."""
    first, last = (objects[0]["id"], objects[-1]["id"]) if objects else (None, None)
    return {"data": objects, "has_more": has_more, "first_id": first, "last_id": last}


def deleted_body(message_batch_id: str) -> bytes:
    """Body of `DELETE /v1/messages/batches/{id}`."""
    return orjson.dumps({"id": message_batch_id, "type": "message_batch_deleted"})


def _time(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
