"""The deployment that faces clients: the HTTP APIs and the Python handle."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from ray import serve
from starlette.applications import Starlette

from raydix.actors.changes import log_refused, when_changed
from raydix.actors.ingress.application import application
from raydix.actors.ingress.replica import IngressReplica
from raydix.actors.ingress.rows import CHAT, COMPLETIONS, EMBEDDINGS, RowRequest, answer_row
from raydix.actors.logs import keep_refusals_out_of_serves_log, log_to_ray
from raydix.actors.runtime import RayRuntime
from raydix.configs.schema import Config
from raydix.configs.sections import INGRESS, IngressArguments, ingress_arguments, live_part, read
from raydix.configs.tenants import TenantsFile
from raydix.engine.api.batches import LineAnswer
from raydix.engine.api.embeddings import EmbedRequest, EmbedResponse
from raydix.engine.api.generate import GenerateChunk, GenerateRequest, GenerateResponse
from raydix.engine.api.responses import Json
from raydix.engine.core.errors import StartupError


@serve.ingress()
class Ingress:
    """One replica of the front at Ray Serve. The hosts are arguments so that Serve deploys them with it.

    Serve calls `reconfigure` once before a replica counts as started, and then for each change of the deployment's
    `user_config`: the whole configuration, or, with a base, some keys of it that are laid over the base.
    """

    def __init__(self, arguments: Mapping[str, Any], *hosts: object, base: Mapping[str, Any] | None = None) -> None:
        self._arguments = read(IngressArguments, arguments)
        self._base = base
        self._content: Mapping[str, Any] = {}  # the `user_config` applied last
        self._tenants_file = TenantsFile()
        self._changing = asyncio.Lock()
        self.replica = IngressReplica()

    def __serve_build_asgi_app__(self) -> Starlette:
        """Called by Serve after the constructor."""
        return application(self.replica)

    async def reconfigure(self, content: Mapping[str, Any]) -> None:
        """Called by Serve: serve as this configuration says. A replica that serves already refuses a wrong one in the
        log, and goes on as before.

        Raises:
            StartupError: the configuration is not valid, or needs another replica, and this one has not served yet.
        """
        async with self._changing:
            if self.replica.is_built:
                self._apply(content)
                return
            config = self._configured(content)
            log_to_ray("ingress", config.logging)
            keep_refusals_out_of_serves_log()
            context = serve.get_replica_context()
            await self.replica.build(config, RayRuntime(context.app_name), context.replica_id.unique_id)
            self._content = content
            self._tenants_watch = asyncio.create_task(when_changed(self._tenants_file, self._reread))

    async def _reread(self) -> None:
        """Apply the present configuration again, with another content of the tenants' file."""
        async with self._changing:
            self._apply(self._content)

    def _apply(self, content: Mapping[str, Any]) -> None:
        """Change the replica in place, or refuse a wrong `user_config` in the log."""
        try:
            config = self._configured(content)
        except StartupError as error:
            log_refused(INGRESS, error)
        else:
            self._content = content
            self.replica.change(config)

    def _configured(self, content: Mapping[str, Any]) -> Config:
        """The configuration of a `user_config`, with the tenants of their file. Raises StartupError."""
        config = read(Config, content if self._base is None else live_part(INGRESS, self._base, content))
        if ingress_arguments(config) != self._arguments:
            raise StartupError("the user_config says otherwise than the replica's arguments: deploy both together")
        return self._tenants_file.resolved(config)

    async def check_health(self) -> None:
        """Called by Serve; raises before the first configuration."""
        if not self.replica.is_built:
            raise RuntimeError("the ingress has no user_config, and so neither limits nor tenants yet")

    # The handle's methods: those of `IngressReplica`.

    async def generate(self, request: GenerateRequest | Mapping[str, object]) -> GenerateResponse:
        return await self.replica.generate(request)

    async def stream(self, request: GenerateRequest | Mapping[str, object]) -> AsyncIterator[GenerateChunk]:
        async with aclosing(self.replica.stream(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def embed(self, request: EmbedRequest | Mapping[str, object]) -> EmbedResponse:
        return await self.replica.embed(request)

    async def answer_line(self, url: str, body: bytes, tenant: str | None = None) -> LineAnswer:
        return await self.replica.answer_line(url, body, tenant)

    # Ray Data's processor for Serve deployments takes the one item that each of these yields.

    async def chat(self, request: RowRequest) -> AsyncIterator[Json]:
        yield await answer_row(self.replica.answer_line, CHAT, request)

    async def completions(self, request: RowRequest) -> AsyncIterator[Json]:
        yield await answer_row(self.replica.answer_line, COMPLETIONS, request)

    async def embeddings(self, request: RowRequest) -> AsyncIterator[Json]:
        yield await answer_row(self.replica.answer_line, EMBEDDINGS, request)
