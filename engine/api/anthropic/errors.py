"""Errors in Anthropic's form, with Anthropic's statuses, and the headers of limits."""

from collections.abc import Mapping
from datetime import UTC, datetime

import orjson

from raydix.engine.api.answers import named_event
from raydix.engine.api.anthropic.response_models import MessageError
from raydix.engine.api.wire import WireFormat, reset_s
from raydix.engine.core.errors import ContextLengthError, RaydixError
from raydix.engine.core.ingress.room import Allowance

_STATUSES = {503: 529}  # a server that cannot serve now is overloaded in Anthropic's words, and clients try again
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
SERVER_ERROR = 500
# Details by which Anthropic's clients send the whole conversation instead of naming one that the server keeps.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def error_body(error: RaydixError) -> bytes:
    """Anthropic's error object."""
    other = "api_error" if error.status >= SERVER_ERROR else "invalid_request_error"
    kind = _KINDS.get(error.status, other)
    details = {"details": _NO_THREADS} if error.param == "thread" else {}
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": _message(error), **details}})


def _message(error: RaydixError) -> str:
    """The error's message; of a prompt that is too long in Anthropic's words, by which agents know that they have to
    shorten it, and by how much."""
    if isinstance(error, ContextLengthError) and error.num_tokens is not None:
        return f"prompt is too long: {error.num_tokens} tokens > {error.limit} maximum"
    return error.message


def error_event(error: RaydixError) -> bytes:
    """The last event of a stream that cannot go on. Anthropic's client raises it as an APIStatusError."""
    return named_event("error", error_body(error))


def allowance_headers(allowance: Allowance, now: float) -> Mapping[str, str]:
    """Anthropic's headers of a limit of requests."""
    reset_at = datetime.fromtimestamp(now + reset_s(allowance), UTC)
    return {
        "anthropic-ratelimit-requests-limit": str(allowance.limit),
        "anthropic-ratelimit-requests-remaining": str(allowance.remaining),
        "anthropic-ratelimit-requests-reset": reset_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


PING = named_event("ping", b'{"type":"ping"}')
ANTHROPIC = WireFormat(
    error_body=error_body,
    error_event=error_event,
    waiting=PING,
    error=MessageError,
    allowance=allowance_headers,
    statuses=_STATUSES,
)
