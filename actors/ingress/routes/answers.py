"""Routes of answers, of what is kept of them, of tokens, of the model and of the cache."""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from importlib.metadata import version
from types import MappingProxyType

import orjson
from starlette.requests import Request
from starlette.responses import Response

from raydix.actors.ingress.frontend import Frontend
from raydix.actors.ingress.http import (
    EventStreamResponse,
    SlicedResponse,
    hint_headers,
    json_response,
    label_header,
    objective_headers,
    request_id_header,
    while_connected,
)
from raydix.actors.ingress.routes.replica import Endpoint, refusing, replica, route_of
from raydix.actors.watchdog import work_for
from raydix.engine.api import routes
from raydix.engine.api.anthropic.answers import count_body
from raydix.engine.api.anthropic.errors import ANTHROPIC
from raydix.engine.api.openai_responses.answers import count_body as responses_count_body
from raydix.engine.api.openai_responses.stored import (
    PageQuery,
    StoredQuery,
    StoredResponse,
    StreamQuery,
    deleted_body,
)
from raydix.engine.api.reconnecting import HEADER
from raydix.engine.api.responses import model_body, models_body, version_body
from raydix.engine.api.route import Route
from raydix.engine.core.errors import RequestError
from raydix.engine.serving.job import Job
from raydix.engine.serving.preparation import RequestHeaders
from raydix.engine.serving.reader_work import TokenRoute
from raydix.engine.serving.rendering import Body

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
# Bounds the digits of an event's number: Python refuses to read a number of thousands of digits.
SEQUENCE_NUMBER = re.compile("[0-9]{1,19}")


async def conversations(request: Request) -> Response:
    here = replica(request)
    frontend, headers = here.frontend, _headers(request)
    jobs = await frontend.preparation.of_conversations(await here.body_of(request), request.state.tenant, headers)
    request.state.jobs = jobs

    async def body() -> Body:
        return frontend.rendering.conversations_body(jobs)

    return await _whole(request, jobs, body)


async def count_tokens(request: Request) -> Response:
    here = replica(request)
    body = await here.body_of(request)
    work = here.frontend.preparation.num_tokens(routes.COUNT_TOKENS.name, body, request.state.tenant)
    num_tokens, edits = await while_connected(request, work)
    return json_response(count_body(num_tokens, edits), headers=request_id_header(request))


async def input_tokens(request: Request) -> Response:
    here = replica(request)
    body = await here.body_of(request)
    work = here.frontend.preparation.num_tokens(routes.INPUT_TOKENS.name, body, request.state.tenant)
    num_tokens, _ = await while_connected(request, work)
    return json_response(responses_count_body(num_tokens))


async def compact(request: Request) -> Response:
    here = replica(request)
    body = await here.body_of(request)
    compaction = here.frontend.compaction
    job = await while_connected(request, compaction.of_body(body, request.state.tenant, _headers(request)))
    return json_response(compaction.body(job), headers=hint_headers(job.spec))


async def response(request: Request, response_id: str) -> Response:
    query = StreamQuery.of(request.query_params)
    stored = await _stored(request, response_id, query)
    if not query.stream:
        if query.starting_after is not None:
            raise RequestError("'starting_after' is only allowed when 'stream' is true.", param="starting_after")
        return json_response(stored.response)

    num_had = 0 if query.starting_after is None else query.starting_after + 1
    frontend = replica(request).frontend
    # A client that leaves ends the reading of the stream; the response goes on in the background.
    job = await while_connected(request, frontend.background.repeated(stored, request.state.tenant, num_had))
    renderer = frontend.renderer(job)
    return EventStreamResponse(frontend.events(job, renderer), refusing(request), job.close, wire=lambda: renderer.wire)


async def input_items(request: Request, response_id: str) -> Response:
    query = PageQuery.of(request.query_params)
    return json_response(query.page((await _stored(request, response_id, query)).input_items()))


async def delete_response(request: Request, response_id: str) -> Response:
    query = StoredQuery.of(request.query_params)
    await replica(request).frontend.responses.delete(response_id, request.state.tenant, query.cache_salt)
    return json_response(deleted_body(response_id))


