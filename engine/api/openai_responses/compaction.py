"""Compaction: a summary takes the place of a long conversation.

The prompt of the summary is the conversation's own prompt with one more message, so that its KV is that of the session.
The item `compaction` that the client gets holds the whole message with which the conversation begins anew: what the
user has said, word by word, and the summary. So whatever a client sends before the item, nothing of it is read again
but the system's messages, and a client that sends the item alone comes to the same prompt.
"""

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import orjson
from pydantic import Field

from raydix.engine.api.responses import Json
from raydix.engine.api.spec import ChatMessage, GenerationSpec
from raydix.engine.api.validation import INTEGRAL, LenientModel
from raydix.engine.core.types import SamplingParams

SUMMARY_TOKENS = 4096
"""Most tokens of a summary."""
MIN_THRESHOLD = 1000
"""OpenAI's lowest threshold."""
BEGIN, END = "<conversation_summary>\n", "\n</conversation_summary>"
"""Stand around a summary in the user's message."""
MIN_REPLACED = 0.5
"""Part of the threshold that a summary must take the place of."""
REQUEST = (
    "Summarise this conversation for yourself, so that you can go on with the work when nothing but the user's own "
    "messages and your summary is left. Name the task, what has been decided and done, files, commands, names and "
    "figures that matter, what has failed, and the next steps. Write the summary alone and call no function."
)
"""The message that asks for a summary."""
_PREFIX = "raydix.1."
"""Begins the content of every item that a raydix server has made."""


class CompactionRule(LenientModel):
    """When a conversation is compacted."""

    type: Annotated[str, Field(max_length=64)] = Field(
        description="`compaction`. A rule of another type has no effect, and is named in the header `x-raydix-ignored`."
    )
    compact_threshold: Annotated[int, Field(ge=MIN_THRESHOLD), INTEGRAL] | None = Field(
        default=None, description="Tokens of the prompt above which a summary takes the conversation's place."
    )


def content_of(text: str) -> str:
    """The content of an item: not secret, since it is the client's own text, but not made to be changed either."""
    return _PREFIX + base64.urlsafe_b64encode(orjson.dumps({"text": text})).decode()


def text_of(content: str) -> str | None:
    """The message in an item's content; None if no raydix server has made the item."""
    if not content.startswith(_PREFIX):
        return None
    try:
        text = orjson.loads(base64.urlsafe_b64decode(content[len(_PREFIX) :]))["text"]
    except (ValueError, TypeError, KeyError):
        return None
    return text if isinstance(text, str) else None


def item(item_id: str, content: str) -> Json:
    """The item as a response has it."""
    return {"id": item_id, "type": "compaction", "encrypted_content": content}


def asking(spec: GenerationSpec, *, leaves_question: bool = False) -> GenerationSpec:
    """The request for a summary of a conversation: the same prompt with one more message, and a plain answer.
    `leaves_question`: a question at the end that has not been answered is not summarised."""
    messages = [*(_older(spec.messages) if leaves_question else spec.messages)]
    # Some chat templates refuse two messages of the user in a row.
    if messages and messages[-1]["role"] == "user":
        messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n\n{REQUEST}"}
    else:
        messages.append({"role": "user", "content": REQUEST})
    assert spec.turn is not None
    # The message that asks counts as input of the request, also where it was joined with one that came before.
    own = max(1, len(messages) - (len(spec.messages) - spec.turn.num_own))
    tools = spec.tools
    if tools is not None:
        # The functions stay in the prompt, which begins with them.
        tools = replace(tools, may_call=False, is_single=False, required=(), strict=())
    return replace(
        spec,
        messages=tuple(messages),
        tools=tools,
        sampling=SamplingParams(max_tokens=0, temperature=spec.sampling.temperature, top_p=spec.sampling.top_p),
        grammar_param=None,
        max_tokens=SUMMARY_TOKENS,
        is_capped=True,
        stop=(),
        all_logprobs=False,
        form=replace(spec.form, stream=False, return_token_ids=False),
        service=replace(spec.service, request_id=None),
        turn=replace(spec.turn, is_stored=False, num_own=own, compact_threshold=None, shows_messages=False),
    )


def is_due(spec: GenerationSpec, num_tokens: int) -> bool:
    """True if a conversation whose prompt has `num_tokens` is to begin anew. What the system and the user have said
    stays, so that a summary must take the place of enough else; otherwise each request would need one more."""
    assert spec.turn is not None
    threshold = spec.turn.compact_threshold
    if threshold is None or num_tokens <= threshold:
        return False
    sizes = [(message["role"], sum(len(str(value)) for value in message.values())) for message in spec.messages]
    tools = () if spec.tools is None else spec.tools.definitions
    total = sum(size for _, size in sizes) + sum(len(str(tool)) for tool in tools)
    replaced = sum(size for role, size in sizes if role not in ("system", "user"))
    return num_tokens * replaced > threshold * MIN_REPLACED * total


def asked_about(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """The conversation that the messages of a request for a summary are about."""
    *earlier, last = messages
    content = str(last["content"])
    return earlier if content == REQUEST else [*earlier, {**last, "content": content.removesuffix(f"\n\n{REQUEST}")}]


def user_texts(messages: Sequence[ChatMessage]) -> list[str]:
    """What the user has said, without earlier summaries."""
    said = (_without_summaries(str(each["content"])).strip() for each in messages if each["role"] == "user")
    return [text for text in said if text]


def begun_anew(messages: Sequence[ChatMessage], summary: str) -> str:
    """The message with which a conversation begins anew: what the user has said in `messages`, the summary, and the
    question that has not been answered."""
    older = _older(messages)
    last = [str(each["content"]) for each in messages[len(older) :]]
    return "\n\n".join([*user_texts(older), f"{BEGIN}{summary.strip()}{END}", *last])


def compacted(spec: GenerationSpec, text: str, item_id: str) -> GenerationSpec:
    """A request whose conversation has begun anew with the message `text`. The system's messages stay."""
    assert spec.turn is not None
    # What the user has said is in the new message already.
    kept = [message for message in spec.messages if message["role"] == "system"]
    messages = (*kept, {"role": "user", "content": text})
    turn = replace(
        spec.turn,
        previous=None,
        num_own=len(messages) - spec.turn.num_instructions,
        compact_threshold=None,
        compaction=(item_id, content_of(text)),
    )
    return replace(spec, messages=messages, continued=(), turn=turn)


def _older(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """The messages that a summary is of: all but a question at the end."""
    is_question = len(messages) > 1 and messages[-1]["role"] == "user" and messages[-2]["role"] == "assistant"
    return messages[:-1] if is_question else messages


def _without_summaries(text: str) -> str:
    """The text outside its summaries. A beginning without an end is the user's own text.

    One pass: a client may write any number of beginnings, each of which a regular expression would follow to the end.
    """
    kept, at = [], 0
    while (begin := text.find(BEGIN, at)) >= 0 and (end := text.find(END, begin)) >= 0:
        kept.append(text[at:begin])
        at = end + len(END)
    return "".join([*kept, text[at:]])
