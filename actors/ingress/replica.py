"""One replica of the front, apart from its server: Ray Serve's, or one in the process of everything else."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace

from starlette.requests import Request

from raydix.actors.ingress.batches import ROUTES, Batches
from raydix.actors.ingress.build import batch_settings, build_batches, build_frontend, replica_limits
from raydix.actors.ingress.frontend import Frontend
from raydix.actors.ingress.http import read_body
from raydix.actors.ingress.recorder import RequestRecorder, recorder_of
from raydix.actors.ingress.telemetry import Telemetry
from raydix.actors.logs import set_level
from raydix.actors.metrics import HoldMetrics
from raydix.actors.runtime import Runtime
from raydix.configs.schema import Config
from raydix.configs.settings import configured_tenants, names_of_keys
from raydix.engine.api.batches import LineAnswer
from raydix.engine.api.embeddings import EmbedRequest, EmbedResponse
from raydix.engine.api.generate import GenerateChunk, GenerateRequest, GenerateResponse
from raydix.engine.api.guards import require_host, require_json, require_trusted_origin, require_unencoded
from raydix.engine.core.errors import RaydixError, RequestError
from raydix.engine.core.ingress.room import BodyRoom
from raydix.engine.core.log_fields import about
from raydix.engine.core.tenants import Tenant
from raydix.engine.model.tokenizer import forgo_torch

logger = logging.getLogger(__name__)

SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}  # methods that change nothing


class IngressReplica:
    """The parts behind the routes of one replica. Before `build` there is no frontend, and nobody is let in."""

    config: Config
    frontend: Frontend
    batches: Batches | None
    recorder: RequestRecorder | None = None

    def __init__(self) -> None:
        self.is_built = False

    async def build(self, config: Config, runtime: Runtime, replica_id: str) -> None:
        """Build and start everything. Raises StartupError if the model or a public prefix cannot be used."""
        self.config = config
        self._bodies = BodyRoom(config.ingress.max_waiting_mib << 20)
        # The tokenizer's library would import torch, with which a process is four times as large.
        await asyncio.to_thread(forgo_torch)
        holds = HoldMetrics(replica_id)
        # Reading the tokenizer takes seconds, in which the event loop must answer health checks.
        self.frontend = await asyncio.to_thread(build_frontend, self.config, runtime, replica_id, holds)
        self.frontend.start()
        runtime.watch_process(holds)
        self.batches = build_batches(self.config, self.frontend)
        if self.batches is not None:
            self.batches.start()
        self.recorder = recorder_of(config)
        # Last of all: from here on requests are let in.
        self.is_built = True
        logger.info("ingress started", extra=about("started", replica=replica_id))

    def change(self, config: Config) -> None:
        """Take other limits, tenants and trusted sites. Nothing here waits or fails, so no request meets a half."""
        self.config = config
        set_level(config.logging.level)
        self._bodies.limit(config.ingress.max_waiting_mib << 20)
        self.frontend.change(replica_limits(config), configured_tenants(config), names_of_keys(config))
        if self.batches is not None:
            self.batches.change(batch_settings(config))
        logger.info("other limits for %d tenants", len(config.tenants), extra=about("reconfigured"))

    @property
    def telemetry(self) -> Telemetry | None:
        """Spans of requests, where they are sent anywhere."""
        return self.frontend.telemetry if self.is_built else None

    # HTTP

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

    # Python

    async def generate(self, request: GenerateRequest | Mapping[str, object]) -> GenerateResponse:
        """Answer one request as a whole.

        Raises:
            RequestError: the request is not valid; names the field.
            ServiceError: it could not be served now.
        """
        return await self.frontend.generate(request)

    async def stream(self, request: GenerateRequest | Mapping[str, object]) -> AsyncGenerator[GenerateChunk]:
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
        # A tenant's limit is for its clients' requests; lines have limits of their own.
        owner = replace(self.frontend.tenants.named(tenant), max_requests=None)
        return await self.frontend.answer_line(ROUTES[url], body, owner)