async def cancel_response(request: Request, response_id: str) -> Response:
    query = StoredQuery.of(request.query_params)
    background = replica(request).frontend.background
    return json_response(await background.cancel(response_id, request.state.tenant, query.cache_salt))


async def models(request: Request) -> Response:
    return json_response(models_body(replica(request).frontend.model_objects(request.state.tenant)))


async def model(request: Request, name: str) -> Response:
    return json_response(model_body(replica(request).frontend.model_object(name, request.state.tenant)))


async def requests(request: Request) -> Response:
    return json_response(orjson.dumps(replica(request).frontend.requests.report(request.state.tenant)))


async def requests_events(request: Request) -> Response:
    return EventStreamResponse(replica(request).frontend.requests.events(request.state.tenant), refusing(request))


async def explain(request: Request, request_id: str) -> Response:
    return json_response(orjson.dumps(await replica(request).frontend.cache.explain(request_id, request.state.tenant)))


async def cache(request: Request) -> Response:
    here = replica(request)
    report = await here.frontend.cache.report(request.state.tenant)
    price = here.config.observability.price_per_million_tokens
    return json_response(orjson.dumps({**report, "price_per_million_tokens": price}))


async def doctor(request: Request) -> Response:
    return json_response(orjson.dumps(await replica(request).frontend.cache.doctor(request.state.tenant)))


async def reset_cache(request: Request) -> Response:
    return json_response(orjson.dumps(await replica(request).frontend.cache.reset()))


async def cache_events(request: Request) -> Response:
    here = replica(request)
    # Browsers name the last event in a header when they connect again.
    since = request.query_params.get("since", request.headers.get("last-event-id"))
    if since is not None and not SEQUENCE_NUMBER.fullmatch(since):
        raise RequestError(f"'since' must be a sequence number, not '{since[:100]}'.", param="since")
    number = None if since is None else int(since)
    return EventStreamResponse(here.frontend.cache.events(number), refusing(request))


async def show_version(request: Request) -> Response:
    return json_response(version_body(version("raydix")))


async def _stored(request: Request, response_id: str, query: StoredQuery) -> StoredResponse:
    return await replica(request).frontend.responses.find(response_id, request.state.tenant, query.cache_salt)


async def answer(request: Request) -> Response:
    """Have the model answer a body, as a whole or as server-sent events."""
    here, route, headers = replica(request), route_of(request), _headers(request)
    body = await here.body_of(request)
    job = await here.frontend.preparation.of_body(route.name, body, request.state.tenant, headers)
    request.state.request_id = job.request_id
    own = request_id_header(request) if route.wire is ANTHROPIC else {}
    request.state.jobs = [job]
    work_for(job.request_id)
    if job.spec.turn is not None and job.spec.turn.in_background:
        return await _in_background(request, job)
    if job.spec.form.stream:
        # Nothing is awaited between this return and the call of the response, which closes the job.
        stream = _Stream(request, here.frontend, headers, job)
        return EventStreamResponse(
            stream.events(),
            refusing(request),
            stream.close,
            wire=lambda: stream.renderer.wire,
            headers=hint_headers(job.spec) | own,
            is_paused=lambda: stream.job.is_paused,
        )
    if job.begins_anew:
        job = await _begun_anew(request, job, headers)
        request.state.jobs = [job]
    return await _whole(request, [job], here.frontend.renderer(job).body, own)


class _Stream:
    """A job's stream, behind a summary that of the job that goes on: while the summary is made, the client gets signs
    of life as in any other wait."""

    def __init__(self, request: Request, frontend: Frontend, headers: RequestHeaders, job: Job) -> None:
        self._request = request
        self._frontend = frontend
        self._headers = headers
        self.job = job
        self.renderer = frontend.renderer(job)

    async def events(self) -> AsyncGenerator[bytes]:
        """Run the job; yields the server-sent events. Errors as `Frontend.events`, and `Compaction.begin_anew`."""
        if self.job.begins_anew:
            self.job = await self._frontend.compaction.begin_anew(self.job, self._headers)
            self.renderer = self._frontend.renderer(self.job)
            self._request.state.jobs = [self.job]
        async with aclosing(self._frontend.events(self.job, self.renderer)) as events:
            async for data in events:
                yield data

    def close(self) -> None:
        """Release what a job holds that never ran."""
        self.job.close()


