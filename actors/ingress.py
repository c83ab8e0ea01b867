"""The deployment that faces the world: OpenAI's HTTP API and the Python handle.

`serve.ingress` copies the application and what its routes refer to at the moment of decoration, so everything they use
is defined above the class or imported.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
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

from actors.frontend import Frontend, Job
from actors.http import (
    ClientGoneError,
    EventStreamResponse,
    error_response,
    json_response,
    read_body,
    while_connected,
)
from configs.schema import Config
from engine.api.generate import GenerateChunk, GenerateRequest, GenerateResponse, as_generate_request
from engine.api.requests import parse_chat, parse_completion
from engine.api.responses import (
    model_body,
    models_body,
    response_body,
    version_body,
)
from engine.api.spec import GenerationSpec
from engine.core.errors import RaydixError, RequestError, ServiceError
from engine.core.tenants import Tenant
from engine.core.types import TokenLogprobs

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""The status that proxies log for a client that left; nobody reads it."""

MAX_SEQUENCE_DIGITS = 19
"""No event's number is longer, and Python refuses to read one of thousands of digits."""
OPEN_ROUTES = {"/health", "/version"}
"""What needs no API key."""


async def _authenticate(request: Request) -> None:
    """Leave whose request it is in `request.state.tenant`."""
    if request.scope["route"].path not in OPEN_ROUTES:
        ingress: Any = serve.get_replica_context().servable_object
        request.state.tenant = ingress.tenant_of(request.headers.get("authorization"))


app = FastAPI(title="raydix", version=version("raydix"), openapi_url=None, dependencies=[Depends(_authenticate)])


@app.exception_handler(RaydixError)
async def _raydix_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RaydixError)
    return error_response(error)


@app.exception_handler(HTTPException)
async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    wrapped = RequestError(f"{request.method} {request.url.path}: {error.detail}.")
    wrapped.status = error.status_code
    wrapped.code = HTTPStatus(error.status_code).name.lower()
    response = error_response(wrapped)
    response.headers.update(error.headers or {})
    return response


