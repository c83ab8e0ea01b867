"""Fields for the prompt of a chat beside its messages, and for the answer's beginning."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from raydix.engine.api.fields import ChatFields
from raydix.engine.api.prompts import GivenPrompt, Message, TextPart, chat_end, join_content
from raydix.engine.api.validation import StrictModel
from raydix.engine.core.answers.prompt_form import ChatEnd
from raydix.engine.core.errors import RequestError


class Prediction(StrictModel):
    """The client's guess of an answer."""

    type: Literal["content"] = Field(description="Kind of guess.")
    content: Annotated[str, BeforeValidator(join_content, json_schema_input_type=str | list[TextPart])] = Field(
        description="The guessed text, or a list of text parts."
    )


class ChatPromptFields(ChatFields):
    """Fields of a chat over HTTP and through the Python handle."""

    add_generation_prompt: bool | None = Field(
        default=None, description="The prompt ends with the beginning of an answer; true."
    )
    continue_final_message: bool | None = Field(
        default=None,
        description="Go on with the last message instead of beginning an answer; not with "
        "`add_generation_prompt: true`.",
    )
    echo: bool | None = Field(
        default=None, description="The answer begins with the last message's text where that is of the answer's role."
    )

    input_ids: GivenPrompt | None = Field(
        default=None,
        description="Ids of the whole prompt, in place of what the messages would be rendered to: where a router has "
        "tokenized the chat before. `messages` is still required.",
    )
    prediction: Prediction | None = Field(
        default=None,
        description="A guess of the answer, such as a file before an edit: makes the answer quicker where drafts are "
        "on and the guess is right, and changes no token.",
    )

    def end_of(self, messages: Sequence[Message]) -> ChatEnd:
        """End of the prompt. Raises RequestError where fields or the last message contradict."""
        end = chat_end(self.add_generation_prompt, self.continue_final_message)
        if end is not ChatEnd.ANSWER and self.store:
            name = "continue_final_message" if end is ChatEnd.OPEN else "add_generation_prompt"
            raise RequestError(f"'{name}' is not supported together with 'store'.", param=name)
        last = messages[-1]
        if end is ChatEnd.OPEN and (last.tool_calls or last.is_continued):
            raise RequestError(
                "'continue_final_message' is not supported where the last message has 'tool_calls', 'id' or "
                "'token_ids'.",
                param="continue_final_message",
            )
        return end

    def given_ids(self, messages: Sequence[Message], forwarded: Sequence[int] | None = None) -> tuple[int, ...] | None:
        """The prompt's ids where they are given here or were `forwarded`. Raises RequestError where fields
        contradict."""
        given = self.input_ids if forwarded is None else forwarded
        if given is None:
            return None
        if self.input_ids is not None and tuple(self.input_ids) != tuple(given):
            raise RequestError(
                "'input_ids' and 'kv_transfer_params.prompt_token_ids' differ; give one of them.", param="input_ids"
            )
        if self.store or any(message.is_continued for message in messages):
            name = "store" if self.store else "messages"
            raise RequestError(
                "'input_ids', or 'kv_transfer_params.prompt_token_ids', is not supported together with 'store' or with "
                "messages that have 'id' or 'token_ids'.",
                param=name,
            )
        return tuple(given)
