"""Anthropic's routes for batches of messages."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from raydix.actors.ingress.http import json_response, request_id_header
from raydix.actors.ingress.routes.batches import batches_of, number_of, on_disk
from raydix.actors.ingress.routes.replica import Endpoint, replica
from raydix.engine.api import routes
from raydix.engine.api.anthropic.batches import (
    deleted_body,
    lines_of,
    message_batch,
    not_found,
    page,
    results,
    stored_id,
)
from raydix.engine.api.batches import MESSAGES
from raydix.engine.api.responses import Json
from raydix.engine.api.route import Route
from raydix.engine.batches.batch_store import PURPOSE, StoredBatch
from raydix.engine.batches.beside import BESIDE_BYTES, run_beside
from raydix.engine.batches.file_store import FileStore
from raydix.engine.core.errors import NotFoundError, RequestError

MAX_LISTED, NUM_LISTED = 1000, 20  # most batches of a page, and those of one without a `limit`
SENT_BYTES = 256 << 10  # bytes of results that are read at a time


async def create(request: Request) -> Response:
    batches, tenant = batches_of(request), request.state.tenant.name
    with batches.uploading(tenant):
        body = await replica(request).body_of(request)
        if len(body) > BESIDE_BYTES:
            lines, count = await run_beside(lines_of, body, batches.lines)
        else:
            lines, count = await asyncio.to_thread(lines_of, body, batches.lines)
        upload = await on_disk(batches.files.begin, tenant)
        try:
            await on_disk(upload.write, lines)
            file = await on_disk(batches.files.finish, tenant, upload, "messages.jsonl", PURPOSE, None)
        finally:
            await on_disk(upload.discard)
        batch = await on_disk(batches.store.create_of_messages, tenant, batches.model_name, file.id, count)
    batches.look_now()
    return _response(request, batch)


async def listed(request: Request) -> Response:
    query = request.query_params
    limit = number_of(query["limit"], "limit", 1, MAX_LISTED) if "limit" in query else NUM_LISTED
    found = await on_disk(batches_of(request).store.all, request.state.tenant.name)
    own = [batch for batch in found if batch.record.endpoint == MESSAGES]
    # Newest first, as the API lists; the id decides between batches of one second.
    own.sort(key=lambda batch: (batch.record.created_at, batch.record.id), reverse=True)
    objects = [_object(request, batch) for batch in own]
    ids = [str(each["id"]) for each in objects]

    def place(name: str) -> int:
        if query[name] not in ids:
            raise RequestError(f"There is no '{query[name][:64]}' in the list.", param=name)
        return ids.index(query[name])

    if "before_id" in query:
        # The page before an id ends there; the one behind an id begins there.
        end = place("before_id")
        begin, has_more = max(0, end - limit), end > limit
    else:
        begin = place("after_id") + 1 if "after_id" in query else 0
        end, has_more = begin + limit, begin + limit < len(objects)
    return _json(request, orjson.dumps(page(objects[begin:end], has_more=has_more)))


async def retrieve(request: Request, message_batch_id: str) -> Response:
    return _response(request, await _found(request, message_batch_id))


async def cancel(request: Request, message_batch_id: str) -> Response:
    batch = await _found(request, message_batch_id)
    if batch.progress.ended_at is None:
        batch = await on_disk(batches_of(request).store.cancel, request.state.tenant.name, batch.record.id)
    return _response(request, batch)


async def delete(request: Request, message_batch_id: str) -> Response:
    batch = await _found(request, message_batch_id)
    await on_disk(batches_of(request).store.erase, batch)
    return _json(request, deleted_body(message_batch_id))


async def batch_results(request: Request, message_batch_id: str) -> Response:
    batch = await _found(request, message_batch_id)
    if batch.progress.ended_at is None:
        raise RequestError("The batch has not ended, and has no results yet.", param="message_batch_id")
    paths = await on_disk(_output, batches_of(request).files, batch)
    media_type = str(routes.MESSAGE_BATCH_RESULTS.response)
    return StreamingResponse(_parts(results(_lines(paths))), media_type=media_type, headers=request_id_header(request))


def _output(files: FileStore, batch: StoredBatch) -> list[Path]:
    """Output and error file of an ended batch, as far as there are any. Raises NotFoundError where a file has been
    erased, as old ones are."""
    record, progress = batch.record, batch.progress
    file_ids = [record.output_file_id] * bool(progress.num_completed) + [record.error_file_id] * progress.has_errors
    try:
        return [files.content(record.tenant, file_id) for file_id in file_ids]
    except NotFoundError:
        raise NotFoundError("The results of the batch have been erased.") from None


def _lines(paths: list[Path]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as file:
            yield from file


async def _parts(lines: Iterator[bytes]) -> AsyncGenerator[bytes]:
    """The lines in parts, each read and written anew in a thread."""

    def part() -> bytes:
        taken, num_bytes = list[bytes](), 0
        for line in lines:
            taken.append(line)
            num_bytes += len(line)
            if num_bytes >= SENT_BYTES:
                break
        return b"".join(taken)

    # One part at a time in a thread: files may be larger than memory, and reading waits for the disk.
    while data := await asyncio.to_thread(part):
        yield data


async def _found(request: Request, message_batch_id: str) -> StoredBatch:
    """A batch of messages. Raises NotFoundError, also for a batch of another kind."""
    batch_id = stored_id(message_batch_id)
    try:
        found = await on_disk(batches_of(request).store.get, request.state.tenant.name, batch_id)
    except NotFoundError:
        raise not_found(message_batch_id) from None
    if found.record.endpoint != MESSAGES:
        raise not_found(message_batch_id)
    return found


def _object(request: Request, batch: StoredBatch) -> Json:
    return message_batch(batch.record, batch.progress, batch.cancelled_at, str(request.base_url).rstrip("/"))


def _response(request: Request, batch: StoredBatch) -> Response:
    return _json(request, orjson.dumps(_object(request, batch)))


def _json(request: Request, body: bytes) -> Response:
    return json_response(body, headers=request_id_header(request))


ENDPOINTS: Mapping[Route, Endpoint] = {
    routes.CREATE_MESSAGE_BATCH: create,
    routes.LIST_MESSAGE_BATCHES: listed,
    routes.MESSAGE_BATCH: retrieve,
    routes.CANCEL_MESSAGE_BATCH: cancel,
    routes.MESSAGE_BATCH_RESULTS: batch_results,
    routes.DELETE_MESSAGE_BATCH: delete,
}