@app.exception_handler(ClientGoneError)
async def _client_gone(_: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


@app.exception_handler(Exception)
async def _unexpected_error(_: Request, error: Exception) -> Response:
    logger.exception("unexpected error", exc_info=error)
    wrapped = ServiceError("An internal error occurred; it has been logged.")
    wrapped.status = 500
    return error_response(wrapped)


def _prompt_logprobs(job: Job) -> tuple[TokenLogprobs | None, ...] | None:
    """What the Python handle returns of the prompt."""
    return None if job.spec.prompt_logprobs is None else tuple(job.answers[0].prompt_logprobs())


@serve.ingress(app)
class Ingress:
    """One replica of the front. The hosts are arguments so that Serve deploys them with it."""

    async def __init__(self, config: Mapping[str, Any], *hosts: object) -> None:  # type: ignore[misc]
        self._config = Config.model_validate(config)
        context = serve.get_replica_context()
        self._frontend = await asyncio.to_thread(Frontend, self._config, context.app_name, context.replica_id.unique_id)
        self._frontend.start()

    def tenant_of(self, authorization: str | None) -> Tenant:
        """Who sent a request with this header; raises AuthenticationError."""
        return self._frontend.tenants.authenticate(authorization)

    # HTTP

    @app.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        body = await read_body(request, self._config.ingress.max_body_bytes)
        return await self._respond(request, parse_completion(body))

    @app.post("/v1/chat/completions")
    async def chat_completions(self, request: Request) -> Response:
        body = await read_body(request, self._config.ingress.max_body_bytes)
        return await self._respond(request, parse_chat(body))

    @app.get("/v1/models")
    async def models(self) -> Response:
        return json_response(models_body([self._frontend.model_object()]))

    @app.get("/v1/models/{name:path}")
    async def model(self, name: str) -> Response:
        self._frontend.check_model(name)
        return json_response(model_body(self._frontend.model_object()))

    @app.get("/v1/requests/{request_id}/explain")
    async def explain(self, request: Request, request_id: str) -> Response:
        return json_response(orjson.dumps(await self._frontend.cache.explain(request_id, request.state.tenant)))

    @app.get("/v1/cache")
    async def cache(self, request: Request) -> Response:
        return json_response(orjson.dumps(await self._frontend.cache.report(request.state.tenant)))

    @app.post("/v1/cache/reset")
    async def reset_cache(self, request: Request) -> Response:
        return json_response(orjson.dumps(await self._frontend.cache.reset(request.state.tenant)))

    @app.get("/v1/cache/events")
    async def cache_events(self, request: Request) -> Response:
        since = request.query_params.get("since", request.headers.get("last-event-id"))
        if since is not None and not (since.isdecimal() and len(since) <= MAX_SEQUENCE_DIGITS):
            raise RequestError(f"'since' must be a sequence number, not '{since[:100]}'.", param="since")
        number = None if since is None else int(since)
        return EventStreamResponse(self._frontend.cache.events(number, request.state.tenant))

    @app.get("/health")
    async def health(self) -> Response:
        """200 only when a request could be served."""
        await self._frontend.check_ready()
        return json_response(b'{"status":"ok"}')

    @app.get("/version")
    async def show_version(self) -> Response:
        return json_response(version_body(app.version))

    # Python handle

    async def generate(self, request: GenerateRequest | Mapping[str, object]) -> GenerateResponse:
        """Answer one request as a whole.

        Raises:
            RequestError: the request is not valid; names the field.
            ServiceError: it could not be served now.
        """
        job = await self._job(as_generate_request(request))
        try:
            await self._frontend.collect(job)
        finally:
            self._frontend.log(job)
        answer = job.answers[0]
        assert answer.finish is not None
        return GenerateResponse(
            request_id=job.request_id,
            text="".join(answer.text),
            token_ids=tuple(answer.token_ids),
            logprobs=tuple(answer.logprobs) if job.spec.logprobs is not None else None,
            prompt_logprobs=_prompt_logprobs(job),
            prompt_token_ids=answer.generation.prompt if job.spec.return_token_ids else None,
            finish_reason=answer.finish,
            usage=job.usage(),
        )

    async def stream(self, request: GenerateRequest | Mapping[str, object]) -> AsyncIterator[GenerateChunk]:
        """Answer one request piece by piece; errors as `generate`."""
        job = await self._job(as_generate_request(request), stream=True)
        prompt_token_ids = job.answers[0].generation.prompt if job.spec.return_token_ids else None
        is_first = True
        try:
            async with aclosing(self._frontend.pieces(job.answers[0])) as pieces:
                async for piece in pieces:
                    yield GenerateChunk(
                        request_id=job.request_id,
                        text=piece.text,
                        token_ids=piece.token_ids,
                        logprobs=piece.logprobs if job.spec.logprobs is not None else None,
                        prompt_logprobs=_prompt_logprobs(job) if is_first else None,
                        prompt_token_ids=prompt_token_ids if is_first else None,
                        finish_reason=piece.finish,
                        usage=job.usage() if piece.finish is not None else None,
                    )
                    is_first = False
        finally:
            self._frontend.log(job)

    async def _job(self, request: GenerateRequest, *, stream: bool = False) -> Job:
        return await self._frontend.job(request.spec(stream=stream), self._frontend.tenants.named(request.tenant))

    async def _respond(self, request: Request, spec: GenerationSpec) -> Response:
        session = spec.session_id or request.headers.get("x-session-id")
        spec = replace(spec, session_id=session)
        job = await self._frontend.job(spec, request.state.tenant, request.headers.get("x-request-id"))
        if spec.stream:
            return EventStreamResponse(self._frontend.events(job))
        try:
            await while_connected(request, self._frontend.collect(job))
        finally:
            self._frontend.log(job)
        if spec.num_prompt_logprobs is None:
            choices = self._frontend.choices(job)
        else:  # rendering a long prompt's log-probabilities takes long enough to be felt by others' streams
            choices = await asyncio.to_thread(self._frontend.choices, job)
        return json_response(response_body(job.head, choices, job.usage()))
