"""Bodies, responses and errors of all routes, for their description (`raydix.engine.api.openapi`)."""

from fastapi import FastAPI

from raydix.actors.ingress.exposition import CONTENT_TYPE
from raydix.actors.ingress.http import TPOT_HEADER, TTFT_HEADER
from raydix.actors.ingress.routes import OPEN_ROUTES
from raydix.engine.api.anthropic.errors import ANTHROPIC
from raydix.engine.api.anthropic.requests import CountRequest, MessagesRequest
from raydix.engine.api.anthropic.response_models import MessageError, MessageEvent, MessageResponse, TokenCount
from raydix.engine.api.batch_models import Batch, BatchList, FileDeleted, FileList, FileObject, UploadForm
from raydix.engine.api.batches import BatchRequest
from raydix.engine.api.conversations import ConversationsRequest
from raydix.engine.api.embeddings import EmbeddingsRequest
from raydix.engine.api.openai_responses.requests import CompactRequest, ResponsesRequest
from raydix.engine.api.openai_responses.response_models import (
    CompactedResponse,
    InputTokens,
    ResponseDeleted,
    ResponseEvent,
    ResponseItems,
    ResponseObject,
)
from raydix.engine.api.openapi import Operation, Parameter, document
from raydix.engine.api.report_models import (
    ApiDocument,
    CacheEvent,
    CacheReport,
    CacheReset,
    Explanation,
    Health,
    Load,
    RequestList,
    RequestsEvent,
    ServerInfo,
    Version,
)
from raydix.engine.api.requests import ChatCompletionRequest, CompletionRequest
from raydix.engine.api.response_models import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Detokenized,
    EmbeddingList,
    Invoked,
    InvokedEvent,
    LabelScores,
    Model,
    ModelList,
    ScoreList,
    Tokenized,
    TokenizerInfo,
)
from raydix.engine.api.responses import Json
from raydix.engine.api.routes import Invocation
from raydix.engine.api.scoring import GenerativeScoringRequest, ScoreRequest
from raydix.engine.api.tokenization import DetokenizeRequest, TokenizeRequest
from raydix.engine.core.errors import (
    AnswerChangedError,
    AnswerNotFoundError,
    BodyTimeoutError,
    BodyTooLargeError,
    ContextLengthError,
    LateError,
    MediaTypeError,
    ModelFailedError,
    ModelNotFoundError,
    NotFoundError,
    NoWorkerError,
    OverloadedError,
    RequestError,
    ResponseNotFoundError,
    ServiceError,
)

BODY = (
    RequestError,
    ContextLengthError,
    ModelNotFoundError,
    BodyTimeoutError,
    BodyTooLargeError,
    MediaTypeError,
    OverloadedError,
    ServiceError,
)
GENERATION = (*BODY, LateError, ModelFailedError, NoWorkerError)
STREAMED = (*GENERATION, AnswerChangedError)
MANAGER = (ServiceError, NoWorkerError)

FLAG = ("true", "false", "1", "0")
NAMES = (
    Parameter("x-request-id", "header", "Name of the request, in `id` and logs; behind the body's `request_id`."),
    Parameter(
        "x-session-id",
        "header",
        "Requests of one session prefer one worker; up to 512 characters; behind the body's `session_id`.",
    ),
    Parameter(
        TTFT_HEADER, "header", "Objective for the time to the first token, in ms; behind the body's `slo_ttft_ms`."
    ),
    Parameter(
        TPOT_HEADER, "header", "Objective for the time of each further token, in ms; behind the body's `slo_tpot_ms`."
    ),
)
STREAMS = (
    *NAMES,
    Parameter(
        "Last-Event-ID",
        "header",
        "Of a stream: 0 gives each event an `id`; the last event's id goes on behind it, with the same body.",
    ),
)
SINCE = Parameter("since", "query", "Number from which to go on; without it a snapshot comes first.")
CONFIG_FORMAT = Parameter("config_format", "query", "Form of the configuration.", ("json",))
RUNNING = Parameter("reset_running_requests", "query", "Not supported: only false is taken.", ("false", "0"))
EXTERNAL = Parameter("reset_external", "query", "Taken: the object store is reset in either case.", FLAG)

LIST = (
    Parameter("limit", "query", "Most objects of the list."),
    Parameter("after", "query", "Id of the object behind which the list begins: `last_id` of the part before."),
    Parameter("order", "query", "By time, the newest first by default.", ("desc", "asc")),
)
PURPOSE = Parameter("purpose", "query", "Only files with this purpose.")
STORED = (NotFoundError, ServiceError)
UPLOAD = (RequestError, BodyTimeoutError, BodyTooLargeError, MediaTypeError, OverloadedError)

SALT = Parameter("cache_salt", "query", "That of the response's request.")
LIMIT = Parameter("limit", "query", "Most items of the page, 1 to 100; 20.")
ORDER = Parameter("order", "query", "Order of the items; desc.", ("asc", "desc"))
AFTER = Parameter("after", "query", "Id of the item before the page.")

