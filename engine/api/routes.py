"""Every route of the HTTP API, each declared once.

`ROUTES` is in the order of OpenAPI's document. A route's handler is in `raydix.actors.ingress.routes`; that of a route
whose body asks the model for an answer is the same for all of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, Field, RootModel

from raydix.engine.api.adapters import LoadAdapterRequest, UnloadAdapterRequest
from raydix.engine.api.anthropic.batches import MessageBatchRequest
from raydix.engine.api.anthropic.errors import ANTHROPIC
from raydix.engine.api.anthropic.requests import CountRequest, MessagesRequest, parse_count, parse_messages
from raydix.engine.api.anthropic.response_models import MessageEvent, MessageResponse, TokenCount
from raydix.engine.api.batch_models import (
    Batch,
    BatchList,
    FileDeleted,
    FileList,
    FileObject,
    MessageBatch,
    MessageBatchDeleted,
    MessageBatchList,
    UploadForm,
)
from raydix.engine.api.batches import BatchRequest
from raydix.engine.api.conversations import ConversationsRequest
from raydix.engine.api.embeddings import EmbeddingsRequest, parse_embeddings
from raydix.engine.api.load_report import FORMAT_HEADER, LOAD_FORMATS, LOAD_HEADER
from raydix.engine.api.openai_responses.conversations import AddItems, CreateConversation, UpdateConversation
from raydix.engine.api.openai_responses.requests import (
    CompactRequest,
    ResponsesRequest,
    parse_compact,
    parse_input_tokens,
    parse_responses,
)
from raydix.engine.api.openai_responses.response_models import (
    CompactedResponse,
    ConversationDeleted,
    ConversationItem,
    ConversationObject,
    InputTokens,
    ResponseDeleted,
    ResponseEvent,
    ResponseItems,
    ResponseObject,
)
from raydix.engine.api.parameters import TPOT_HEADER, TTFT_HEADER
from raydix.engine.api.reconnecting import HEADER
from raydix.engine.api.report_models import (
    ApiDocument,
    CacheDoctor,
    CacheEvent,
    CacheReport,
    CacheReset,
    ChromeTrace,
    Explanation,
    Health,
    Load,
    RequestList,
    RequestsEvent,
    ServerInfo,
    Version,
)
from raydix.engine.api.requests import ChatCompletionRequest, CompletionRequest, parse_chat, parse_completion
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
from raydix.engine.api.route import Access, Parameter, Parse, Route
from raydix.engine.api.scoring import (
    GenerativeScoringRequest,
    ScoreRequest,
    parse_generative_scoring,
    parse_score,
)
from raydix.engine.api.spec import GenerationSpec
from raydix.engine.api.tokenization import DetokenizeRequest, TokenizeRequest
from raydix.engine.api.validation import NO_RULES, BodyRules, LenientModel, parse_body
from raydix.engine.api.wire import OPENAI, WireFormat
from raydix.engine.core.errors import (
    AnswerChangedError,
    AnswerNotFoundError,
    BodyTimeoutError,
    BodyTooLargeError,
    ContextLengthError,
    ConversationNotFoundError,
    LateError,
    MediaTypeError,
    ModelFailedError,
    ModelNotFoundError,
    NotFoundError,
    NoWorkerError,
    OverloadedError,
    RaydixError,
    RequestError,
    ResponseNotFoundError,
    ServiceError,
)

# Errors that several routes have.

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
ANSWER = (*BODY, LateError, ModelFailedError, NoWorkerError)
MANAGER = (ServiceError, NoWorkerError)
STORED_RESPONSE = (RequestError, ResponseNotFoundError, *MANAGER)
KEPT_CONVERSATION = (RequestError, ConversationNotFoundError, *MANAGER)
STORED_FILE = (NotFoundError, ServiceError)
UPLOAD = (RequestError, BodyTimeoutError, BodyTooLargeError, MediaTypeError, OverloadedError)

# Parameters that several routes have.

REQUEST_HEADERS = (
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
    Parameter(
        FORMAT_HEADER,
        "header",
        f"Has the response tell the workers' load in the header `{LOAD_HEADER}` (ORCA).",
        LOAD_FORMATS,
    ),
)
LAST_EVENT = Parameter(
    HEADER,
    "header",
    "Of a stream: 0 gives each event an `id`; the last event's id goes on behind it, with the same body.",
)
SALT = Parameter("cache_salt", "query", "That of the response's request.")
CONVERSATION_SALT = Parameter("cache_salt", "query", "As when the conversation was created; responses have it, too.")
ITEMS_PAGE = (
    Parameter("limit", "query", "Most items of the page, 1 to 100; 20."),
    Parameter("order", "query", "Order of the items; desc.", ("asc", "desc")),
    Parameter("after", "query", "Id of the item before the page."),
)
LIST = (
    Parameter("limit", "query", "Most objects of the list."),
    Parameter("after", "query", "Id of the object behind which the list begins: `last_id` of the part before."),
    Parameter("order", "query", "By time, the newest first by default.", ("desc", "asc")),
)


def _answer(
    path: str,
    name: str,
    sentence: str,
    *,
    body: type[BaseModel],
    response: type[BaseModel],
    parse: Parse | None = None,
    operation: str = "",
    events: type[BaseModel] | None = None,
    ends_with_done: bool = False,
    errors: tuple[type[RaydixError], ...] = (),
    wire: WireFormat = OPENAI,
) -> Route:
    """A route that has the model answer a body; one with `events` also streams, and a stream may be gone on with."""
    return Route(
        method="POST",
        path=path,
        name=name,
        operation=operation,
        sentence=sentence,
        parse=parse,
        body=body,
        response=response,
        events=events,
        ends_with_done=ends_with_done,
        parameters=REQUEST_HEADERS if events is None else (*REQUEST_HEADERS, LAST_EVENT),
        errors=(*ANSWER, *(() if events is None else (AnswerChangedError,)), *errors),
        wire=wire,
        is_answer=True,
    )


class Invocation(RootModel[ChatCompletionRequest | CompletionRequest | EmbeddingsRequest]):
    """Body of `/invocations`: that of a chat, which has `messages`, of a completion, which has `prompt`, or of
    embeddings, which has `input`."""


class _Shape(LenientModel):
    """The fields by which bodies are told apart."""

    messages: Any = Field(default=None)
    prompt: Any = Field(default=None)
    input: Any = Field(default=None)


def parse_invocation(body: bytes, rules: BodyRules = NO_RULES) -> GenerationSpec:
    """A body of a chat, a completion or embeddings in normal form. Raises RequestError naming the field at fault."""
    shape = parse_body(_Shape, body)
    if shape.messages is not None:
        return parse_chat(body, rules)
    if shape.prompt is not None:
        return parse_completion(body, rules)
    if shape.input is not None:
        return parse_embeddings(body, rules)
    raise RequestError(
        "The request body must have 'messages' (a chat), 'prompt' (a completion) or 'input' (embeddings)."
    )


# Answers of the model

CHAT = _answer(
    "/v1/chat/completions",
    "chat",
    "Answer a chat; whole or as server-sent events.",
    operation="chat_completions",
    parse=parse_chat,
    body=ChatCompletionRequest,
    response=ChatCompletion,
    events=ChatCompletionChunk,
    ends_with_done=True,
    errors=(AnswerNotFoundError,),
)

CONVERSATIONS = _answer(
    "/v1/chat/completions/batch",
    "conversations",
    "Answer several chats that share all fields but their messages, with one choice for each, in their order; as "
    "at vLLM. The decisions behind the choice 0 are explained as those of `<id>-0`.",
    body=ConversationsRequest,
    response=ChatCompletion,
    errors=(AnswerNotFoundError,),
)

COMPLETION = _answer(
    "/v1/completions",
    "completion",
    "Complete a prompt: a text, token ids, or a list of either; whole or as server-sent events.",
    operation="completions",
    parse=parse_completion,
    body=CompletionRequest,
    response=Completion,
    events=CompletionChunk,
    ends_with_done=True,
)

EMBEDDINGS = _answer(
    "/v1/embeddings",
    "embeddings",
    "One vector for each input, pooled from the hidden states of the served model.",
    parse=parse_embeddings,
    body=EmbeddingsRequest,
    response=EmbeddingList,
)

GENERATIVE_SCORING = _answer(
    "/generative_scoring",
    "generative_scoring",
    "For each item the probability of the first label as the next token behind query and item; as at vLLM.",
    parse=parse_generative_scoring,
    body=GenerativeScoringRequest,
    response=ScoreList,
)

SCORE = _answer(
    "/v1/score",
    "score",
    "For each item the probabilities of all labels as the next token behind query and item; as at SGLang.",
    parse=parse_score,
    body=ScoreRequest,
    response=LabelScores,
)

RESPONSES = _answer(
    "/v1/responses",
    "responses",
    "Answer in the form of OpenAI's Responses API, and store the response; whole or as server-sent events.",
    operation="create_response",
    parse=parse_responses,
    body=ResponsesRequest,
    response=ResponseObject,
    events=ResponseEvent,
    errors=(ResponseNotFoundError, ConversationNotFoundError),
)

INPUT_TOKENS = Route(
    "POST",
    "/v1/responses/input_tokens",
    "input_tokens",
    "Count the tokens of the prompt that `/v1/responses` would make of an input.",
    parse=parse_input_tokens,
    body=ResponsesRequest,
    response=InputTokens,
    errors=(*BODY, ResponseNotFoundError),
)

COMPACT = Route(
    "POST",
    "/v1/responses/compact",
    "compact",
    "Summarise a conversation: the user's messages and an item `compaction`, with which later requests go on.",
    parse=parse_compact,
    body=CompactRequest,
    response=CompactedResponse,
    parameters=REQUEST_HEADERS,
    errors=(*ANSWER, ResponseNotFoundError),
)

MESSAGES = _answer(
    "/v1/messages",
    "messages",
    "Answer a chat in Anthropic's form; whole or as server-sent events.",
    parse=parse_messages,
    body=MessagesRequest,
    response=MessageResponse,
    events=MessageEvent,
    wire=ANTHROPIC,
)

COUNT_TOKENS = Route(
    "POST",
    "/v1/messages/count_tokens",
    "count_tokens",
    "Count the tokens of the prompt that `/v1/messages` would make of a chat.",
    parse=parse_count,
    body=CountRequest,
    response=TokenCount,
    errors=BODY,
    wire=ANTHROPIC,
)

INVOCATION = _answer(
    "/invocations",
    "invocation",
    "Answer a chat, a completion or a request for embeddings, by the fields of the body; as SageMaker asks.",
    operation="invocations",
    parse=parse_invocation,
    body=Invocation,
    response=Invoked,
    events=InvokedEvent,
    ends_with_done=True,
    errors=(AnswerNotFoundError,),
)

# Stored responses

RESPONSE = Route(
    "GET",
    "/v1/responses/{response_id}",
    "response",
    "A stored response, or one in the background as it is now. `?cache_salt=<salt>` is that of its request; "
    "`?stream=true&starting_after=<number>` reads the stream of one in the background behind an event.",
    response=ResponseObject,
    events=ResponseEvent,
    parameters=(
        SALT,
        Parameter("stream", "query", "Answer with the events of the response.", ("true", "false")),
        Parameter("starting_after", "query", "`sequence_number` of the last event that the client has."),
    ),
    errors=(*STORED_RESPONSE, AnswerChangedError, OverloadedError, ModelFailedError),
)

DELETE_RESPONSE = Route(
    "DELETE",
    "/v1/responses/{response_id}",
    "delete_response",
    "Forget a stored response. No later one can go on from it.",
    response=ResponseDeleted,
    parameters=(SALT,),
    errors=STORED_RESPONSE,
)

CANCEL_RESPONSE = Route(
    "POST",
    "/v1/responses/{response_id}/cancel",
    "cancel_response",
    "End a response in the background; one that has ended stays as it is. To end another response, close its "
    "connection.",
    response=ResponseObject,
    parameters=(SALT,),
    errors=STORED_RESPONSE,
)

INPUT_ITEMS = Route(
    "GET",
    "/v1/responses/{response_id}/input_items",
    "input_items",
    "The input of a stored response, a page of items; `?limit=20&order=desc&after=<id>`.",
    response=ResponseItems,
    parameters=(*ITEMS_PAGE, SALT),
    errors=STORED_RESPONSE,
)

# Conversations

CREATE_CONVERSATION = Route(
    "POST",
    "/v1/conversations",
    "create_conversation",
    "Keep a conversation, which responses go on from and add to.",
    body=CreateConversation,
    response=ConversationObject,
    parameters=(CONVERSATION_SALT,),
    errors=(*BODY, *MANAGER),
)

CONVERSATION = Route(
    "GET",
    "/v1/conversations/{conversation_id}",
    "conversation",
    "A conversation, without its items.",
    response=ConversationObject,
    parameters=(CONVERSATION_SALT,),
    errors=KEPT_CONVERSATION,
)

UPDATE_CONVERSATION = Route(
    "POST",
    "/v1/conversations/{conversation_id}",
    "update_conversation",
    "Give a conversation other metadata.",
    body=UpdateConversation,
    response=ConversationObject,
    parameters=(CONVERSATION_SALT,),
    errors=(*BODY, *KEPT_CONVERSATION),
)

DELETE_CONVERSATION = Route(
    "DELETE",
    "/v1/conversations/{conversation_id}",
    "delete_conversation",
    "Forget a conversation with its items.",
    response=ConversationDeleted,
    parameters=(CONVERSATION_SALT,),
    errors=KEPT_CONVERSATION,
)

CONVERSATION_ITEMS = Route(
    "GET",
    "/v1/conversations/{conversation_id}/items",
    "conversation_items",
    "The items of a conversation, a page of them; `?limit=20&order=desc&after=<id>`.",
    response=ResponseItems,
    parameters=(*ITEMS_PAGE, CONVERSATION_SALT),
    errors=KEPT_CONVERSATION,
)

ADD_CONVERSATION_ITEMS = Route(
    "POST",
    "/v1/conversations/{conversation_id}/items",
    "add_conversation_items",
    "Add up to 20 items to a conversation, behind the others.",
    body=AddItems,
    response=ResponseItems,
    parameters=(CONVERSATION_SALT,),
    errors=(*BODY, *KEPT_CONVERSATION),
)

CONVERSATION_ITEM = Route(
    "GET",
    "/v1/conversations/{conversation_id}/items/{item_id}",
    "conversation_item",
    "An item of a conversation.",
    response=ConversationItem,
    parameters=(CONVERSATION_SALT,),
    errors=(*KEPT_CONVERSATION, NotFoundError),
)

DELETE_CONVERSATION_ITEM = Route(
    "DELETE",
    "/v1/conversations/{conversation_id}/items/{item_id}",
    "delete_conversation_item",
    "Take an item out of a conversation, which is the answer.",
    response=ConversationObject,
    parameters=(CONVERSATION_SALT,),
    errors=(*KEPT_CONVERSATION, NotFoundError),
)

# Tokens and models

TOKENIZE = Route(
    "POST",
    "/tokenize",
    "tokenize",
    "The tokens of a text or of a chat's prompt, and their number.",
    body=TokenizeRequest,
    response=Tokenized,
    errors=BODY,
)

DETOKENIZE = Route(
    "POST",
    "/detokenize",
    "detokenize",
    "The text of tokens, with the names of special tokens.",
    body=DetokenizeRequest,
    response=Detokenized,
    errors=BODY,
)

TOKENIZER_INFO = Route(
    "GET",
    "/tokenizer_info",
    "tokenizer_info",
    "The tokenizer: its class, size, special tokens and chat template. `http.tokenizer_info: false` turns it off.",
    response=TokenizerInfo,
    errors=(NotFoundError,),
)

MODELS = Route(
    "GET",
    "/v1/models",
    "models",
    "The model that is served, with its context length, and its adapters.",
    response=ModelList,
)

MODEL = Route(
    "GET",
    "/v1/models/{name:path}",
    "model",
    "The served model, or the adapter of it, that has this name; 404 for another name.",
    response=Model,
    errors=(ModelNotFoundError,),
)

LOAD_ADAPTER = Route(
    "POST",
    "/v1/load_lora_adapter",
    "load_lora_adapter",
    "Load an adapter from a folder below `model.adapter_folders` into every worker, under a name for "
    "requests; answers when all have it. For administrators.",
    access=Access.ADMINISTRATORS,
    body=LoadAdapterRequest,
    response="text/plain",
    errors=(*BODY, *MANAGER),
)

UNLOAD_ADAPTER = Route(
    "POST",
    "/v1/unload_lora_adapter",
    "unload_lora_adapter",
    "Unload an adapter that was loaded at run time: its name is gone at once, and the answer comes when its "
    "requests have ended and its memory is free. For administrators.",
    access=Access.ADMINISTRATORS,
    body=UnloadAdapterRequest,
    response="text/plain",
    errors=(*BODY, NotFoundError, *MANAGER),
)

# Files and batches

UPLOAD_FILE = Route(
    "POST",
    "/v1/files",
    "upload_file",
    "Upload a file of JSON lines as a form, with the purpose `batch`.",
    form=UploadForm,
    response=FileObject,
    errors=(*STORED_FILE, *UPLOAD),
)

LIST_FILES = Route(
    "GET",
    "/v1/files",
    "list_files",
    "One's files; `limit`, `after`, `order` and `purpose` choose.",
    response=FileList,
    parameters=(*LIST, Parameter("purpose", "query", "Only files with this purpose.")),
    errors=(*STORED_FILE, RequestError),
)

FILE = Route(
    "GET", "/v1/files/{file_id}", "file", "A file's name, size and times.", response=FileObject, errors=STORED_FILE
)

FILE_CONTENT = Route(
    "GET",
    "/v1/files/{file_id}/content",
    "file_content",
    "A file's content.",
    response="application/octet-stream",
    errors=STORED_FILE,
)

DELETE_FILE = Route(
    "DELETE",
    "/v1/files/{file_id}",
    "delete_file",
    "Erase a file; begun batches keep the input.",
    response=FileDeleted,
    errors=STORED_FILE,
)

CREATE_BATCH = Route(
    "POST",
    "/v1/batches",
    "create_batch",
    "Run the lines of an uploaded file, in room left by clients.",
    body=BatchRequest,
    response=Batch,
    errors=(*STORED_FILE, *BODY),
)

LIST_BATCHES = Route(
    "GET",
    "/v1/batches",
    "list_batches",
    "One's batches; `limit` and `after` choose.",
    response=BatchList,
    parameters=LIST,
    errors=(*STORED_FILE, RequestError),
)

BATCH = Route(
    "GET",
    "/v1/batches/{batch_id}",
    "batch",
    "The state of a batch, with files after the end.",
    response=Batch,
    errors=STORED_FILE,
)

CANCEL_BATCH = Route(
    "POST",
    "/v1/batches/{batch_id}/cancel",
    "cancel_batch",
    "End a batch; the answers so far are the output.",
    response=Batch,
    errors=(*STORED_FILE, RequestError),
)

# Batches of messages

CREATE_MESSAGE_BATCH = Route(
    "POST",
    "/v1/messages/batches",
    "create_message_batch",
    "Answer many requests of `/v1/messages`, in room left by clients.",
    body=MessageBatchRequest,
    response=MessageBatch,
    errors=(*STORED_FILE, *BODY),
    wire=ANTHROPIC,
)

LIST_MESSAGE_BATCHES = Route(
    "GET",
    "/v1/messages/batches",
    "list_message_batches",
    "One's batches of messages, the newest first.",
    response=MessageBatchList,
    parameters=(
        Parameter("limit", "query", "Most batches of the page, 1 to 1,000; 20."),
        Parameter("after_id", "query", "Id of the batch before the page."),
        Parameter("before_id", "query", "Id of the batch behind the page."),
    ),
    errors=(*STORED_FILE, RequestError),
    wire=ANTHROPIC,
)

MESSAGE_BATCH = Route(
    "GET",
    "/v1/messages/batches/{message_batch_id}",
    "message_batch",
    "The state of a batch of messages.",
    response=MessageBatch,
    errors=STORED_FILE,
    wire=ANTHROPIC,
)

CANCEL_MESSAGE_BATCH = Route(
    "POST",
    "/v1/messages/batches/{message_batch_id}/cancel",
    "cancel_message_batch",
    "End a batch of messages; what was answered so far is in its results.",
    response=MessageBatch,
    errors=(*STORED_FILE, RequestError),
    wire=ANTHROPIC,
)

MESSAGE_BATCH_RESULTS = Route(
    "GET",
    "/v1/messages/batches/{message_batch_id}/results",
    "message_batch_results",
    "The results of a batch of messages that has ended, a line of JSON for each request.",
    response="application/x-jsonl",
    errors=(*STORED_FILE, RequestError),
    wire=ANTHROPIC,
)

DELETE_MESSAGE_BATCH = Route(
    "DELETE",
    "/v1/messages/batches/{message_batch_id}",
    "delete_message_batch",
    "Erase a batch of messages that has ended, with its results.",
    response=MessageBatchDeleted,
    errors=(*STORED_FILE, RequestError),
    wire=ANTHROPIC,
)

# Requests and the cache

REQUESTS = Route(
    "GET",
    "/v1/requests",
    "requests",
    "Requests of this replica, under way and lately ended; with tenants one's own, and all for administrators.",
    response=RequestList,
)

REQUESTS_EVENTS = Route(
    "GET",
    "/v1/requests/events",
    "requests_events",
    "The list of `/v1/requests` as a stream: an event for what has changed, at most two in a second.",
    events=RequestsEvent,
    errors=(OverloadedError,),
)

EXPLAIN = Route(
    "GET",
    "/v1/requests/{request_id}/explain",
    "explain",
    "Where each block of a request's prompt came from, and why its workers were chosen.",
    response=Explanation,
    errors=(NotFoundError, *MANAGER),
)

CACHE = Route(
    "GET",
    "/v1/cache",
    "cache",
    "Sizes, hit rates, evictions, and each worker's costs; with tenants one's own share of them.",
    response=CacheReport,
    errors=MANAGER,
)

DOCTOR = Route(
    "GET",
    "/v1/cache/doctor",
    "doctor",
    "What costs one's own prompts of the last hour their hits, a day of it, and what to change.",
    response=CacheDoctor,
)

RESET_CACHE = Route(
    "POST",
    "/v1/cache/reset",
    "reset_cache",
    "Forget all KV that no request uses; for administrators where there are tenants.",
    access=Access.ADMINISTRATORS,
    response=CacheReset,
    errors=MANAGER,
)

CACHE_EVENTS = Route(
    "GET",
    "/v1/cache/events",
    "cache_events",
    "Stream which blocks come and go; `?since=<number>` goes on where one left off. For administrators.",
    access=Access.ADMINISTRATORS,
    events=CacheEvent,
    parameters=(Parameter("since", "query", "Number from which to go on; without it a snapshot comes first."),),
    errors=(RequestError, OverloadedError, *MANAGER),
)

RESET_PREFIX_CACHE = Route(
    "POST",
    "/reset_prefix_cache",
    "reset_prefix_cache",
    "As `/v1/cache/reset`, under vLLM's name: KV that requests use stays, and the object store is reset, too.",
    access=Access.ADMINISTRATORS,
    response=CacheReset,
    parameters=(
        Parameter("reset_running_requests", "query", "Not supported: only false is taken.", ("false", "0")),
        Parameter(
            "reset_external", "query", "Taken: the object store is reset in either case.", ("true", "false", "1", "0")
        ),
    ),
    errors=(RequestError, *MANAGER),
)

# Operation

TRACE_S, MAX_TRACE_S = 5.0, 60.0  # seconds of a trace, by default and at most

HEALTH = Route(
    "GET",
    "/health",
    "health",
    "200 while a request could be served, with the manager or without; 503 otherwise.",
    access=Access.EVERYBODY,
    response=Health,
    errors=MANAGER,
    is_probe=True,
)

PING = replace(HEALTH, path="/ping", name="ping", sentence="As `/health`, under SageMaker's name.")

PING_BY_POST = replace(PING, method="POST")

LOAD = Route(
    "GET",
    "/load",
    "load",
    "Answers under way at this replica; with tenants one's own, and all answers for administrators.",
    response=Load,
)

METRICS = Route(
    "GET",
    "/metrics",
    "metrics",
    "Metrics of this replica, the workers and the manager, in Prometheus' text format. For administrators.",
    access=Access.ADMINISTRATORS,
    response="text/plain; version=0.0.4; charset=utf-8",
)

TRACE = Route(
    "POST",
    "/v1/debug/trace",
    "trace",
    "Record what this replica and all workers do, and return a Chrome trace, for Perfetto: steps, each request's part "
    "of them, imports, hand-overs, and the time of each token. For administrators.",
    operation="record_trace",
    access=Access.ADMINISTRATORS,
    response=ChromeTrace,
    parameters=(Parameter("seconds", "query", f"Time to record, up to {MAX_TRACE_S:g}; by default {TRACE_S:g}."),),
    errors=(RequestError, OverloadedError),
)

SERVER_INFO = Route(
    "GET",
    "/server_info",
    "server_info",
    "Model, settings and versions, without names of files, keys or tenants. For administrators.",
    operation="show_server_info",
    access=Access.ADMINISTRATORS,
    response=ServerInfo,
    parameters=(Parameter("config_format", "query", "Form of the configuration.", ("json",)),),
    errors=(RequestError,),
)

VERSION = Route(
    "GET",
    "/version",
    "version",
    "The version of raydix.",
    operation="show_version",
    access=Access.EVERYBODY,
    response=Version,
)

OPENAPI = Route(
    "GET",
    "/openapi.json",
    "openapi",
    "All routes, bodies, responses and errors, as OpenAPI's document.",
    access=Access.EVERYBODY,
    response=ApiDocument,
)

DOCS = Route(
    "GET",
    "/docs",
    "docs",
    "The description in `/openapi.json` as a page, which needs no other server.",
    access=Access.EVERYBODY,
    response="text/html",
)

PAGE = Route(
    "GET",
    "/",
    "page",
    "A page for people: chat, requests, the cluster and the cache.",
    access=Access.EVERYBODY,
    response="text/html",
    errors=(NotFoundError,),
)

PAGE_FILE = Route(
    "GET",
    "/page/{name}",
    "page_file",
    "Scripts and styles of the page.",
    access=Access.EVERYBODY,
    response="text/javascript",
    errors=(NotFoundError,),
)

# Every route above: a route that is declared is served and described, and there is no second list to keep.
ROUTES: Sequence[Route] = tuple(each for each in tuple(vars().values()) if isinstance(each, Route))
"""All routes, in the order of OpenAPI's document."""

_PARSERS = {route.name: route.parse for route in ROUTES if route.parse is not None}


def parse(name: str, body: bytes, rules: BodyRules = NO_RULES) -> GenerationSpec:
    """The request in a body that came by the route with this name. Raises RequestError naming the field at fault."""
    return _PARSERS[name](body, rules)
