"""Whole answers to rows of a dataset, in the form that Ray Data's processor for Serve deployments asks for.

The processor (`ray.data.llm.ServeDeploymentProcessorConfig`) calls a method of a deployment with a request, takes the
first item that the method yields, and puts its fields into the row. A request is a mapping or a pydantic model with the
fields of a body over HTTP; the processor adds the row's number and place to it. An error that is a ValueError is the
row's own, and `should_continue_on_error` goes on without the row; any other ends the whole dataset.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, TypeAlias

import orjson
from pydantic import BaseModel

from raydix.engine.api.batches import LineAnswer
from raydix.engine.api.responses import Json
from raydix.engine.core.errors import RequestError, ServiceError

RowRequest: TypeAlias = Mapping[str, Any] | BaseModel
AnswerLine: TypeAlias = Callable[[str, bytes, str | None], Awaitable[LineAnswer]]
"""Answers a body at a path, for a tenant, behind the requests of clients (`IngressReplica.answer_line`)."""

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
PLACE = "idx_in_batch"  # the processor's own field, which tells its requests from others
# Pauses of a row that waits for room: each is twice the one before.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0
PATIENCE_S = 600.0  # pauses in all after which a row that finds no room, or no worker, fails
SERVER_ERROR = 500


async def answer_row(
    answer: AnswerLine, path: str, request: RowRequest, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> Json:
    """The body of the response to a row's request. A row without room waits, as a dataset has more rows than a server
    takes at a time.

    Raises:
        ValueError: the request is not valid; names the field.
        ServiceError: the request could not be served, also not later.
    """
    # A row may be of any size, so it is read and written beside the replica's event loop.
    body, tenant = await asyncio.to_thread(_read, request)
    pause_s, waited_s = FIRST_PAUSE_S, 0.0
    while True:
        try:
            found = await answer(path, body, tenant)
        except RequestError as error:
            raise ValueError(error.message) from None
        if found.status == HTTPStatus.OK:
            whole: Json = await asyncio.to_thread(orjson.loads, found.body)
            return whole
        # Pauses count, not the time of answers: a slow server is no reason to give up.
        if not found.may_retry or waited_s >= PATIENCE_S:
            raise _error_in(found)
        await sleep(pause_s)
        waited_s += pause_s
        pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)


def _read(request: RowRequest) -> tuple[bytes, str | None]:
    """The body of a request and the tenant in it. Raises ValueError for a request of another kind."""
    if isinstance(request, BaseModel):
        fields = request.model_dump(mode="json", exclude_unset=True)
    elif isinstance(request, Mapping):
        fields = dict(request)
    else:
        raise ValueError(f"The request must be a mapping of a body's fields, not {type(request).__name__}.")
    # The processor counts its requests from 0 in each of its workers, so these numbers name none of them.
    if fields.pop(PLACE, None) is not None:
        fields.pop("request_id", None)
    tenant = fields.pop("tenant", None)
    try:
        return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY), tenant
    except TypeError as error:
        raise ValueError(f"The request has a value that JSON does not have: {error}.") from None


def _error_in(answer: LineAnswer) -> Exception:
    error = orjson.loads(answer.body)["error"]
    # A ValueError is the row's own fault, after which a dataset may go on without the row.
    if answer.status < SERVER_ERROR and not answer.may_retry:
        return ValueError(error["message"])
    failed = ServiceError(error["message"])
    failed.status, failed.code = answer.status, error["code"]
    return failed
