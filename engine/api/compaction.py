"""Compaction: a summary takes the place of a long conversation.

The prompt of the summary is the conversation's own prompt with one more message, so that its KV is that of the session.
What the client gets holds the whole message with which the conversation begins anew: the summary, and word by word what
the user has said that is not to be summarised. So whatever a client sends before it, nothing of that is read again but
the system's messages, and a client that sends it alone comes to the same prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raydix.engine.api.responses import TokenUsage
from raydix.engine.api.spec import ChatMessage, CompactionUse, GenerationSpec, PromptMark
from raydix.engine.core.answers.prompt_form import ChatEnd
from raydix.engine.core.types import Sampling

SUMMARY_TOKENS = 4096  # most tokens of a summary
BEGIN, END = "<conversation_summary>\n", "\n</conversation_summary>"  # stand around a summary in the user's message
BY_ROUTE = CompactionUse(threshold=0)  # the compaction that a client asks for by a route of its own
MIN_REPLACED = 0.5  # part of the threshold that a summary must take the place of
_CONTENTS = (
    "Name the task, what has been decided and done, files, commands, names and figures that matter, what has failed, "
    "and the next steps. Write the summary alone and call no function."
)
# The message that asks for a summary beside which the user's words stay.
REQUEST = (
    "Summarise this conversation for yourself, so that you can go on with the work when nothing but the user's own "
    f"messages and your summary is left. {_CONTENTS}"
)
# The message that asks for a summary beside which nothing stays.
REQUEST_OF_ALL = (
    "Summarise this conversation for yourself, so that you can go on with the work when nothing but your summary is "
    f"left. {_CONTENTS}"
)


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary that was made for a request."""

    unique: str
    """The part of its answer's id that no other answer has."""
    text: str | None
    """The message with which the conversation has begun anew; None: the model has written no summary."""
    usage: TokenUsage
    marks: tuple[tuple[PromptMark, int], ...] = ()
    """Marks of its prompt, each with the tokens before it."""
    ends_answer: bool = False
    """The answer ends behind the summary."""


def asking(spec: GenerationSpec, use: CompactionUse, *, leaves_question: bool = False) -> GenerationSpec:
    """The request for a summary of a conversation: the same prompt with one more message, and a plain answer.
    `leaves_question`: a question at the end that has not been answered is not summarised."""
    kept = _older(spec.messages) if leaves_question else spec.messages
    messages = [*kept]
    request = use.instructions or (REQUEST if use.keeps_words else REQUEST_OF_ALL)
    # Some chat templates refuse two messages of the user in a row.
    if messages and messages[-1]["role"] == "user":
        messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n\n{request}"}
    else:
        messages.append({"role": "user", "content": request})
    tools, turn = spec.tools, spec.turn
    if tools is not None:
        # The functions stay in the prompt, which begins with them.
        tools = replace(tools, may_call=False, is_single=False, required=(), strict=())
    if turn is not None:
        # The message that asks counts as input of the request, also where it was joined with one that came before.
        own = max(1, len(messages) - (len(spec.messages) - turn.num_own))
        turn = replace(turn, is_stored=False, num_own=own, shows_messages=False)
    return replace(
        spec,
        messages=tuple(messages),
        tools=tools,
        chat_end=ChatEnd.ANSWER,
        sampling=Sampling(max_tokens=0, temperature=spec.sampling.temperature, top_p=spec.sampling.top_p),
        grammar_param=None,
        max_tokens=SUMMARY_TOKENS,
        is_capped=True,
        stop=(),
        all_logprobs=False,
        all_prompt_logprobs=False,
        form=replace(spec.form, stream=False, return_token_ids=False),
        service=replace(spec.service, request_id=None),
        retention=replace(spec.retention, marks=tuple(mark for mark in spec.retention.marks if mark.index < len(kept))),
        previous_message=None,
        turn=turn,
        compaction=None,
    )


