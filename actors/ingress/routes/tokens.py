"""Routes between text and tokens."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from raydix.actors.ingress.http import json_response, while_connected
from raydix.actors.ingress.routes.replica import Endpoint, replica
from raydix.engine.api import routes
from raydix.engine.api.route import Route
from raydix.engine.serving.reader_work import TokenRoute


async def tokenize(request: Request) -> Response:
    return await _answer("tokenize", request)


async def detokenize(request: Request) -> Response:
    return await _answer("detokenize", request)


async def tokenizer_info(request: Request) -> Response:
    return json_response(replica(request).frontend.tokenization.describe())


async def _answer(route: TokenRoute, request: Request) -> Response:
    ingress = replica(request)
    body = await ingress.body_of(request)
    work = ingress.frontend.tokenization.answer(route, body, request.state.tenant)
    return json_response(await while_connected(request, work))


ENDPOINTS: Mapping[Route, Endpoint] = {
    routes.TOKENIZE: tokenize,
    routes.DETOKENIZE: detokenize,
    routes.TOKENIZER_INFO: tokenizer_info,
}
