"""Bodies of `/tokenize` and `/detokenize`, as vLLM has them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from pydantic import ConfigDict, Field

from raydix.engine.api.fields import TemplateFields
from raydix.engine.api.known import UnlessEmpty, Unsupported
from raydix.engine.api.prompts import Label, Messages, TokenIds, chat_end
from raydix.engine.api.spec import GenerationSpec
from raydix.engine.api.tools import OfferedTools
from raydix.engine.api.validation import StrictModel, only, parse_body
from raydix.engine.core.errors import RequestError


@dataclass(frozen=True, slots=True)
class TokenizeSpec:
    """A valid request for the tokens of a text or a chat."""

    prompt: GenerationSpec
    """A completion of one text, or a chat, of which only model and prompt matter."""
    add_special_tokens: bool
    return_token_strs: bool


class TokenizeRequest(OfferedTools, TemplateFields):
    """Body of `/tokenize`: a text or a chat."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
                {"required": ["messages"], "properties": {"messages": {"type": "array"}}},
            ]
        }
    )

    model: Label | None = Field(default=None, description="Name of the served model; may be left out.")
    prompt: str | None = Field(default=None, description="A text; this or `messages`.")
    messages: Messages | None = Field(default=None, description="A chat, rendered with the model's template.")
    add_special_tokens: bool | None = Field(
        default=None,
        description="Add the special tokens that the model wants around any text; true for a text, false for a chat, "
        "whose template writes them.",
    )
    return_token_strs: bool | None = Field(default=None, description="Return the tokens' names in the vocabulary, too.")
    add_generation_prompt: bool | None = Field(
        default=None, description="A chat ends with the beginning of an answer; true."
    )
    continue_final_message: bool | None = Field(default=None, description="A chat's last message is left open.")

    media_io_kwargs: UnlessEmpty = None
    mm_processor_kwargs: UnlessEmpty = None
    reasoning_effort: Unsupported = None
    tool_choice: Annotated[Any, only("auto")] = None

    def spec(self) -> TokenizeSpec:
        """The request in normal form. Raises RequestError for contradicting fields."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("Exactly one of 'prompt' and 'messages' must be given.", param="prompt")
        if self.prompt is not None:
            self._refuse_chat_fields()
            prompt = GenerationSpec(kind="completion", model=self.model, prompts=(self.prompt,))
        else:
            prompt = self._chat(self.messages or [])
        add = self.add_special_tokens
        return TokenizeSpec(
            prompt,
            add_special_tokens=self.messages is None if add is None else add,
            return_token_strs=bool(self.return_token_strs),
        )

    def _refuse_chat_fields(self) -> None:
        for name, asks in (
            ("add_generation_prompt", self.add_generation_prompt is False),
            ("continue_final_message", self.continue_final_message),
            ("tools", self.tools),
            ("chat_template", self.chat_template is not None),
            ("chat_template_kwargs", self.chat_template_kwargs),
        ):
            if asks:
                raise RequestError(f"'{name}' is only allowed with 'messages'.", param=name)

    def _chat(self, messages: Messages) -> GenerationSpec:
        for index, message in enumerate(messages):
            message.check(index)
            if message.is_continued:
                name = "token_ids" if message.reference is None else "id"
                param = f"messages[{index}].{name}"
                raise RequestError(f"'{param}' is not supported by /tokenize: leave it out.", param=param)

        end = chat_end(self.add_generation_prompt, self.continue_final_message)
        rendered = tuple(message.for_template() for message in messages)
        return GenerationSpec(
            kind="chat",
            model=self.model,
            messages=rendered,
            chat_end=end,
            tools=self.offered(),
            template=self.template(),
        )


class DetokenizeRequest(StrictModel):
    """Body of `/detokenize`."""

    model: Label | None = Field(default=None, description="Name of the served model; may be left out.")
    tokens: TokenIds = Field(description="Token ids.")
    skip_special_tokens: bool | None = Field(default=None, description="Leave special tokens out of the text; false.")


def parse_tokenize(body: bytes) -> TokenizeSpec:
    """A body of `/tokenize` in normal form. Raises RequestError naming the field at fault."""
    return parse_body(TokenizeRequest, body).spec()


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """A body of `/detokenize`. Raises RequestError naming the field at fault."""
    return parse_body(DetokenizeRequest, body)


def tokenize_body(token_ids: Sequence[int], names: Sequence[str] | None, max_model_len: int) -> bytes:
    """The response of `/tokenize`. `names` are the tokens' in the vocabulary, if the request wants them."""
    return orjson.dumps(
        {"count": len(token_ids), "max_model_len": max_model_len, "tokens": list(token_ids), "token_strs": names}
    )


def detokenize_body(text: str) -> bytes:
    return orjson.dumps({"prompt": text})
