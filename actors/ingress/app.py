"""The deployment that faces clients: the HTTP APIs and the Python handle.

`serve.ingress` copies the application and everything its routes refer to at the moment of decoration, so all names used
by the routes are defined above the class or imported.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import replace
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

import orjson
from fastapi import Depends, FastAPI
from ray import serve
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from actors.ingress.accounting import OTHER_ROUTE, internal_error
from actors.ingress.batches import ROUTES, Batches
from actors.ingress.build import batch_settings, build_batches, build_frontend, replica_limits
from actors.ingress.cross_origin import CrossOrigin
from actors.ingress.frontend import Frontend
from actors.ingress.http import (
    ClientGoneError,
    EventStreamResponse,
    HeadAsGet,
    error_response,
    json_response,
    label_header,
    objective_headers,
    read_body,
    while_connected,
)
from actors.ingress.job import Job
from actors.ingress.routes import (
    OPEN_ROUTES,
    PROBED_ROUTES,
    UNSUPPORTED_ROUTES,
    batches,
    description,
    operation,
    tokens,
)
from actors.ingress.routes.replica import replica
from actors.logs import keep_refusals_out_of_serves_log, log_to_ray, set_level
from configs.schema import Config
from configs.sections import IngressArguments, ingress_arguments, read
from configs.settings import configured_tenants, names_of_keys
from engine.api.anthropic.answers import count_body
from engine.api.anthropic.errors import ANTHROPIC
from engine.api.batches import LineAnswer
from engine.api.embeddings import EmbedRequest, EmbedResponse
from engine.api.generate import GenerateChunk, GenerateRequest, GenerateResponse
from engine.api.guards import require_host, require_json, require_trusted_origin, require_unencoded
from engine.api.openai_responses.stored import PageQuery, StoredQuery, StoredResponse, deleted_body, not_cancelled
from engine.api.reconnecting import HEADER
from engine.api.responses import (
    model_body,
    models_body,
    version_body,
)
from engine.api.routes import Route
from engine.api.wire import OPENAI, WireFormat
from engine.core.errors import RaydixError, RequestError, ServiceError, StartupError
from engine.core.ingress.body_room import BodyRoom
from engine.core.log_fields import about
from engine.core.tenants import Tenant
from engine.model.tokenizer import forgo_torch

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""Status that proxies log for a client that left; no client reads it."""

SEQUENCE_NUMBER = re.compile("[0-9]{1,19}")
"""Bounds the digits of an event's number: Python refuses to read a number of thousands of digits."""
SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
"""Methods that change nothing."""


async def _guard(request: Request) -> None:
    """Refuse requests that a web page may have made a browser send, before any work for them."""
    replica().require_trusted(request)


async def _authenticate(request: Request) -> None:
    """Store the tenant of a request in `request.state.tenant`."""
    if request.scope["route"].path not in OPEN_ROUTES:
        key = request.headers.get("x-api-key")
        by_key = None if key is None else f"Bearer {key}"
        request.state.tenant = replica().tenant_of(request.headers.get("authorization", by_key))


def _wire(request: Request) -> WireFormat:
    """Form of errors at a route."""
    return ANTHROPIC if request.url.path.startswith("/v1/messages") else OPENAI


def _route(request: Request) -> str:
    """Path of the route of a request, with names in place of ids, so that there are few; `OTHER_ROUTE` without one."""
    return str(getattr(request.scope.get("route"), "path", OTHER_ROUTE))


def _refusing(request: Request) -> Callable[[RaydixError], None]:
    """Accounts for errors that a stream's client gets."""
    ingress, route = replica(), _route(request)
    return lambda error: ingress.refused(error, route)


def _allowed_origins() -> Collection[str]:
    """Origins of other sites' pages that may use this replica."""
    return replica().config.http.allowed_origins


app = FastAPI(
    title="raydix",
    version=version("raydix"),
    openapi_url=None,
    dependencies=[Depends(_guard), Depends(_authenticate)],
)
app.add_middleware(CrossOrigin, allowed=_allowed_origins)
app.add_middleware(HeadAsGet)
for each in (tokens, operation, batches, description):
    app.include_router(each.router)


