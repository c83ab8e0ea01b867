"""Bodies of `/v1/embeddings`, requests and responses of the Python handle.

Over HTTP a chat, rendered with the model's template, may stand in place of inputs, as at vLLM. As for OpenAI's other
routes, a field is supported, or harmless and ignored, or refused by name.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raydix.engine.api.fields import TemplateFields
from raydix.engine.api.inputs import InputsFields
from raydix.engine.api.known import Ignored, UnlessEmpty, Unsupported
from raydix.engine.api.prompts import MAX_TOKEN_ID, Inputs, Label, Messages, chat_end
from raydix.engine.api.responses import ResponseHead, TokenUsage
from raydix.engine.api.slices import array_of, document
from raydix.engine.api.spec import EmbeddingUse, GenerationSpec
from raydix.engine.api.validation import (
    INTEGRAL,
    NO_RULES,
    BodyRules,
    describe,
    ignored_fields,
    only,
    parse_body,
    request_error,
)
from raydix.engine.core.errors import RequestError


class EmbeddingFields(InputsFields):
    """Fields over HTTP and through the Python handle."""

    dimensions: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID), INTEGRAL] | None = Field(
        default=None, description="Taken where it is the size of the model's hidden states; vectors are never cut."
    )
    use_activation: bool | None = Field(default=None, description="Scale each vector to length 1; true.")
    normalize: bool | None = Field(default=None, description="Older name of `use_activation`.")

    def use(self, encoding: Literal["float", "base64"] = "float") -> EmbeddingUse:
        """Form of the vectors. Raises RequestError for contradicting fields."""
        return EmbeddingUse(encoding, self._is_normalized(), self.dimensions)

    def _is_normalized(self) -> bool:
        """Value of `use_activation` under either of its names."""
        new, old = self.use_activation, self.normalize
        if new is not None and old is not None and new != old:
            raise RequestError("'use_activation' and 'normalize' differ; give one of them.", param="normalize")
        return (old if new is None else new) is not False


class EmbeddingsRequest(EmbeddingFields, TemplateFields):
    """Body of `/v1/embeddings`: inputs, or a chat."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["input"], "properties": {"input": {"type": ["string", "array"]}}},
                {"required": ["messages"], "properties": {"messages": {"type": "array"}}},
            ]
        }
    )

    input: Inputs | None = Field(
        default=None, description="A text, token ids, or a list of either, up to 2,048; this or `messages`."
    )
    messages: Messages | None = Field(
        default=None, description="A chat, rendered with the model's template: the vector is its prompt's."
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="A chat ends with the beginning of an answer; false."
    )
    continue_final_message: bool | None = Field(default=None, description="A chat's last message is left open.")
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="A list of numbers, or the bytes of little-endian float32 in base64; float."
    )

    metadata: Ignored = None
    padding: Annotated[Any, only("do_not_pad")] = None
    embed_dtype: Annotated[Any, only("float32")] = None
    endianness: Annotated[Any, only("native", "little")] = None
    mm_processor_kwargs: UnlessEmpty = None
    lora_path: UnlessEmpty = None
    rid: Unsupported = None
    embed_override_token_id: Unsupported = None
    embed_overrides: UnlessEmpty = None

    media_io_kwargs: UnlessEmpty = None

    def spec(self) -> GenerationSpec:
        """The request in normal form. Raises RequestError for contradicting fields."""
        if self.input is not None and self.messages is not None:
            raise RequestError("'input' and 'messages' cannot be given together.", param="messages")
        if self.messages is not None:
            spec = self._chat(self.messages)
        elif self.input is not None:
            self._refuse_chat_fields()
            spec = self.of_inputs(self.input)
        else:
            raise RequestError("Missing required parameter: 'input'.", param="input")
        use = self.use(self.encoding_format or "float")
        return replace(spec, embedding=use, max_tokens=0, ignored=ignored_fields(self))

    def _refuse_chat_fields(self) -> None:
        for name, asks in (
            ("add_generation_prompt", self.add_generation_prompt),
            ("continue_final_message", self.continue_final_message),
            ("chat_template", self.chat_template is not None),
            ("chat_template_kwargs", self.chat_template_kwargs),
        ):
            if asks:
                raise RequestError(f"'{name}' is only allowed with 'messages'.", param=name)

    def _chat(self, messages: Messages) -> GenerationSpec:
        # The template writes the special tokens; more of them would make another prompt than an answer's.
        if self.add_special_tokens:
            raise RequestError(
                "'add_special_tokens' is only allowed with 'input': a chat's template writes them.",
                param="add_special_tokens",
            )
        for index, message in enumerate(messages):
            message.check(index)
            if message.is_continued:
                name = "token_ids" if message.reference is None else "id"
                param = f"messages[{index}].{name}"
                raise RequestError(f"'{param}' is not supported by /v1/embeddings: leave it out.", param=param)
        return replace(
            self.of_inputs(()),
            kind="chat",
            messages=tuple(message.for_template() for message in messages),
            chat_end=chat_end(bool(self.add_generation_prompt), self.continue_final_message),
            template=self.template(),
        )


class EmbedRequest(EmbeddingFields):
    """A request of the Python handle for embeddings."""

    input: Inputs = Field(description="A text, token ids, or a list of either: up to 2,048.")
    tenant: Label | None = Field(
        default=None, description="On whose behalf: a configured tenant. Taken on trust, so not a field over HTTP."
    )

    def spec(self) -> GenerationSpec:
        """The request in normal form. Raises RequestError for contradicting fields."""
        return replace(self.of_inputs(self.input), embedding=self.use(), max_tokens=0)


class EmbedResponse(BaseModel):
    """Embeddings of a request's inputs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    request_id: str
    embeddings: tuple[tuple[float, ...], ...] = Field(description="One vector for each input, in their order.")
    usage: TokenUsage


def parse_embeddings(body: bytes, rules: BodyRules = NO_RULES) -> GenerationSpec:
    """A body of `/v1/embeddings` in normal form. Raises RequestError naming the field at fault."""
    return parse_body(EmbeddingsRequest, body, takes_unknown=rules.takes_unknown).spec()


def as_embed_request(value: EmbedRequest | Mapping[str, object]) -> EmbedRequest:
    """Return `value`, or the request with its fields. Raises RequestError naming the field at fault."""
    if isinstance(value, EmbedRequest):
        return value
    if not isinstance(value, Mapping):
        raise RequestError(f"The request must be an EmbedRequest or a mapping of its fields, not {describe(value)}.")
    try:
        return EmbedRequest.model_validate(dict(value))
    except ValidationError as error:
        raise request_error(error, EmbedRequest) from None


def embeddings_slices(
    head: ResponseHead, embeddings: Callable[[], Iterator[object]], usage: TokenUsage
) -> Iterator[bytes]:
    """The response of `/v1/embeddings` in slices. An embedding is a text, a list of numbers, or an array of them."""

    def data() -> Iterator[object]:
        for index, each in enumerate(embeddings()):
            yield {"object": "embedding", "index": index, "embedding": each}

    return document(
        {
            "id": head.id,
            "object": "list",
            "created": head.created,
            "model": head.model,
            "data": array_of(data),
            "usage": usage.object(),
        }
    )
