"""Routes for load balancers and operators."""

from collections.abc import Mapping

import orjson
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from raydix.actors.ingress.exposition import CONTENT_TYPE
from raydix.actors.ingress.http import json_response, while_connected
from raydix.actors.ingress.routes.replica import Endpoint, replica
from raydix.actors.ingress.server_info import server_info
from raydix.engine.api import routes
from raydix.engine.api.adapters import parse_load, parse_unload
from raydix.engine.api.parameters import flag, one_of, unsupported
from raydix.engine.api.route import Route


async def health(request: Request) -> Response:
    await replica(request).frontend.check_ready()
    return json_response(b'{"status":"ok"}')


async def load(request: Request) -> Response:
    return json_response(orjson.dumps({"server_load": replica(request).frontend.load(request.state.tenant)}))


async def metrics(request: Request) -> Response:
    text = await while_connected(request, replica(request).frontend.metrics.text())
    return Response(text, media_type=CONTENT_TYPE)


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
    routes.SERVER_INFO: show_server_info,
    routes.RESET_PREFIX_CACHE: reset_prefix_cache,
    routes.LOAD_ADAPTER: load_adapter,
    routes.UNLOAD_ADAPTER: unload_adapter,
}
