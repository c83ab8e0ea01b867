"""Bytes of an API that belong to no answer: errors, and signs of life in a stream."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel

from raydix.engine.api.response_models import ErrorResponse
from raydix.engine.api.responses import error_body
from raydix.engine.api.stream import error_event
from raydix.engine.core.errors import RaydixError
from raydix.engine.core.ingress.room import RETRY_AFTER_S, Allowance


@dataclass(frozen=True, slots=True)
class WireFormat:
    """Form in which one API tells of errors and waiting."""

    error_body: Callable[[RaydixError], bytes]
    """Body of an error response."""
    error_event: Callable[[RaydixError], bytes]
    """The last event of a stream that cannot go on."""
    waiting: bytes
    """Sent in a stream when there is nothing else to send for a while; clients ignore it."""
    error: type[BaseModel]
    """Model of an error response."""
    allowance: Callable[[Allowance, float], Mapping[str, str]]
    """Headers with the limit of requests under way and what is left of it, at a time in seconds since 1970."""
    statuses: Mapping[int, int] = field(default_factory=dict)
    """HTTP status by the status of an error, where the two differ."""

    def status(self, error: RaydixError) -> int:
        """HTTP status of an error response."""
        return self.statuses.get(error.status, error.status)


# Sent in a stream in place of `waiting` while its session waits for its turn; a comment, which clients ignore.
PAUSED = b": x-raydix-paused\n\n"


def reset_s(allowance: Allowance) -> int:
    """Seconds until a client may count on more room; 0 where all of it is left. Requests end when they end: a later
    time would keep clients waiting for nothing."""
    return RETRY_AFTER_S if allowance.remaining < allowance.limit else 0


def allowance_headers(allowance: Allowance, now: float) -> Mapping[str, str]:
    """OpenAI's headers of a limit of requests."""
    return {
        "x-ratelimit-limit-requests": str(allowance.limit),
        "x-ratelimit-remaining-requests": str(allowance.remaining),
        "x-ratelimit-reset-requests": f"{reset_s(allowance)}s",
    }


OPENAI = WireFormat(
    error_body=error_body,
    error_event=error_event,
    waiting=b": waiting\n\n",
    error=ErrorResponse,
    allowance=allowance_headers,
)