@app.exception_handler(RaydixError)
async def _raydix_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RaydixError)
    is_answer = isinstance(error, ServiceError) and _route(request) in PROBED_ROUTES  # it is what a probe asks for
    if not is_answer:
        replica().refused(error, _route(request))
    return error_response(error, _wire(request))


@app.exception_handler(HTTPException)
async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = error.detail
    if request.url.path in UNSUPPORTED_ROUTES:
        detail = "This server has no model for ranking texts; use /v1/score or compare vectors of /v1/embeddings"
    wrapped = RequestError(f"{request.method} {request.url.path}: {detail}.")
    wrapped.status = error.status_code
    wrapped.code = HTTPStatus(error.status_code).name.lower()
    replica().refused(wrapped, _route(request))
    response = error_response(wrapped, _wire(request))
    response.headers.update(error.headers or {})
    return response


@app.exception_handler(ClientGoneError)
async def _client_gone(_: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


@app.exception_handler(Exception)
async def _unexpected_error(request: Request, error: Exception) -> Response:
    shown = internal_error(error, request_id=getattr(request.state, "request_id", None), route=_route(request))
    return error_response(shown, _wire(request))


@serve.ingress(app)
class Ingress:
    """One replica of the front. The hosts are arguments so that Serve deploys them with it.

    Serve calls `reconfigure` once before a replica counts as started, and then for each change of the deployment's
    `user_config`, which is the whole configuration. Before the first call a replica has no frontend, and lets nobody
    in.
    """

    config: Config
    frontend: Frontend
    batches: Batches | None

    def __init__(self, arguments: Mapping[str, Any], *hosts: object) -> None:
        self._arguments = read(IngressArguments, arguments)
        self._is_built = False

    async def reconfigure(self, content: Mapping[str, Any]) -> None:
        """Called by Serve: serve as this configuration says.

        Raises:
            StartupError: the configuration is not valid, or needs another replica; nothing has changed.
        """
        config = read(Config, content)
        if ingress_arguments(config) != self._arguments:
            raise StartupError("the user_config says otherwise than the replica's arguments: deploy both together")
        if self._is_built:
            self._change(config)
        else:
            await self._build(config)

    async def check_health(self) -> None:
        """Called by Serve; raises before the first configuration."""
        if not self._is_built:
            raise RuntimeError("the ingress has no user_config, and so neither limits nor tenants yet")

    async def _build(self, config: Config) -> None:
        self.config = config
        log_to_ray("ingress", config.logging)
        keep_refusals_out_of_serves_log()
        self._bodies = BodyRoom(config.ingress.max_waiting_mib << 20)
        context = serve.get_replica_context()
        await asyncio.to_thread(forgo_torch)
        self.frontend = await asyncio.to_thread(
            build_frontend, self.config, context.app_name, context.replica_id.unique_id
        )
        self.frontend.start()
        self.batches = build_batches(self.config, self.frontend)
        if self.batches is not None:
            self.batches.start()
        self._is_built = True
        logger.info("ingress started", extra=about("started", replica=context.replica_id.unique_id))

    def _change(self, config: Config) -> None:
        """Take other limits, tenants and trusted sites. Nothing here waits or fails, so no request meets a half."""
        self.config = config
        set_level(config.logging.level)
        self._bodies.limit(config.ingress.max_waiting_mib << 20)
        self.frontend.change(replica_limits(config), configured_tenants(config), names_of_keys(config))
        if self.batches is not None:
            self.batches.change(batch_settings(config))
        logger.info("other limits for %d tenants", len(config.tenants), extra=about("reconfigured"))

    def require_trusted(self, request: Request) -> None:
        """Raises PermissionDeniedError for another host's name, and for a change that the page of a site asks for that
        is neither this nor an allowed one."""
        host = request.headers.get("host")
        if self.config.http.allowed_hosts is not None:
            require_host(host, self.config.http.allowed_hosts)
        if request.method not in SAFE_METHODS:
            require_trusted_origin(request.headers.get("origin"), host, self.config.http.allowed_origins)

    def tenant_of(self, authorization: str | None) -> Tenant:
        """Return the tenant of a request with this header. Raises AuthenticationError."""
        return self.frontend.tenants.authenticate(authorization)

    def refused(self, error: RaydixError, route: str) -> None:
        """Account for an error that a client got at a route."""
        self.frontend.accounting.refused(error, route)

    async def body_of(self, request: Request) -> bytes:
        """Read an HTTP body. Raises MediaTypeError unless the body is declared to be JSON, ContentEncodingError for one
        that is declared to be compressed, and errors as `read_body`."""
        limits = self.config.ingress
        require_unencoded(request.headers.get("content-encoding"))
        if not limits.any_content_type:
            require_json(request.headers.get("content-type"))
        return await read_body(request, limits.max_body_bytes, self._bodies, limits.body_timeout_s)

    # HTTP

    @app.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        """Complete a prompt: a text, token ids, or a list of either; whole or as server-sent events."""
        return await self._respond(request, "completion")

    @app.post("/v1/chat/completions")
    async def chat_completions(self, request: Request) -> Response:
        """Answer a chat; whole or as server-sent events."""
        return await self._respond(request, "chat")

    @app.post("/v1/chat/completions/batch")
    async def conversations(self, request: Request) -> Response:
        """Answer several chats that share all fields but their messages, with one choice for each, in their order; as
        at vLLM. The decisions behind the choice 0 are explained as those of `<id>-0`."""
        jobs = await self.frontend.prepare_conversations(
            await self.body_of(request),
            request.state.tenant,
            session=label_header(request, "x-session-id"),
            objectives=objective_headers(request),
            name=request.headers.get("x-request-id"),
        )
        with self.frontend.all_accounted(jobs):
            await while_connected(request, self.frontend.collect_all(jobs))
        return json_response(self.frontend.conversations_body(jobs))

    @app.post("/invocations")
    async def invocations(self, request: Request) -> Response:
        """Answer a chat, a completion or a request for embeddings, by the fields of the body; as SageMaker asks."""
        return await self._respond(request, "invocation")

    @app.post("/v1/messages")
    async def messages(self, request: Request) -> Response:
        """Answer a chat in Anthropic's form; whole or as server-sent events."""
        return await self._respond(request, "messages")

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of the prompt that `/v1/messages` would make of a chat."""
        body = await self.body_of(request)
        work = self.frontend.num_tokens("count_tokens", body, request.state.tenant)
        return json_response(count_body(await while_connected(request, work)))

    @app.post("/v1/responses")
    async def create_response(self, request: Request) -> Response:
        """Answer in the form of OpenAI's Responses API, and store the response; whole or as server-sent events."""
        return await self._respond(request, "responses")

    @app.get("/v1/responses/{response_id}")
    async def response(self, request: Request, response_id: str) -> Response:
        """A stored response. `?cache_salt=<salt>` is that of its request."""
        query = StoredQuery.of(request.query_params)
        return json_response(orjson.dumps((await self._stored(request, response_id, query)).response))

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(self, request: Request, response_id: str) -> Response:
        """The input of a stored response, a page of items; `?limit=20&order=desc&after=<id>`."""
        query = PageQuery.of(request.query_params)
        return json_response(orjson.dumps(query.of_items((await self._stored(request, response_id, query)).items)))

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(self, request: Request, response_id: str) -> Response:
        """Forget a stored response. No later one can go on from it."""
        query = StoredQuery.of(request.query_params)
        await self.frontend.responses.delete(response_id, request.state.tenant, query.cache_salt)
        return json_response(deleted_body(response_id))

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(self, request: Request, response_id: str) -> Response:
        """Refused: only a response in the background can be cancelled, and there are none here. To end a response,
        close its connection."""
        query = StoredQuery.of(request.query_params)
        await self._stored(request, response_id, query)
        raise not_cancelled()

    @app.post("/v1/embeddings")
    async def embeddings(self, request: Request) -> Response:
        """One vector for each input, pooled from the hidden states of the served model."""
        return await self._respond(request, "embeddings")

    @app.post("/generative_scoring")
    async def generative_scoring(self, request: Request) -> Response:
        """For each item the probability of the first label as the next token behind query and item; as at vLLM."""
        return await self._respond(request, "generative_scoring")

    @app.post("/v1/score")
    async def score(self, request: Request) -> Response:
        """For each item the probabilities of all labels as the next token behind query and item; as at SGLang."""
        return await self._respond(request, "score")

    @app.get("/v1/models")
    async def models(self) -> Response:
        """The model that is served, with its context length."""
        return json_response(models_body([self.frontend.model_object()]))

    @app.get("/v1/models/{name:path}")
    async def model(self, name: str) -> Response:
        """The same by name; 404 for another one."""
        return json_response(model_body(self.frontend.model_object(name)))

    @app.get("/v1/requests/{request_id}/explain")
    async def explain(self, request: Request, request_id: str) -> Response:
        """Where each block of a request's prompt came from, and why its workers were chosen."""
        return json_response(orjson.dumps(await self.frontend.cache.explain(request_id, request.state.tenant)))

    @app.get("/v1/cache")
    async def cache(self, request: Request) -> Response:
        """Sizes, hit rates, evictions, and each worker's costs; with tenants one's own share of them."""
        return json_response(orjson.dumps(await self.frontend.cache.report(request.state.tenant)))

    @app.post("/v1/cache/reset")
    async def reset_cache(self, request: Request) -> Response:
        """Forget all KV that no request uses; for administrators where there are tenants."""
        return json_response(orjson.dumps(await self.frontend.cache.reset(request.state.tenant)))

    @app.get("/v1/cache/events")
    async def cache_events(self, request: Request) -> Response:
        """Stream which blocks come and go; `?since=<number>` goes on where one left off. For administrators."""
        since = request.query_params.get("since", request.headers.get("last-event-id"))
        if since is not None and not SEQUENCE_NUMBER.fullmatch(since):
            raise RequestError(f"'since' must be a sequence number, not '{since[:100]}'.", param="since")
        number = None if since is None else int(since)
        return EventStreamResponse(self.frontend.cache.events(number, request.state.tenant), _refusing(request))

    @app.get("/version")
    async def show_version(self) -> Response:
        """The version of raydix."""
        return json_response(version_body(app.version))

    # Python handle

    async def generate(self, request: GenerateRequest | Mapping[str, object]) -> GenerateResponse:
        """Answer one request as a whole.

        Raises:
            RequestError: the request is not valid; names the field.
            ServiceError: it could not be served now.
        """
        return await self.frontend.generate(request)

    async def stream(self, request: GenerateRequest | Mapping[str, object]) -> AsyncIterator[GenerateChunk]:
        """Answer one request piece by piece; errors as `generate`."""
        async with aclosing(self.frontend.stream(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def embed(self, request: EmbedRequest | Mapping[str, object]) -> EmbedResponse:
        """Embed the inputs of one request; errors as `generate`."""
        return await self.frontend.embed(request)

    async def answer_line(self, url: str, body: bytes, tenant: str | None = None) -> LineAnswer:
        """Answer a line of a batch, behind what clients ask; an error is an answer. Raises RequestError where there is
        no such route or tenant."""
        if url not in ROUTES:
            raise RequestError(f"There is no route '{url[:100]}' for batches.", param="url")
        owner = replace(self.frontend.tenants.named(tenant), max_requests=None)
        return await self.frontend.answer_line(ROUTES[url], body, owner)

    async def _stored(self, request: Request, response_id: str, query: StoredQuery) -> StoredResponse:
        return await self.frontend.responses.find(response_id, request.state.tenant, query.cache_salt)

    async def _respond(self, request: Request, route: Route) -> Response:
        job = await self._prepare(request, route)
        request.state.request_id = job.request_id
        renderer = self.frontend.renderer(job)
        if job.spec.stream:  # nothing is awaited between this return and the call of the response, which closes the job
            events = self.frontend.events(job, renderer)
            return EventStreamResponse(events, _refusing(request), job.close, wire=renderer.wire)

        with self.frontend.accounted(job):
            await while_connected(request, self.frontend.collect(job))
        return json_response(await renderer.body())

    async def _prepare(self, request: Request, route: Route) -> Job:
        """Read an HTTP body and return the job of the request in it."""
        return await self.frontend.prepare(
            route,
            await self.body_of(request),
            request.state.tenant,
            session=label_header(request, "x-session-id"),
            objectives=objective_headers(request),
            name=request.headers.get("x-request-id"),
            last_event_id=request.headers.get(HEADER) or None,
        )
