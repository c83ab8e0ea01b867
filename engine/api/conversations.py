"""Bodies of `/v1/chat/completions/batch`: several conversations that share all other fields, as at vLLM."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from raydix.engine.api.normal_form import refuse_contradictions
from raydix.engine.api.prompts import Messages, continued_answers
from raydix.engine.api.requests import ChatCompletionRequest
from raydix.engine.api.spec import GenerationSpec
from raydix.engine.api.validation import parse_body, request_error
from raydix.engine.core.errors import RequestError

MAX_CONVERSATIONS = 128
# Fields of chats whose values have no place in the answer to several.
FOR_ONE_CHAT = ("stream", "tools", "prompt_logprobs", "input_ids", "kv_transfer_params")


class ConversationsRequest(BaseModel):
    """Body of `/v1/chat/completions/batch`: the fields of `/v1/chat/completions`, with several conversations."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    messages: Annotated[list[Messages], Field(min_length=1, max_length=MAX_CONVERSATIONS), FailFast()] = Field(
        description="Conversations, each a list of messages. Other fields are those of ChatCompletionRequest, for all "
        "conversations; `stream`, `tools`, `prompt_logprobs`, `input_ids`, `kv_transfer_params` and `n` above 1 are "
        "refused."
    )


def parse_conversations(body: bytes) -> list[GenerationSpec]:
    """The request of each conversation in normal form. Raises RequestError naming the field at fault."""
    given = parse_body(ConversationsRequest, body)
    first, *others = given.messages
    with naming(0):
        request = _chat(given, first)
        spec = request.spec()
    specs = [spec]
    for number, messages in enumerate(others, start=1):
        with naming(number):
            specs.append(_going_with(spec, request.model_copy(update={"messages": messages})))
    return specs


@contextmanager
def naming(number: int) -> Iterator[None]:
    """Have errors about the messages of a chat name those of conversation `number`."""
    try:
        yield
    except RequestError as error:
        if error.param is not None and error.param.startswith("messages"):
            place = f"messages[{number}]"
            error.message = error.message.replace("'messages", f"'{place}", 1)
            error.param = place + error.param.removeprefix("messages")
        raise


def _chat(given: ConversationsRequest, messages: Messages) -> ChatCompletionRequest:
    """The request of one conversation. Raises RequestError naming the field at fault."""
    try:
        request = ChatCompletionRequest.model_validate({**(given.model_extra or {}), "messages": messages})
    except ValidationError as error:
        raise request_error(error, ChatCompletionRequest) from None
    if (request.n or 1) > 1:
        raise RequestError("'n' must be 1 where there are several conversations.", param="n")
    for name in FOR_ONE_CHAT:
        if getattr(request, name) not in (None, False, []):
            raise RequestError(f"'{name}' is not supported where there are several conversations.", param=name)
    return request


def _going_with(spec: GenerationSpec, request: ChatCompletionRequest) -> GenerationSpec:
    """The normal form of a request that differs from that of `spec` by its messages alone. Raises RequestError."""
    for index, message in enumerate(request.messages):
        message.check(index)
    own = replace(
        spec,
        messages=tuple(message.for_template() for message in request.messages),
        continued=continued_answers(request.messages),
        chat_end=request.end_of(request.messages),
    )
    refuse_contradictions(own)
    return own
