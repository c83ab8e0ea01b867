"""Routes of conversations that the server keeps, and that responses go on from."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import orjson
from starlette.requests import Request
from starlette.responses import Response

from raydix.actors.ingress.http import json_response
from raydix.actors.ingress.routes.replica import Endpoint, replica
from raydix.engine.api import routes
from raydix.engine.api.openai_responses.conversations import (
    Conversation,
    deleted_body,
    parse_added,
    parse_create,
    parse_update,
)
from raydix.engine.api.openai_responses.items import list_body
from raydix.engine.api.openai_responses.stored import PageQuery, StoredQuery
from raydix.engine.api.route import Route
from raydix.engine.serving.kept_conversations import Change


async def create_conversation(request: Request) -> Response:
    query, here = StoredQuery.of(request.query_params), replica(request)
    asked = await asyncio.to_thread(parse_create, await here.body_of(request))
    kept = await here.frontend.conversations.create(asked, request.state.tenant, query.cache_salt)
    return _object(*kept)


async def conversation(request: Request, conversation_id: str) -> Response:
    return _object(conversation_id, await _found(request, conversation_id, StoredQuery.of(request.query_params)))


async def update_conversation(request: Request, conversation_id: str) -> Response:
    metadata = await asyncio.to_thread(parse_update, await replica(request).body_of(request))
    changed = await _changed(request, conversation_id, lambda known: replace(known, metadata=metadata))
    return _object(conversation_id, changed)


async def delete_conversation(request: Request, conversation_id: str) -> Response:
    query = StoredQuery.of(request.query_params)
    await replica(request).frontend.conversations.delete(conversation_id, request.state.tenant, query.cache_salt)
    return json_response(deleted_body(conversation_id))


async def items(request: Request, conversation_id: str) -> Response:
    query = PageQuery.of(request.query_params)
    return json_response(query.page((await _found(request, conversation_id, query)).items))


async def add_items(request: Request, conversation_id: str) -> Response:
    added = await asyncio.to_thread(parse_added, await replica(request).body_of(request))
    await _changed(request, conversation_id, lambda known: known.with_items(added))
    return json_response(list_body(added))


async def item(request: Request, conversation_id: str, item_id: str) -> Response:
    known = await _found(request, conversation_id, StoredQuery.of(request.query_params))
    return json_response(known.item(item_id))


async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
    return _object(conversation_id, await _changed(request, conversation_id, lambda known: known.without(item_id)))


async def _found(request: Request, conversation_id: str, query: StoredQuery) -> Conversation:
    return await replica(request).frontend.conversations.find(conversation_id, request.state.tenant, query.cache_salt)


async def _changed(request: Request, conversation_id: str, change: Change) -> Conversation:
    query, conversations = StoredQuery.of(request.query_params), replica(request).frontend.conversations
    return await conversations.change(conversation_id, request.state.tenant, query.cache_salt, change)


def _object(conversation_id: str, known: Conversation) -> Response:
    return json_response(orjson.dumps(known.shown(conversation_id)))


ENDPOINTS: Mapping[Route, Endpoint] = {
    routes.CREATE_CONVERSATION: create_conversation,
    routes.CONVERSATION: conversation,
    routes.UPDATE_CONVERSATION: update_conversation,
    routes.DELETE_CONVERSATION: delete_conversation,
    routes.CONVERSATION_ITEMS: items,
    routes.ADD_CONVERSATION_ITEMS: add_items,
    routes.CONVERSATION_ITEM: item,
    routes.DELETE_CONVERSATION_ITEM: delete_item,
}
