"""Makes the ids of a chat's prompt from its messages, and the ids with which the next turn's prompt will begin."""

import json
import re
import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from raydix.engine.core.answers.prompt_form import MODEL_TEMPLATE, ChatEnd, ChatTemplate
from raydix.engine.core.answers.transcripts import EncodedText
from raydix.engine.core.errors import RequestError, StartupError
from raydix.engine.model.tokenizer import RenderedChat, Tokenizer
from raydix.engine.model.tool_texts import as_text

Messages = Sequence[Mapping[str, Any]]

# Text by which a chat template shows the format of its calls.
TOOL_MARKS = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3"),
    ('"parameters": ', "llama3"),
)


@dataclass(frozen=True, slots=True)
class ContinuedChat:
    """A rendered chat in which a special token stands for each answer that has ids of its own."""

    text: str
    mark: str | None
    """Text of the mark in the prompt (`RenderedChat.mark`)."""
    places: Sequence[tuple[int, int]] = ()
    """Character at which each of these special tokens begins, and the index of its message."""
    ignored: Sequence[str] = ()
    """Fields of messages that the template does not render, and that are hints."""


def render_chat(
    tokenizer: Tokenizer,
    messages: Messages,
    continued: Collection[int] = (),
    *,
    tools: Messages = (),
    template: ChatTemplate = MODEL_TEMPLATE,
    end: ChatEnd = ChatEnd.ANSWER,
    special_tokens: bool = False,
) -> ContinuedChat:
    """Render the prompt of a chat. The messages with the indices `continued` will have other ids than their text's
    (`with_answers`); a special token stands for each of these, so that the text on both sides is cut there, as during
    the answer's generation. An open end keeps the last message's text as it is, spaces at its end too.
    `special_tokens`: as `Tokenizer.render_chat`. `tools`: functions that the answer may call.

    Raises `RequestError` if the template refuses the messages, or leaves out a part of them.
    """
    ignored = _left_out(tokenizer, messages, tools, template)
    word = _Mark()
    cut = None
    if end is ChatEnd.OPEN:
        cut = word.number(len(messages))
        *before, last = messages
        messages = [*before, {**last, "content": f"{last['content']}{cut}"}]

    marked = [
        {**message, "content": word.number(index)} if index in continued else message
        for index, message in enumerate(messages)
    ]
    chat = _render(
        tokenizer, marked, tools, template, begins_answer=end is ChatEnd.ANSWER, special_tokens=special_tokens
    )
    text = _until(chat.text, cut)
    if not continued:
        return ContinuedChat(text, chat.mark, ignored=ignored)

    border = tokenizer.border_token
    if border is None:
        raise RequestError("This model's tokenizer has no special tokens: a chat cannot go on from token ids.")
    text, places = word.replace(text, border)
    times = Counter(index for _, index in places)
    for index in continued:
        if times[index] != 1:
            raise _not_rendered_once(index)

    return ContinuedChat(text, chat.mark, places, ignored)


def tokens_before(
    tokenizer: Tokenizer,
    messages: Messages,
    chat: EncodedText,
    places: Sequence[tuple[int, int]],
    *,
    tools: Messages = (),
    template: ChatTemplate = MODEL_TEMPLATE,
    end: ChatEnd = ChatEnd.ANSWER,
    special_tokens: bool = False,
) -> list[int]:
    """Return the number of tokens of `chat` before each of `places`: a message's index and the characters of its
    content before the place, in the order of the chat. `chat` is the encoded prompt of the messages.

    A place inside a token, or at spaces that the template leaves out, may count a token too many or too few; text that
    is not rendered at all counts none.
    """
    word = _Mark()
    marked = [dict(message) for message in messages]
    # From the last place on, so that a mark does not move the places before it in the same content.
    for number, (index, length) in reversed([*enumerate(places)]):
        content = str(marked[index]["content"])
        marked[index]["content"] = content[:length] + word.number(number) + content[length:]

    rendered = render_chat(tokenizer, marked, tools=tools, template=template, end=end, special_tokens=special_tokens)
    text, found = word.replace(rendered.text, "")
    characters = {number: character for character, number in found}
    counts = []
    for number in range(len(places)):
        character = characters.get(number, 0)
        # From the last border on, behind which tokens do not depend on the text before.
        start, count = max((each for each in chat.borders if each[0] <= character), default=(0, 0))
        rest = tokenizer.encode_with_borders(text[start:character], rendered.mark)
        counts.append(min(count + len(rest.token_ids), len(chat.token_ids)))
    return counts


