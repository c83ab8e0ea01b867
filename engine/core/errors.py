"""The two kinds of error that reach a caller.

`RequestError`: the caller erred; sending the same request again fails again.
`ServiceError`: raydix erred or is busy; the same request may succeed later.

Both carry an HTTP status and a stable `code`; one handler in the ingress turns them into OpenAI's error object.
"""

import math
from typing import Self

from raydix.engine.core.objectives import Late


class RaydixError(Exception):
    """Base of every error that a caller may see."""

    status: int = 500
    code: str = "internal_error"
    kind: str = "server_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.message = _printable(message)
        self.param = None if param is None else _printable(param)
        super().__init__(self.message)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.param, self.__dict__))


def _printable(text: str) -> str:
    """The text with lone surrogates, which a client's JSON may have, as escapes: UTF-8 cannot encode them."""
    return text.encode(errors="backslashreplace").decode()


def _rebuild(kind: type[RaydixError], message: str, param: str | None, attributes: dict[str, object]) -> RaydixError:
    error = kind(message, param=param)
    error.__dict__.update(attributes)
    return error


class RequestError(RaydixError):
    """The caller erred (4xx)."""

    status = 400
    code = "invalid_request"
    kind = "invalid_request_error"


class AuthenticationError(RequestError):
    """The server has tenants, and the request has no API key of a tenant."""

    status = 401
    code = "invalid_api_key"


class ModelNotFoundError(RequestError):
    """The request names a model that is not served."""

    status = 404
    code = "model_not_found"


class PermissionDeniedError(RequestError):
    """The caller is known and may not do this."""

    status = 403
    code = "permission_denied"
    kind = "permission_error"


class NotFoundError(RequestError):
    """No such route or object."""

    status = 404
    code = "not_found"


class AnswerNotFoundError(RequestError):
    """A message names an answer whose token ids are no longer kept, or are kept for another tenant."""

    status = 404
    code = "answer_not_found"


class ResponseNotFoundError(RequestError):
    """The request names a stored response that is no longer kept, or is kept for another tenant."""

    status = 404
    code = "response_not_found"


class ResponseCancelledError(RequestError):
    """A response in the background was cancelled or deleted while its stream was read. No 409 or 5xx, upon which
    clients would send its request again by themselves."""

    code = "response_cancelled"


class ConversationNotFoundError(RequestError):
    """The request names a conversation that is no longer kept, or is kept for another tenant."""

    status = 404
    code = "conversation_not_found"


class AnswerChangedError(RequestError):
    """A stream cannot go on behind the event of `Last-Event-ID`: the answer would have other bits here."""

    status = 409
    code = "answer_changed"


class BodyTooLargeError(RequestError):
    """The request body exceeds the configured limit."""

    status = 413
    code = "body_too_large"


class BodyTimeoutError(RequestError):
    """A request body of which the rest did not come in time."""

    status = 408
    code = "body_timeout"


class MediaTypeError(RequestError):
    """The request body is not declared to be JSON."""

    status = 415
    code = "unsupported_media_type"


class ContentEncodingError(RequestError):
    """The request body is declared to be compressed, and bodies are read as they are."""

    status = 415
    code = "unsupported_content_encoding"


class ContextLengthError(RequestError):
    """Prompt and requested tokens do not fit into the model's context."""

    code = "context_length_exceeded"
    num_tokens: int | None = None
    """Tokens of a prompt that alone is too long, counted or estimated; None where the answer makes it too long."""
    limit: int | None = None
    """The most tokens, where `num_tokens` is known."""

    @classmethod
    def of_prompt(cls, message: str, *, param: str | None, num_tokens: int, limit: int) -> Self:
        """The error of a prompt that alone is too long."""
        error = cls(message, param=param)
        error.num_tokens, error.limit = num_tokens, limit
        return error


class StopsWorkersError(RequestError):
    """Workers died or fell silent by what they computed for the request, so no further one gets it. No 5xx, upon which
    clients send a request again by themselves."""

    code = "request_stops_workers"


class ServiceError(RaydixError):
    """raydix could not serve a valid request (429, 5xx); retrying may succeed."""

    status = 503
    code = "service_unavailable"
    kind = "server_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int = 1) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class ModelFailedError(ServiceError):
    """A worker could not run the model for this request."""

    status = 500
    code = "model_failed"


class OverloadedError(ServiceError):
    """Too many requests are queued."""

    status = 429
    code = "overloaded"
    kind = "rate_limit_error"


class LateError(OverloadedError):
    """No worker is predicted to give the first token within the objective (`WhenLate.REFUSE`)."""

    code = "objective_unmet"

    def __init__(self, late: Late) -> None:
        predicted_s, objective_s = late.predicted_s, late.objective_s
        super().__init__(
            f"The first token would come after {1000 * predicted_s:,.0f} ms, later than the objective of "
            f"{1000 * objective_s:,g} ms.",
            retry_after_s=min(60, max(1, math.ceil(predicted_s - objective_s))),
        )
        self.late = late

    def __reduce__(self) -> tuple[object, ...]:
        return (LateError, (self.late,))


class NoWorkerError(ServiceError):
    """No worker that could run the request is alive."""

    code = "no_worker"


class StartupError(Exception):
    """The configuration or the model cannot be used; one line for the operator, exit code 2."""