async def _in_background(request: Request, job: Job) -> Response:
    """Have the response of a job generated whether the client stays or leaves, and answer with the response as it is
    now, or with its stream."""
    # Also where the client leaves meanwhile: a response that is kept is generated.
    shown, listener = await replica(request).frontend.background.begin(job)
    headers = hint_headers(job.spec)
    if job.spec.form.stream:
        return EventStreamResponse(listener.events(), refusing(request), headers=headers)
    return json_response(shown, headers=headers)


async def _whole(
    request: Request, jobs: Sequence[Job], body: Callable[[], Awaitable[Body]], headers: Mapping[str, str] = NO_HEADERS
) -> Response:
    """Run jobs and return the response with their answers, and with these headers. Memory that the answers need is held
    until they are sent."""
    frontend = replica(request).frontend
    async with AsyncExitStack() as stack:

        async def collect() -> None:
            await stack.enter_async_context(frontend.answer_room(*jobs))
            await frontend.output.collect_all(jobs)

        with frontend.all_accounted(jobs):
            await while_connected(request, collect())
        made = await body()
        headers = hint_headers(jobs[0].spec) | dict(headers)
        if isinstance(made, bytes):
            return json_response(made, headers=headers)
        # The room for the answers goes with the response, which gives it back when the last slice is sent.
        return SlicedResponse(made, stack.pop_all(), headers)


def _headers(request: Request) -> RequestHeaders:
    """The headers that stand in for fields of the body. Raises RequestError naming the one at fault."""
    return RequestHeaders(
        session=label_header(request, "x-session-id"),
        objectives=objective_headers(request),
        name=request.headers.get("x-request-id"),
        last_event_id=request.headers.get(HEADER) or None,
        trace=getattr(request.state, "trace", None),
    )


async def _begun_anew(request: Request, job: Job, headers: RequestHeaders) -> Job:
    """The job behind a summary (`Compaction.begin_anew`), unless the client leaves first."""
    jobs = [job]

    async def begin() -> None:
        jobs.append(await replica(request).frontend.compaction.begin_anew(job, headers))

    try:
        await while_connected(request, begin())
    except BaseException:
        # The client may leave in the moment in which the new job comes back.
        for each in jobs:
            each.close()
        raise
    return jobs[-1]


async def tokenize(request: Request) -> Response:
    return await _tokenized("tokenize", request)


async def detokenize(request: Request) -> Response:
    return await _tokenized("detokenize", request)


async def tokenizer_info(request: Request) -> Response:
    return json_response(replica(request).frontend.tokenization.describe())


async def _tokenized(route: TokenRoute, request: Request) -> Response:
    ingress = replica(request)
    body = await ingress.body_of(request)
    work = ingress.frontend.tokenization.answer(route, body, request.state.tenant)
    return json_response(await while_connected(request, work))


ENDPOINTS: Mapping[Route, Endpoint] = {
    **{route: answer for route in routes.ROUTES if route.is_answer},
    routes.CONVERSATIONS: conversations,
    routes.COUNT_TOKENS: count_tokens,
    routes.INPUT_TOKENS: input_tokens,
    routes.COMPACT: compact,
    routes.TOKENIZE: tokenize,
    routes.DETOKENIZE: detokenize,
    routes.TOKENIZER_INFO: tokenizer_info,
    routes.RESPONSE: response,
    routes.INPUT_ITEMS: input_items,
    routes.DELETE_RESPONSE: delete_response,
    routes.CANCEL_RESPONSE: cancel_response,
    routes.MODELS: models,
    routes.MODEL: model,
    routes.REQUESTS: requests,
    routes.REQUESTS_EVENTS: requests_events,
    routes.EXPLAIN: explain,
    routes.CACHE: cache,
    routes.DOCTOR: doctor,
    routes.RESET_CACHE: reset_cache,
    routes.CACHE_EVENTS: cache_events,
    routes.VERSION: show_version,
}