def is_due(spec: GenerationSpec, num_tokens: int) -> bool:
    """True if a conversation whose prompt has `num_tokens` is to begin anew. What the system has said stays, and so may
    what the user has said, so that a summary must take the place of enough else; otherwise each request would need one
    more."""
    use = spec.compaction
    # A summary cannot go on in the words that the client has begun.
    if use is None or use.threshold is None or spec.chat_end is not ChatEnd.ANSWER:
        return False
    if use.threshold == 0:
        return True
    if num_tokens <= use.threshold:
        return False
    stays = ("system", "user") if use.keeps_words else ("system",)
    sizes = [(message["role"], sum(len(str(value)) for value in message.values())) for message in spec.messages]
    tools = () if spec.tools is None else spec.tools.definitions
    total = sum(size for _, size in sizes) + sum(len(str(tool)) for tool in tools)
    replaced = sum(size for role, size in sizes[: _question_at(spec.messages)] if role not in stays)
    return num_tokens * replaced > use.threshold * MIN_REPLACED * total


def asked_about(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """The conversation that the messages of a request for a summary are about."""
    *earlier, last = messages
    content = str(last["content"])
    return earlier if content == REQUEST else [*earlier, {**last, "content": content.removesuffix(f"\n\n{REQUEST}")}]


def user_texts(messages: Sequence[ChatMessage]) -> list[str]:
    """What the user has said, without earlier summaries."""
    said = (_without_summaries(str(each["content"])).strip() for each in messages if each["role"] == "user")
    return [text for text in said if text]


def begun_anew(messages: Sequence[ChatMessage], summary: str, use: CompactionUse) -> str:
    """The message with which a conversation begins anew: what the user has said in `messages`, where it stays, the
    summary, and the question that has not been answered."""
    older = _older(messages)
    said = user_texts(older) if use.keeps_words else []
    # What the system says behind the question stays as a message of its own (`compacted`).
    last = [str(each["content"]) for each in messages[len(older) :] if each["role"] == "user"]
    return "\n\n".join([*said, f"{BEGIN}{summary.strip()}{END}", *last])


def compacted(spec: GenerationSpec, text: str) -> GenerationSpec:
    """A request whose conversation has begun anew with the message `text`. The system's messages stay."""
    places = {index: place for place, index in enumerate(_of_system(spec.messages))}
    messages = (*(spec.messages[index] for index in places), {"role": "user", "content": text})
    turn = spec.turn
    if turn is not None:
        turn = replace(turn, previous=None, num_own=len(messages) - turn.num_instructions)
    marks = [replace(mark, index=places[mark.index]) for mark in spec.retention.marks if mark.index in places]
    # The marks of what is gone ask for the prompt up to there: of that the new message is left.
    if others := [mark.ttl_s for mark in spec.retention.marks if mark.index not in places]:
        marks.append(PromptMark(len(places), len(text), max(others)))
    return replace(
        spec,
        messages=messages,
        continued=(),
        retention=replace(spec.retention, marks=tuple(marks)),
        turn=turn,
        compaction=None,
    )


def _of_system(messages: Sequence[ChatMessage]) -> list[int]:
    """Numbers of the system's messages."""
    return [index for index, message in enumerate(messages) if message["role"] == "system"]


def _older(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """The messages that a summary is of: all but a question at the end."""
    older = messages[: _question_at(messages)]
    # Where nobody has answered yet, a summary that the client asks for by name is of the question: of nothing there is
    # none.
    return messages if len(older) == 0 else older


def _question_at(messages: Sequence[ChatMessage]) -> int:
    """Number of the message with which the question at the end begins: the first behind the model's last message and
    the results of its calls. Messages of the system may stand before, between and behind what the user asks."""
    ends = (index + 1 for index, message in enumerate(messages) if message["role"] not in ("user", "system"))
    return max(ends, default=0)


def _without_summaries(text: str) -> str:
    """The text outside its summaries. A beginning without an end is the user's own text.

    One pass: a client may write any number of beginnings, each of which a regular expression would follow to the end.
    """
    kept, at = [], 0
    while (begin := text.find(BEGIN, at)) >= 0 and (end := text.find(END, begin)) >= 0:
        kept.append(text[at:begin])
        at = end + len(END)
    return "".join([*kept, text[at:]])
