"""Routes of answers, of what is kept of them, of the model and of the cache."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import MappingProxyType

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from raydix.actors.ingress.http import (
    EventStreamResponse,
    SlicedResponse,
    ignored_header,
    json_response,
    label_header,
    objective_headers,
    request_id_header,
    while_connected,
)
from raydix.actors.ingress.routes.replica import refusing, replica
from raydix.actors.watchdog import work_for
from raydix.engine.api.anthropic.answers import count_body
from raydix.engine.api.openai_responses.answers import count_body as responses_count_body
from raydix.engine.api.openai_responses.stored import (
    PageQuery,
    StoredQuery,
    StoredResponse,
    deleted_body,
    not_cancelled,
)
from raydix.engine.api.reconnecting import HEADER
from raydix.engine.api.responses import model_body, models_body, version_body
from raydix.engine.api.routes import Route
from raydix.engine.core.errors import RequestError
from raydix.engine.serving.job import Job
from raydix.engine.serving.rendering import Body

router = APIRouter()

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
SEQUENCE_NUMBER = re.compile("[0-9]{1,19}")
"""Bounds the digits of an event's number: Python refuses to read a number of thousands of digits."""


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Complete a prompt: a text, token ids, or a list of either; whole or as server-sent events."""
    return await _respond(request, "completion")


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answer a chat; whole or as server-sent events."""
    return await _respond(request, "chat")


@router.post("/v1/chat/completions/batch")
async def conversations(request: Request) -> Response:
    """Answer several chats that share all fields but their messages, with one choice for each, in their order; as
    at vLLM. The decisions behind the choice 0 are explained as those of `<id>-0`."""
    here = replica(request)
    jobs = await here.frontend.prepare_conversations(
        await here.body_of(request),
        request.state.tenant,
        session=label_header(request, "x-session-id"),
        objectives=objective_headers(request),
        name=request.headers.get("x-request-id"),
    )
    request.state.jobs = jobs
    return await _whole(request, jobs, lambda: here.frontend.conversations_body(jobs))


@router.post("/invocations")
async def invocations(request: Request) -> Response:
    """Answer a chat, a completion or a request for embeddings, by the fields of the body; as SageMaker asks."""
    return await _respond(request, "invocation")


@router.post("/v1/messages")
async def messages(request: Request) -> Response:
    """Answer a chat in Anthropic's form; whole or as server-sent events."""
    return await _respond(request, "messages")


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that `/v1/messages` would make of a chat."""
    here = replica(request)
    body = await here.body_of(request)
    work = here.frontend.num_tokens("count_tokens", body, request.state.tenant)
    num_tokens, edits = await while_connected(request, work)
    return json_response(count_body(num_tokens, edits), headers=request_id_header(request))


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Answer in the form of OpenAI's Responses API, and store the response; whole or as server-sent events."""
    return await _respond(request, "responses")


@router.post("/v1/responses/input_tokens")
async def input_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that `/v1/responses` would make of an input."""
    here = replica(request)
    body = await here.body_of(request)
    work = here.frontend.num_tokens("input_tokens", body, request.state.tenant)
    num_tokens, _ = await while_connected(request, work)
    return json_response(responses_count_body(num_tokens))


@router.post("/v1/responses/compact")
async def compact(request: Request) -> Response:
    """Summarise a conversation: the user's messages and an item `compaction`, with which later requests go on."""
    here = replica(request)
    body = await here.body_of(request)
    work = here.frontend.compacted(
        body,
        request.state.tenant,
        session=label_header(request, "x-session-id"),
        name=request.headers.get("x-request-id"),
    )
    job = await while_connected(request, work)
    return json_response(here.frontend.compact_body(job), headers=ignored_header(job.spec.ignored))


@router.get("/v1/responses/{response_id}")
async def response(request: Request, response_id: str) -> Response:
    """A stored response. `?cache_salt=<salt>` is that of its request."""
    query = StoredQuery.of(request.query_params)
    return json_response((await _stored(request, response_id, query)).response)


@router.get("/v1/responses/{response_id}/input_items")
async def input_items(request: Request, response_id: str) -> Response:
    """The input of a stored response, a page of items; `?limit=20&order=desc&after=<id>`."""
    query = PageQuery.of(request.query_params)
    return json_response(orjson.dumps(query.of_items((await _stored(request, response_id, query)).items)))


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a stored response. No later one can go on from it."""
    query = StoredQuery.of(request.query_params)
    await replica(request).frontend.responses.delete(response_id, request.state.tenant, query.cache_salt)
    return json_response(deleted_body(response_id))


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """Refused: only a response in the background can be cancelled, and there are none here. To end a response,
    close its connection."""
    query = StoredQuery.of(request.query_params)
    await _stored(request, response_id, query)
    raise not_cancelled()


@router.post("/v1/embeddings")
async def embeddings(request: Request) -> Response:
    """One vector for each input, pooled from the hidden states of the served model."""
    return await _respond(request, "embeddings")


@router.post("/generative_scoring")
async def generative_scoring(request: Request) -> Response:
    """For each item the probability of the first label as the next token behind query and item; as at vLLM."""
    return await _respond(request, "generative_scoring")


@router.post("/v1/score")
async def score(request: Request) -> Response:
    """For each item the probabilities of all labels as the next token behind query and item; as at SGLang."""
    return await _respond(request, "score")


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The model that is served, with its context length."""
    return json_response(models_body([replica(request).frontend.model_object()]))


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """The same by name; 404 for another one."""
    return json_response(model_body(replica(request).frontend.model_object(name)))


