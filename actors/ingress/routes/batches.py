"""OpenAI's routes for files and batches."""

import asyncio
import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import orjson
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from raydix.actors.ingress.batches import Batches
from raydix.actors.ingress.http import ClientGoneError, json_response
from raydix.actors.ingress.routes.replica import Endpoint, replica
from raydix.actors.ingress.upload import Form
from raydix.engine.api import routes
from raydix.engine.api.batches import (
    MAX_LIFE_S,
    MESSAGES,
    MIN_LIFE_S,
    UploadFields,
    batch_object,
    deleted_body,
    page_body,
    parse_batch,
)
from raydix.engine.api.responses import Json
from raydix.engine.api.route import Route
from raydix.engine.api.validation import request_error
from raydix.engine.batches.batch_store import PURPOSE, StoredBatch
from raydix.engine.batches.file_store import Upload
from raydix.engine.core.errors import BodyTimeoutError, NotFoundError, RequestError, ServiceError
from raydix.engine.core.log_fields import about

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

MAX_FILES, MAX_BATCHES = 10_000, 100  # most objects of one list
NUM_BATCHES = 20  # batches of a list without a `limit`
PROGRESS_S = 60.0
# Bytes of a file that arrive in each `PROGRESS_S`, or all that is left; a slower one gets 408. There is no limit of the
# whole time: a large file over a slow line goes on, and one that only holds a place does not.
PROGRESS_BYTES = 512 << 10
WRITTEN_BYTES = 256 << 10  # bytes of a file gathered for one write


def batches_of(request: Request) -> Batches:
    """Files and batches of the process. Raises NotFoundError where turned off."""
    batches = replica(request).batches
    if batches is None:
        raise NotFoundError("Files and batches are turned off here: batches.gib in the configuration is 0.")
    return batches


