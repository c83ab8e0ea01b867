"""The HTTP application of the replica that the fixture `served` runs now."""

from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

CURRENT: ContextVar[ASGIApp] = ContextVar("CURRENT")


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Serve one request by the replica's application."""
    await CURRENT.get()(scope, receive, send)
