"""The deployment that faces clients: the HTTP APIs and the Python handle."""

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from ray import serve

from actors.ingress.application import application
from actors.ingress.replica import IngressReplica
from actors.logs import keep_refusals_out_of_serves_log, log_to_ray
from actors.runtime import RayRuntime
from configs.schema import Config
from configs.sections import IngressArguments, ingress_arguments, read
from engine.api.batches import LineAnswer
from engine.api.embeddings import EmbedRequest, EmbedResponse
from engine.api.generate import GenerateChunk, GenerateRequest, GenerateResponse
from engine.core.errors import StartupError


@serve.ingress()
class Ingress:
    """One replica of the front at Ray Serve. The hosts are arguments so that Serve deploys them with it.

    Serve calls `reconfigure` once before a replica counts as started, and then for each change of the deployment's
    `user_config`, which is the whole configuration.
    """

    def __init__(self, arguments: Mapping[str, Any], *hosts: object) -> None:
        self._arguments = read(IngressArguments, arguments)
        self.replica = IngressReplica()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after the constructor."""
        return application(self.replica)

    async def reconfigure(self, content: Mapping[str, Any]) -> None:
        """Called by Serve: serve as this configuration says.

        Raises:
            StartupError: the configuration is not valid, or needs another replica; nothing has changed.
        """
        config = read(Config, content)
        if ingress_arguments(config) != self._arguments:
            raise StartupError("the user_config says otherwise than the replica's arguments: deploy both together")
        if self.replica.is_built:
            self.replica.change(config)
            return
        log_to_ray("ingress", config.logging)
        keep_refusals_out_of_serves_log()
        context = serve.get_replica_context()
        await self.replica.build(config, RayRuntime(context.app_name), context.replica_id.unique_id)

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
