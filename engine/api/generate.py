"""Requests and responses of the Python handle: what another Ray program sends to `generate` and `stream`.

The same fields, bounds and sentences as over HTTP. Constructing a `GenerateRequest` checks each field (pydantic's
ValidationError, in the caller's process); what contradicts is found by `spec` (RequestError, from the call).
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from engine.api.fields import Label, Message, OnePrompt, SamplingFields, build_spec
from engine.api.responses import Usage
from engine.api.spec import GenerationSpec
from engine.api.validation import request_error
from engine.core.errors import RequestError
from engine.core.types import FinishReason, TokenLogprobs

REQUEST_ID_PATTERN = r"^[A-Za-z0-9._:-]{1,128}$"
RequestId = Annotated[str, StringConstraints(pattern=REQUEST_ID_PATTERN)]


class GenerateRequest(SamplingFields):
    """One prompt, or one chat, and how to answer it: exactly one of `prompt` and `messages`."""

    prompt: OnePrompt | None = Field(default=None, description="A text or its token ids.")
    messages: Annotated[list[Message], Field(min_length=1)] | None = Field(default=None, description="A chat.")
    model: Label | None = Field(default=None, description="May be left out: there is one model.")
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="Report log-probabilities of the tokens and of this many likeliest ones."
    )
    tenant: Label | None = Field(
        default=None, description="On whose behalf: a configured tenant. Taken on trust, so not a field over HTTP."
    )
    request_id: RequestId | None = Field(
        default=None, description="The caller's name for the request, in answers and logs."
    )

    def spec(self, *, stream: bool = False) -> GenerationSpec:
        """The request in normal form. Raises RequestError where its fields contradict."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("Give exactly one of 'prompt' and 'messages'.", param="prompt")
        prompt = self.prompt if isinstance(self.prompt, str) else tuple(self.prompt or ())
        return build_spec(
            self,
            kind="completion" if self.messages is None else "chat",
            model=self.model,
            prompts=(prompt,) if prompt else (),
            messages=self.messages,
            max_tokens=self.max_tokens,
            logprobs=self.logprobs,
            stream=stream,
            include_usage=True,
            request_id=self.request_id,
        )


def as_generate_request(value: GenerateRequest | Mapping[str, object]) -> GenerateRequest:
    """`value`, or the request with its fields. Raises RequestError naming the field at fault."""
    if isinstance(value, GenerateRequest):
        return value
    try:
        return GenerateRequest.model_validate(dict(value))
    except ValidationError as error:
        raise request_error(error, GenerateRequest) from None


class _Result(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = Field(
        default=None, description="One for each of token_ids, if asked for."
    )
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = Field(
        default=None,
        description="One for each token of the prompt, None for the first, if asked for; in a stream with the first "
        "chunk.",
    )
    prompt_token_ids: tuple[int, ...] | None = Field(
        default=None, description="Where return_token_ids asked for them; in a stream with the first chunk."
    )


class GenerateResponse(_Result):
    """A whole answer."""

    finish_reason: FinishReason
    usage: Usage


class GenerateChunk(_Result):
    """The next piece of an answer. The last one alone has `finish_reason` and `usage`."""

    finish_reason: FinishReason | None = None
    usage: Usage | None = None