@router.get("/v1/requests")
async def requests(request: Request) -> Response:
    """Requests of this replica, under way and lately ended; with tenants one's own, and all for administrators."""
    return json_response(orjson.dumps(replica(request).frontend.requests.report(request.state.tenant)))


@router.get("/v1/requests/events")
async def requests_events(request: Request) -> Response:
    """The same as a stream: an event for what has changed, at most two in a second."""
    return EventStreamResponse(replica(request).frontend.requests.events(request.state.tenant), refusing(request))


@router.get("/v1/requests/{request_id}/explain")
async def explain(request: Request, request_id: str) -> Response:
    """Where each block of a request's prompt came from, and why its workers were chosen."""
    return json_response(orjson.dumps(await replica(request).frontend.cache.explain(request_id, request.state.tenant)))


@router.get("/v1/cache")
async def cache(request: Request) -> Response:
    """Sizes, hit rates, evictions, and each worker's costs; with tenants one's own share of them."""
    return json_response(orjson.dumps(await replica(request).frontend.cache.report(request.state.tenant)))


@router.post("/v1/cache/reset")
async def reset_cache(request: Request) -> Response:
    """Forget all KV that no request uses; for administrators where there are tenants."""
    return json_response(orjson.dumps(await replica(request).frontend.cache.reset(request.state.tenant)))


@router.get("/v1/cache/events")
async def cache_events(request: Request) -> Response:
    """Stream which blocks come and go; `?since=<number>` goes on where one left off. For administrators."""
    here = replica(request)
    since = request.query_params.get("since", request.headers.get("last-event-id"))
    if since is not None and not SEQUENCE_NUMBER.fullmatch(since):
        raise RequestError(f"'since' must be a sequence number, not '{since[:100]}'.", param="since")
    number = None if since is None else int(since)
    return EventStreamResponse(here.frontend.cache.events(number, request.state.tenant), refusing(request))


@router.get("/version")
async def show_version(request: Request) -> Response:
    """The version of raydix."""
    return json_response(version_body(request.app.version))


async def _stored(request: Request, response_id: str, query: StoredQuery) -> StoredResponse:
    return await replica(request).frontend.responses.find(response_id, request.state.tenant, query.cache_salt)


async def _respond(request: Request, route: Route) -> Response:
    here = replica(request)
    job = await _prepare(request, route)
    request.state.request_id = job.request_id
    own = request_id_header(request) if route == "messages" else {}
    request.state.jobs = [job]
    work_for(job.request_id)
    renderer = here.frontend.renderer(job)
    if job.spec.stream:  # nothing is awaited between this return and the call of the response, which closes the job
        events = here.frontend.events(job, renderer)
        headers = ignored_header(job.spec.ignored) | own
        return EventStreamResponse(events, refusing(request), job.close, wire=renderer.wire, headers=headers)

    return await _whole(request, [job], renderer.body, own)


async def _whole(
    request: Request, jobs: Sequence[Job], body: Callable[[], Awaitable[Body]], headers: Mapping[str, str] = NO_HEADERS
) -> Response:
    """Run jobs and return the response with their answers, and with these headers. Memory that the answers need is held
    until they are sent."""
    frontend = replica(request).frontend
    async with AsyncExitStack() as stack:

        async def collect() -> None:
            await stack.enter_async_context(frontend.answer_room(*jobs))
            await frontend.collect_all(jobs)

        with frontend.all_accounted(jobs):
            await while_connected(request, collect())
        made = await body()
        headers = ignored_header(jobs[0].spec.ignored) | dict(headers)
        if isinstance(made, bytes):
            return json_response(made, headers=headers)
        return SlicedResponse(made, stack.pop_all(), headers)


async def _prepare(request: Request, route: Route) -> Job:
    """Read an HTTP body and return the job of the request in it."""
    here = replica(request)
    return await here.frontend.prepare(
        route,
        await here.body_of(request),
        request.state.tenant,
        session=label_header(request, "x-session-id"),
        objectives=objective_headers(request),
        name=request.headers.get("x-request-id"),
        last_event_id=request.headers.get(HEADER) or None,
    )
