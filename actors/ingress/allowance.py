"""Headers with the limit of a client's requests and what is left of it, at every route that counts requests.

They stand in answers, in streams and in errors alike, with the numbers of the moment in which the head is sent: those
of the ingress replica that answers.
"""

import time

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raydix.actors.ingress.routes.replica import Replica
from raydix.engine.api.route import Route


class AllowanceHeaders:
    """Adds the headers to one application's responses, in the words of the route's API."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            # The route and the tenant are known once the request has reached the one and shown the other's key.
            tenant = scope.get("state", {}).get("tenant")
            if message["type"] == "http.response.start" and tenant is not None:
                route: Route = scope["route"].declared
                if route.has_limit:
                    replica: Replica = scope["app"].state.replica
                    shown = route.wire.allowance(replica.frontend.allowance(tenant), time.time())
                    MutableHeaders(scope=message).update(shown)
            await send(message)

        await self._app(scope, receive, send_with_headers)
