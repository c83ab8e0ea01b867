"""Routes between text and tokens."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from raydix.actors.ingress.http import json_response, while_connected
from raydix.actors.ingress.routes.replica import replica
from raydix.engine.serving.reader_work import TokenRoute

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """The tokens of a text or of a chat's prompt, and their number."""
    return await _answer("tokenize", request)


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of tokens, with the names of special tokens."""
    return await _answer("detokenize", request)


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """The tokenizer: its class, size, special tokens and chat template. `http.tokenizer_info: false` turns it off."""
    return json_response(replica(request).frontend.tokenization.describe())


async def _answer(route: TokenRoute, request: Request) -> Response:
    ingress = replica(request)
    body = await ingress.body_of(request)
    work = ingress.frontend.tokenization.answer(route, body, request.state.tenant)
    return json_response(await while_connected(request, work))
