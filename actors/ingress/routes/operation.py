"""Routes for load balancers and operators."""

import os
import platform
from collections.abc import Mapping
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, get_args, get_origin

import orjson
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from raydix.actors.ingress.exposition import CONTENT_TYPE
from raydix.actors.ingress.http import json_response, while_connected
from raydix.actors.ingress.routes.replica import Endpoint, replica
from raydix.configs.schema import Config
from raydix.engine.api import parameters, routes
from raydix.engine.api.adapters import parse_load, parse_unload
from raydix.engine.api.parameters import flag, one_of, unsupported
from raydix.engine.api.responses import Json
from raydix.engine.api.route import Route


async def health(request: Request) -> Response:
    await replica(request).frontend.check_ready()
    return json_response(b'{"status":"ok"}')


async def load(request: Request) -> Response:
    return json_response(orjson.dumps({"server_load": replica(request).frontend.load(request.state.tenant)}))


async def metrics(request: Request) -> Response:
    text = await while_connected(request, replica(request).frontend.metrics.text())
    return Response(text, media_type=CONTENT_TYPE)


async def trace(request: Request) -> Response:
    seconds = parameters.seconds(request.query_params, "seconds", default=routes.TRACE_S, most=routes.MAX_TRACE_S)
    return json_response(await while_connected(request, replica(request).frontend.trace.record(seconds)))


async def show_server_info(request: Request) -> Response:
    ingress = replica(request)
    one_of(request.query_params, "config_format", "json")
    model = ingress.frontend.model_object()
    return json_response(orjson.dumps(server_info(ingress.config, model)))


async def load_adapter(request: Request) -> Response:
    here = replica(request)
    asked = parse_load(await here.body_of(request))
    return PlainTextResponse(await here.frontend.adapters.load(asked))


async def unload_adapter(request: Request) -> Response:
    here = replica(request)
    asked = parse_unload(await here.body_of(request))
    return PlainTextResponse(await here.frontend.adapters.unload(asked.lora_name))


async def reset_prefix_cache(request: Request) -> Response:
    if flag(request.query_params, "reset_running_requests"):
        raise unsupported("reset_running_requests")
    flag(request.query_params, "reset_external")
    report = await replica(request).frontend.cache.reset()
    return json_response(orjson.dumps(report))


ENDPOINTS: Mapping[Route, Endpoint] = {
    routes.HEALTH: health,
    routes.PING: health,
    routes.PING_BY_POST: health,
    routes.LOAD: load,
    routes.METRICS: metrics,
    routes.TRACE: trace,
    routes.SERVER_INFO: show_server_info,
    routes.RESET_PREFIX_CACHE: reset_prefix_cache,
    routes.LOAD_ADAPTER: load_adapter,
    routes.UNLOAD_ADAPTER: unload_adapter,
}


PACKAGES = ("raydix", "ray", "torch", "transformers", "tokenizers", "pydantic")


def server_info(config: Config, model: Mapping[str, object]) -> Json:
    """The report. `model` is the model's object of `/v1/models`."""
    return {
        "object": "server.info",
        "model": dict(model),
        "raydix_config": settings(config),
        "system_env": {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            **{name: _version(name) for name in PACKAGES},
        },
    }


def settings(section: BaseModel) -> Json:
    """The numbers, switches and fixed words of a section and its own sections.

    Texts are left out, whatever they mean: names of files, keys' hashes, prompts, and those of fields yet to come. So
    are lists and mappings.
    """
    shown: Json = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            shown[name] = settings(value)
        elif isinstance(value, bool | int | float | Enum | None) or _is_word(field.annotation):
            shown[name] = value.value if isinstance(value, Enum) else value
    return shown


def _is_word(annotation: object) -> bool:
    """True for a field that takes fixed words only."""
    kinds = get_args(annotation) if get_origin(annotation) is not Literal else (annotation,)
    return any(get_origin(kind) is Literal for kind in kinds) and str not in kinds


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