def _until(text: str, cut: str | None) -> str:
    """The text before a mark, or all of the text without one."""
    if cut is None:
        return text
    if text.count(cut) != 1:
        raise RequestError(
            "'continue_final_message' is not supported: the chat template does not render the last message once.",
            param="continue_final_message",
        )
    return text.partition(cut)[0]


def encode_chat(tokenizer: Tokenizer, chat: ContinuedChat) -> EncodedText:
    """The token ids of a prompt. Raises `RequestError` if an answer's place in it is not where tokens begin."""
    encoded = tokenizer.encode_with_borders(chat.text, chat.mark)
    borders = {character for character, _ in encoded.borders}
    for character, index in chat.places:
        if character not in borders:
            raise _not_rendered_once(index)
    return replace(encoded, places=dict(chat.places))


def _not_rendered_once(index: int) -> RequestError:
    return RequestError(
        f"The chat template does not render the answer in 'messages[{index}]' once, as it is: leave out its 'id' and "
        "'token_ids' to have its text tokenized.",
        param=f"messages[{index}]",
    )


def next_turn(
    tokenizer: Tokenizer,
    chat: EncodedText,
    messages: Messages,
    answer: Mapping[str, Any],
    *,
    tools: Messages = (),
    template: ChatTemplate = MODEL_TEMPLATE,
    special_tokens: bool = False,
) -> list[int]:
    """Return the token ids with which the prompt of every next turn begins, if the client sends the messages of `chat`
    and the answer back; none if the ids are uncertain. After an answer with calls the result of the first one follows.

    Only text after the last special token of `chat` is tokenized, unless the template changes earlier text.
    """
    question = _Mark().number(0)
    calls = answer.get("tool_calls") or ()
    following = {"role": "tool", "tool_call_id": calls[0]["id"]} if calls else {"role": "user"}
    turns = [*messages, answer, {**following, "content": question}]
    try:
        rendered = _render(tokenizer, turns, tools, template, special_tokens=special_tokens)
    except RequestError:
        return []
    text = rendered.text.partition(question)[0]
    character, index = chat.borders[-1] if chat.borders else (0, 0)
    # A template may change earlier text with another turn, such as leave out old reasoning; then all is tokenized.
    known = chat.token_ids[:index] if text[:character] == chat.text[:character] else ()
    rest = tokenizer.encode_with_borders(text[character:] if known else text, rendered.mark)
    # Without a border behind the answer its last tokens may join with the question's first ones.
    if not rest.borders:
        return []
    _, last = rest.borders[-1]  # What follows it may become other tokens together with the question.
    return [*known, *rest.token_ids[: last + 1]]


def chat_beginning(tokenizer: Tokenizer, system: str, *, special_tokens: bool = False) -> tuple[int, ...]:
    """Return the token ids with which every chat with this system message begins, whatever the user says.

    Raises `RequestError` if the template takes no such message.
    """
    # Three users who begin differently, as a digit, a letter and a line: what is common to all does not depend on
    # the user.
    messages = [[{"role": "system", "content": system}, {"role": "user", "content": user}] for user in "1a\n"]
    chats = [tokenizer.encode_chat(chat, special_tokens=special_tokens).token_ids for chat in messages]
    same = takewhile(lambda ids: len(set(ids)) == 1, zip(*chats, strict=False))
    return tuple(ids[0] for ids in same)


def _render(
    tokenizer: Tokenizer,
    messages: Messages,
    tools: Messages,
    template: ChatTemplate,
    *,
    begins_answer: bool = True,
    special_tokens: bool = False,
) -> RenderedChat:
    """Render messages as the template can: tools, calls and results are its own matter, or plain text."""
    has_calls = tools or any(message["role"] == "tool" or "tool_calls" in message for message in messages)
    # Harmony has arguments as the text that the model wrote.
    if has_calls and not tokenizer.writes_harmony(template):
        if renders_tools(tokenizer, template):
            messages = [_with_objects(message) for message in messages]
        else:
            takes_system = bool(tools) and _takes_system(tokenizer, template)
            messages, tools = as_text(messages, tools, takes_system=takes_system), ()
    return tokenizer.render_chat(
        messages, tools=tools, template=template, begins_answer=begins_answer, special_tokens=special_tokens
    )


def renders_tools(tokenizer: Tokenizer, template: ChatTemplate = MODEL_TEMPLATE) -> bool:
    """True if the chat template renders tools, calls and their results, with all their parts."""
    mark = _Mark()
    # A word for each part that must come out, so that one rendering shows which are missing.
    numbers = iter(range(100))

    def word() -> str:
        return mark.number(next(numbers))

    properties = {word(): {"type": "string", "description": word()}}
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    tool = {"type": "function", "function": {"name": word(), "description": word(), "parameters": parameters}}
    call = {"id": "aaaaaaaaa", "type": "function", "function": {"name": word(), "arguments": {word(): word()}}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": word(), "tool_call_id": "aaaaaaaaa"},
    ]
    try:
        rendered = tokenizer.render_chat(chat, tools=[tool], template=template)
    except RequestError:
        return False
    found = {number for _, number in mark.replace(rendered.text, "")[1]}
    return found == set(range(next(numbers)))