_STORED_ERRORS = (RequestError, ResponseNotFoundError, *MANAGER)
_HEALTH = Operation(Health, errors=MANAGER)
_RESET_ERRORS = (RequestError, *MANAGER)

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("post", "/v1/chat/completions"): Operation(
        ChatCompletion,
        body=ChatCompletionRequest,
        events=ChatCompletionChunk,
        ends_with_done=True,
        parameters=STREAMS,
        errors=(*STREAMED, AnswerNotFoundError),
    ),
    ("post", "/v1/chat/completions/batch"): Operation(
        ChatCompletion, body=ConversationsRequest, parameters=NAMES, errors=(*GENERATION, AnswerNotFoundError)
    ),
    ("post", "/v1/completions"): Operation(
        Completion,
        body=CompletionRequest,
        events=CompletionChunk,
        ends_with_done=True,
        parameters=STREAMS,
        errors=STREAMED,
    ),
    ("post", "/v1/embeddings"): Operation(EmbeddingList, body=EmbeddingsRequest, parameters=NAMES, errors=GENERATION),
    ("post", "/generative_scoring"): Operation(
        ScoreList, body=GenerativeScoringRequest, parameters=NAMES, errors=GENERATION
    ),
    ("post", "/v1/score"): Operation(LabelScores, body=ScoreRequest, parameters=NAMES, errors=GENERATION),
    ("post", "/v1/responses"): Operation(
        ResponseObject,
        body=ResponsesRequest,
        events=ResponseEvent,
        parameters=STREAMS,
        errors=(*STREAMED, ResponseNotFoundError),
    ),
    ("post", "/v1/responses/input_tokens"): Operation(
        InputTokens, body=ResponsesRequest, errors=(*BODY, ResponseNotFoundError)
    ),
    ("post", "/v1/responses/compact"): Operation(
        CompactedResponse, body=CompactRequest, parameters=NAMES, errors=(*GENERATION, ResponseNotFoundError)
    ),
    ("get", "/v1/responses/{response_id}"): Operation(ResponseObject, parameters=(SALT,), errors=_STORED_ERRORS),
    ("delete", "/v1/responses/{response_id}"): Operation(ResponseDeleted, parameters=(SALT,), errors=_STORED_ERRORS),
    ("post", "/v1/responses/{response_id}/cancel"): Operation(None, parameters=(SALT,), errors=_STORED_ERRORS),
    ("get", "/v1/responses/{response_id}/input_items"): Operation(
        ResponseItems, parameters=(LIMIT, ORDER, AFTER, SALT), errors=_STORED_ERRORS
    ),
    ("post", "/v1/messages"): Operation(
        MessageResponse,
        body=MessagesRequest,
        events=MessageEvent,
        parameters=STREAMS,
        errors=STREAMED,
        error=MessageError,
        statuses=ANTHROPIC.statuses,
    ),
    ("post", "/v1/messages/count_tokens"): Operation(
        TokenCount, body=CountRequest, errors=BODY, error=MessageError, statuses=ANTHROPIC.statuses
    ),
    ("post", "/invocations"): Operation(
        Invoked,
        body=Invocation,
        events=InvokedEvent,
        ends_with_done=True,
        parameters=STREAMS,
        errors=(*STREAMED, AnswerNotFoundError),
    ),
    ("post", "/tokenize"): Operation(Tokenized, body=TokenizeRequest, errors=BODY),
    ("post", "/detokenize"): Operation(Detokenized, body=DetokenizeRequest, errors=BODY),
    ("get", "/tokenizer_info"): Operation(TokenizerInfo, errors=(NotFoundError,)),
    ("get", "/v1/models"): Operation(ModelList),
    ("get", "/v1/models/{name}"): Operation(Model, errors=(ModelNotFoundError,)),
    ("post", "/v1/files"): Operation(FileObject, form=UploadForm, errors=(*STORED, *UPLOAD)),
    ("get", "/v1/files"): Operation(FileList, parameters=(*LIST, PURPOSE), errors=(*STORED, RequestError)),
    ("get", "/v1/files/{file_id}"): Operation(FileObject, errors=STORED),
    ("get", "/v1/files/{file_id}/content"): Operation("application/octet-stream", errors=STORED),
    ("delete", "/v1/files/{file_id}"): Operation(FileDeleted, errors=STORED),
    ("post", "/v1/batches"): Operation(Batch, body=BatchRequest, errors=(*STORED, *BODY)),
    ("get", "/v1/batches"): Operation(BatchList, parameters=LIST, errors=(*STORED, RequestError)),
    ("get", "/v1/batches/{batch_id}"): Operation(Batch, errors=STORED),
    ("post", "/v1/batches/{batch_id}/cancel"): Operation(Batch, errors=(*STORED, RequestError)),
    ("get", "/v1/requests"): Operation(RequestList),
    ("get", "/v1/requests/events"): Operation(None, events=RequestsEvent, errors=(OverloadedError,)),
    ("get", "/v1/requests/{request_id}/explain"): Operation(Explanation, errors=(NotFoundError, *MANAGER)),
    ("get", "/v1/cache"): Operation(CacheReport, errors=MANAGER),
    ("post", "/v1/cache/reset"): Operation(CacheReset, errors=MANAGER),
    ("get", "/v1/cache/events"): Operation(
        None, events=CacheEvent, parameters=(SINCE,), errors=(RequestError, OverloadedError, *MANAGER)
    ),
    ("post", "/reset_prefix_cache"): Operation(CacheReset, parameters=(RUNNING, EXTERNAL), errors=_RESET_ERRORS),
    ("get", "/health"): _HEALTH,
    ("get", "/ping"): _HEALTH,
    ("post", "/ping"): _HEALTH,
    ("get", "/load"): Operation(Load),
    ("get", "/metrics"): Operation(CONTENT_TYPE),
    ("get", "/server_info"): Operation(ServerInfo, parameters=(CONFIG_FORMAT,), errors=(RequestError,)),
    ("get", "/version"): Operation(Version),
    ("get", "/openapi.json"): Operation(ApiDocument),
    ("get", "/docs"): Operation("text/html"),
    ("get", "/"): Operation("text/html", errors=(NotFoundError,)),
    ("get", "/page/{name}"): Operation("text/javascript", errors=(NotFoundError,)),
}
"""By method and path."""


def api_document(app: FastAPI) -> Json:
    """OpenAPI's document of an application with these routes."""
    return document(app.openapi()["paths"], OPERATIONS, version=app.version, open_routes=OPEN_ROUTES)