async def on_disk(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `work`, done in a thread. Raises ServiceError where the disk fails."""
    try:
        return await asyncio.to_thread(work, *args, **kwargs)
    except OSError as error:
        logger.warning("files not read or written: %s", error, extra=about("files_failed", reason=type(error).__name__))
        # A full disk needs an operator; other failures may pass. The client learns which, and no path.
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "The disk for files is full." if is_full else "Files cannot be read or written now."
        raise ServiceError(reason, retry_after_s=30) from None


async def upload_file(request: Request) -> Response:
    batches, tenant = batches_of(request), request.state.tenant.name
    form = Form(request.headers.get("content-type"))
    with batches.uploading(tenant):
        # Begun only within the tenant's place, so that no more files arrive at a time than there is room for.
        upload = await on_disk(batches.files.begin, tenant)
        try:
            await _receive(request, form, upload, replica(request).config.ingress.body_timeout_s)
            life_s = _life_s(form.fields())
            name = form.filename or ""
            record = await on_disk(batches.files.finish, tenant, upload, name, PURPOSE, life_s)
        finally:
            await on_disk(upload.discard)
    return json_response(orjson.dumps(record.object()))


async def list_files(request: Request) -> Response:
    listing = Listing.of(request, most=MAX_FILES, usual=MAX_FILES)
    purpose = request.query_params.get("purpose")
    files = await on_disk(batches_of(request).files.all, request.state.tenant.name)
    chosen = [file for file in files if purpose in (None, file.purpose)]
    return json_response(listing.page([(file.created_at, file.object()) for file in chosen]))


async def file(request: Request, file_id: str) -> Response:
    record = await on_disk(batches_of(request).files.get, request.state.tenant.name, file_id)
    return json_response(orjson.dumps(record.object()))


async def file_content(request: Request, file_id: str) -> Response:
    path = await on_disk(batches_of(request).files.content, request.state.tenant.name, file_id)
    return FileResponse(path, media_type=str(routes.FILE_CONTENT.response))


async def delete_file(request: Request, file_id: str) -> Response:
    await on_disk(batches_of(request).files.erase, request.state.tenant.name, file_id)
    return json_response(deleted_body(file_id))


async def create_batch(request: Request) -> Response:
    batches = batches_of(request)
    asked = parse_batch(await replica(request).body_of(request))
    batch = await on_disk(batches.store.create, request.state.tenant.name, batches.model_name, asked)
    batches.look_now()
    return _batch_response(batch)


async def list_batches(request: Request) -> Response:
    listing = Listing.of(request, most=MAX_BATCHES, usual=NUM_BATCHES)
    found = [each for each in await on_disk(batches_of(request).store.all, request.state.tenant.name) if _is_own(each)]
    return json_response(listing.page([(batch.record.created_at, _object(batch)) for batch in found]))


async def batch(request: Request, batch_id: str) -> Response:
    return _batch_response(await _found(request, batch_id))


async def cancel_batch(request: Request, batch_id: str) -> Response:
    await _found(request, batch_id)
    return _batch_response(await on_disk(batches_of(request).store.cancel, request.state.tenant.name, batch_id))


async def _found(request: Request, batch_id: str) -> StoredBatch:
    """A batch by its id. Raises NotFoundError, also for one of messages."""
    found = await on_disk(batches_of(request).store.get, request.state.tenant.name, batch_id)
    if not _is_own(found):
        raise NotFoundError(f"There is no batch '{batch_id[:64]}'.")
    return found


def _is_own(batch: StoredBatch) -> bool:
    """True unless it is a batch of messages, which has routes of its own."""
    return batch.record.endpoint != MESSAGES


def _batch_response(batch: StoredBatch) -> Response:
    return json_response(orjson.dumps(_object(batch)))


def _object(batch: StoredBatch) -> Json:
    return batch_object(batch.record, batch.progress, batch.cancelled_at)


# Uploads


async def _receive(request: Request, form: Form, upload: Upload, idle_s: float) -> None:
    """Write the file of a form on arrival.

    Raises:
        RequestError: the form is not valid.
        BodyTooLargeError: the file has more bytes than there is room for.
        BodyTimeoutError: nothing came for `idle_s`, or too little in `PROGRESS_S`.
        ClientGoneError: the client left.
    """
    parts, content = aiter(request.stream()), bytearray()
    try:
        async with asyncio.timeout(PROGRESS_S) as deadline:
            num_bytes = 0
            """Bytes that arrived since the deadline was put off."""
            while True:
                # Two limits: nothing for a while, and too little in a minute. A client that sends a byte now and then
                # meets the second.
                async with asyncio.timeout(idle_s):
                    part = await anext(parts, None)
                num_bytes += len(part or b"")
                if num_bytes >= PROGRESS_BYTES:
                    deadline.reschedule(asyncio.get_running_loop().time() + PROGRESS_S)
                    num_bytes = 0
                content += form.feed(part or b"")
                # Few large writes: each is a turn of a thread.
                if len(content) >= WRITTEN_BYTES or part is None:
                    await on_disk(upload.write, bytes(content))
                    content.clear()
                if part is None:
                    return
    except ClientDisconnect:
        raise ClientGoneError from None
    except TimeoutError:
        raise BodyTimeoutError(f"The file did not arrive in time; {upload.num_bytes} bytes arrived.") from None


def _life_s(fields: Mapping[str, str]) -> int | None:
    """Life of an uploaded file in seconds; None: as the configuration says. Raises RequestError naming the field at
    fault."""
    try:
        asked = UploadFields.model_validate(fields)
    except ValidationError as error:
        raise request_error(error, UploadFields) from None
    if asked.seconds is None:
        return None
    return number_of(asked.seconds, "expires_after[seconds]", MIN_LIFE_S, MAX_LIFE_S)


# Lists


@dataclass(frozen=True, slots=True)
class Listing:
    """A part of a list, by a request's query."""

    limit: int
    after: str | None
    newest_first: bool

    @classmethod
    def of(cls, request: Request, *, most: int, usual: int) -> "Listing":
        """Read a request's query. Raises RequestError naming the parameter at fault."""
        query = request.query_params
        limit = number_of(query["limit"], "limit", 1, most) if "limit" in query else usual
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError(f"'order' must be 'asc' or 'desc', got '{order[:20]}'.", param="order")
        return cls(limit, query.get("after"), order == "desc")

    def page(self, objects: Sequence[tuple[float, Json]]) -> bytes:
        """The body of a list, of objects with times. Raises RequestError."""
        ordered = [each for _, each in sorted(objects, key=_place, reverse=self.newest_first)]
        begin = 0
        if self.after is not None:
            places = [place for place, each in enumerate(ordered) if each["id"] == self.after]
            if not places:
                raise RequestError(f"There is no '{self.after[:64]}' in the list.", param="after")
            begin = places[0] + 1
        end = begin + self.limit
        return page_body(ordered[begin:end], has_more=end < len(ordered))


def _place(dated: tuple[float, Json]) -> tuple[float, str]:
    return dated[0], str(dated[1]["id"])


def number_of(text: str, name: str, least: int, most: int) -> int:
    # The length first: `int` of a megabyte of digits takes seconds.
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and least <= int(text) <= most):
        raise RequestError(f"'{name}' must be an integer from {least} to {most}, got '{text[:20]}'.", param=name)
    return int(text)


ENDPOINTS: Mapping[Route, Endpoint] = {
    routes.UPLOAD_FILE: upload_file,
    routes.LIST_FILES: list_files,
    routes.FILE: file,
    routes.FILE_CONTENT: file_content,
    routes.DELETE_FILE: delete_file,
    routes.CREATE_BATCH: create_batch,
    routes.LIST_BATCHES: list_batches,
    routes.BATCH: batch,
    routes.CANCEL_BATCH: cancel_batch,
}