def tool_format(tokenizer: Tokenizer, configured: str | None = None) -> str:
    """Name of the format in which the model writes calls (`raydix.engine.core.ingress.parsers`), as configured, or by
    its chat template. Raises StartupError for another one than harmony where prompts are in harmony."""
    if tokenizer.writes_harmony():
        if configured not in (None, "harmony"):
            raise StartupError(f"model.tool_parser: this model writes harmony, and no calls of the kind {configured}")
        return "harmony"
    if configured is not None:
        return configured
    if not tokenizer.has_chat_template or not renders_tools(tokenizer):
        return "hermes"  # as `tool_texts` asks for
    found = (name for mark, name in TOOL_MARKS if mark in tokenizer.chat_template)
    return next(found, "hermes")


def reasoning_format(tokenizer: Tokenizer) -> str:
    """Name of the form in which the model writes reasoning, by its chat template: `think`, `harmony` or `none`."""
    if tokenizer.writes_harmony():
        return "harmony"
    return "think" if "</think>" in tokenizer.chat_template else "none"


def _takes_system(tokenizer: Tokenizer, template: ChatTemplate) -> bool:
    content = _Mark().number(0)
    try:
        chat = [{"role": "system", "content": content}, {"role": "user", "content": "?"}]
        return content in tokenizer.render_chat(chat, template=template).text
    except RequestError:
        return False


def _with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose calls have their arguments as objects, as chat templates want them; a client's text that
    is no JSON object stays text."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _parsed(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _parsed(arguments: str) -> object:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


NAMES = "messages.name"  # the name of a speaker as one of the fields that are hints


def _left_out(tokenizer: Tokenizer, messages: Messages, tools: Messages, template: ChatTemplate) -> Sequence[str]:
    """Return `NAMES` if the template does not render the name of a message; a result's name that is its call's may be
    left out. Raises `RequestError` naming the first tool call or tool that comes out neither by the template nor as
    text."""
    mark = _Mark()
    params: list[str] = []

    def marked(param: str) -> str:
        params.append(param)
        return mark.number(len(params) - 1)

    chat: list[Mapping[str, Any]] = []
    called: dict[str, str] = {}
    """Names of the functions called so far, by the calls' ids."""
    for index, message in enumerate(messages):
        fields = dict(message)
        if "name" in message and not _is_known(message, called):
            fields["name"] = marked(NAMES)
        if "tool_calls" in message:
            param = f"messages[{index}].tool_calls"
            fields["tool_calls"] = [
                {**call, "function": {"name": marked(param), "arguments": f'{{"{marked(param)}": 1}}'}}
                for call in message["tool_calls"]
            ]
            called |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
        chat.append(fields)

    named = [
        {**tool, "function": {**tool["function"], "name": marked(f"tools[{index}].function.name")}}
        for index, tool in enumerate(tools)
    ]
    if not params:
        return ()

    rendered = {number for _, number in mark.replace(_render(tokenizer, chat, named, template).text, "")[1]}
    left_out = [param for number, param in enumerate(params) if number not in rendered]
    for param in left_out:
        if param != NAMES:
            raise RequestError(
                f"'{param}' is not supported: the chat template of this model does not render it.", param=param
            )
    return left_out[:1]


def _is_known(message: Mapping[str, Any], called: Mapping[str, str]) -> bool:
    """True if a message's name is the one of the call that the message answers."""
    return bool(message["role"] == "tool" and called.get(message.get("tool_call_id", "")) == message["name"])


class _Mark:
    """Words that no message can have, since nobody can guess them, and that no template changes."""

    def __init__(self) -> None:
        self._word = f"m{secrets.token_hex(16)}x"

    def number(self, number: int) -> str:
        return f"{self._word}{number}x"

    def replace(self, text: str, replacement: str) -> tuple[str, list[tuple[int, int]]]:
        """Replace each mark in the text; returns the text, and the replacements' positions with the numbers of their
        marks."""
        first, *others = re.split(f"{self._word}([0-9]+)x", text)
        pieces, places, length = [first], [], len(first)
        for number, piece in zip(others[::2], others[1::2], strict=True):
            places.append((length, int(number)))
            pieces += [replacement, piece]
            length += len(replacement) + len(piece)
        return "".join(pieces), places
