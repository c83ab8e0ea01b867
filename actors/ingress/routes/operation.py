"""Routes for load balancers and operators."""

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from raydix.actors.ingress.cache_control import require_admin
from raydix.actors.ingress.exposition import CONTENT_TYPE
from raydix.actors.ingress.http import json_response, while_connected
from raydix.actors.ingress.routes.replica import replica
from raydix.actors.ingress.server_info import server_info
from raydix.engine.api.parameters import flag, one_of, unsupported

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while a request could be served, with the manager or without; 503 otherwise."""
    await replica(request).frontend.check_ready()
    return json_response(b'{"status":"ok"}')


@router.get("/ping")
@router.post("/ping")
async def ping(request: Request) -> Response:
    """As `/health`, under SageMaker's name."""
    return await health(request)


@router.get("/load")
async def load(request: Request) -> Response:
    """Answers under way at this replica; with tenants one's own, and all answers for administrators."""
    return json_response(orjson.dumps({"server_load": replica(request).frontend.load(request.state.tenant)}))


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Metrics of this replica, the workers and the manager, in Prometheus' text format. For administrators."""
    require_admin(request.state.tenant)
    text = await while_connected(request, replica(request).frontend.metrics.text())
    return Response(text, media_type=CONTENT_TYPE)


@router.get("/server_info")
async def show_server_info(request: Request) -> Response:
    """Model, settings and versions, without names of files, keys or tenants. For administrators."""
    ingress = replica(request)
    require_admin(request.state.tenant)
    one_of(request.query_params, "config_format", "json")
    model = ingress.frontend.model_object()
    return json_response(orjson.dumps(server_info(ingress.config, model)))


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """As `/v1/cache/reset`, under vLLM's name: KV that requests use stays, and the object store is reset, too."""
    if flag(request.query_params, "reset_running_requests"):
        raise unsupported("reset_running_requests")
    flag(request.query_params, "reset_external")
    report = await replica(request).frontend.cache.reset(request.state.tenant)
    return json_response(orjson.dumps(report))
