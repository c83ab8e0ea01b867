"""Prompts in harmony, gpt-oss' format, as its publisher's guide and library (`openai-harmony`) write them.

A prompt is a system message of the model's own facts, a developer's message with the client's instructions and
functions, and the turns:

    <|start|>system<|message|>You are ChatGPT, ...<|end|>
    <|start|>developer<|message|># Instructions ... # Tools ...<|end|>
    <|start|>user<|message|>What time is it?<|end|>
    <|start|>assistant<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{"zone": "UTC"}<|call|>
    <|start|>functions.clock to=assistant<|channel|>commentary<|message|>12:00<|end|>
    <|start|>assistant

(without line breaks between messages). It is made here and not by the model's chat template: published templates write
calls and results in other ways than the model does, so that the next turn would share no KV behind them, take only one
call a message, and fail where a function or an argument has no description.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raydix.engine.core.errors import RequestError
from raydix.engine.core.ingress.parsers.harmony import (
    ANALYSIS,
    CALL,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    END,
    FINAL,
    MESSAGE,
    NAMESPACE,
    START,
)

Messages = Sequence[Mapping[str, Any]]
Schema = Mapping[str, Any]

# Arguments of a chat template that have a meaning here, with what is written where a request does not give them.
IDENTITY, EFFORT, DATE = "model_identity", "reasoning_effort", "conversation_start_date"
DEFAULT_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
DEFAULT_EFFORT = "medium"
KNOWLEDGE = "Knowledge cutoff: 2024-06"
CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
CALLS = "Calls to these tools must go to the commentary channel: 'functions'."
# The model knows low, medium and high; requests may name more.
EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


def render(
    messages: Messages, tools: Messages, arguments: Mapping[str, Any], *, today: str, begins_answer: bool
) -> str:
    """Return the prompt. `today` is the date in the system message, unless the arguments have one: `YYYY-MM-DD`.

    Raises `RequestError` for a result of no call, and for an argument of another kind.
    """
    first, *others = messages
    instructions = str(first["content"]) if first["role"] == "system" else ""
    turns = others if first["role"] == "system" else messages
    parts = [_message("system", _system(arguments, today, has_tools=bool(tools)))]
    if instructions or tools:
        parts.append(_message("developer", _developer(instructions, tools)))
    parts += _turns(turns)
    if begins_answer:
        parts.append(f"{START}assistant")
        # Without reasoning the answer is text for the user, unless it may be a call, which no prompt can begin with.
        if arguments.get(EFFORT) == "none" and not tools:
            parts.append(f"{CHANNEL}{FINAL}{MESSAGE}")
    return "".join(parts)


def _message(header: str, content: str, end: str = END) -> str:
    return f"{START}{header}{MESSAGE}{content}{end}"


def _assistant(channel: str, content: str, end: str = END) -> str:
    return _message(f"assistant{CHANNEL}{channel}", content, end)


def _system(arguments: Mapping[str, Any], today: str, *, has_tools: bool) -> str:
    identity, date = _text(arguments, IDENTITY, DEFAULT_IDENTITY), _text(arguments, DATE, today)
    effort = _text(arguments, EFFORT, DEFAULT_EFFORT)
    if arguments.get("builtin_tools"):
        raise RequestError(
            "'chat_template_kwargs.builtin_tools' is not supported: this server runs no tools of its own.",
            param="chat_template_kwargs.builtin_tools",
        )
    channels = f"{CHANNELS}\n{CALLS}" if has_tools else CHANNELS
    facts = f"{identity}\n{KNOWLEDGE}\nCurrent date: {date}"
    return "\n\n".join((facts, f"Reasoning: {EFFORTS.get(effort, effort)}", channels))


def _text(arguments: Mapping[str, Any], name: str, default: str) -> str:
    value = arguments.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise RequestError(f"'chat_template_kwargs.{name}' must be a string.", param=f"chat_template_kwargs.{name}")
    return value


def _developer(instructions: str, tools: Messages) -> str:
    sections = ["# Instructions", instructions] if instructions else []
    if tools:
        functions = "".join(map(_function, tools))
        sections += ["# Tools", "## functions", f"namespace functions {{\n\n{functions}}} // namespace functions"]
    return "\n\n".join(sections)


def _turns(messages: Messages) -> Iterator[str]:
    """Render the messages behind the instructions."""
    # Reasoning is kept from the last message for the user on: it leads from calls to their results' use.
    last_final = max((index for index, each in enumerate(messages) if _is_final(each)), default=-1)
    names: dict[str, str] = {}
    """Names of the functions called so far, by the calls' ids."""
    last_name = None
    for index, message in enumerate(messages):
        content = str(message["content"])
        match message["role"]:
            case "assistant":
                calls = message.get("tool_calls") or ()
                yield from _answer(message, content, calls, keeps_reasoning=index > last_final)
                for call in calls:
                    last_name = names[call["id"]] = call["function"]["name"]
            case "tool":
                name = names.get(message.get("tool_call_id", ""), message.get("name", last_name))
                if name is None:
                    raise RequestError(f"'messages' have a result of no call: {content[:40]!r}.", param="messages")
                yield _message(f"{NAMESPACE}{name} to=assistant{CHANNEL}{COMMENTARY}", content)
            case "system":
                yield _message("developer", _developer(content, ()))
            case role:
                yield _message(str(role), content)


def _is_final(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls")


def _answer(message: Mapping[str, Any], content: str, calls: Messages, *, keeps_reasoning: bool) -> Iterator[str]:
    """Render an earlier answer."""
    if not calls:
        yield _assistant(FINAL, content)
        return
    reasoning = message.get("reasoning_content")
    if reasoning and keeps_reasoning:
        yield _assistant(ANALYSIS, str(reasoning))
    if content:
        yield _assistant(COMMENTARY, content)
    for call in calls:
        function = call["function"]
        # As the model writes a call, the text of its arguments too: then these have the tokens that were generated.
        header = f"{COMMENTARY} to={NAMESPACE}{function['name']} {CONSTRAIN}json"
        arguments = function["arguments"]
        yield _assistant(header, arguments if isinstance(arguments, str) else _json(arguments), CALL)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _function(tool: Mapping[str, Any]) -> str:
    """Render a function as a type of TypeScript."""
    function = tool["function"]
    comments = _comments(function.get("description"), "")
    schema = function.get("parameters") or {}
    arguments = f"_: {_type(schema, '')}" if schema.get("properties") else ""
    return f"{comments}type {function['name']} = ({arguments}) => any;\n\n"


def _comments(text: object, indent: str) -> str:
    if not isinstance(text, str):
        return ""
    return "".join(f"{indent}// {line}\n" for line in text.splitlines())


def _type(schema: object, indent: str) -> str:
    """Render a schema as the library does: what it does not know is `any`."""
    if not isinstance(schema, Mapping):
        return "any"
    kind = schema.get("type")
    if isinstance(variants := schema.get("oneOf"), list):
        return "".join(f"\n{indent} | {_variant(each, indent, _described(each))}" for each in variants)
    if isinstance(kind, list):
        return " | ".join("number" if each == "integer" else str(each) for each in kind) or "any"
    match kind:
        case "object":
            return _object(schema, indent)
        case "array":
            return f"{_type(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
        case "string":
            values = [each for each in _listed(schema, "enum") if isinstance(each, str)]
            return " | ".join(f'"{value}"' for value in values) or "string"
        case "number" | "integer":
            return "number"
        case "boolean":
            return "boolean"
    return "any"


def _listed(schema: Schema, key: str) -> Sequence[object]:
    """The list under a key; empty for anything else, since nobody checks a schema that is only shown to the model."""
    value = schema.get(key)
    return value if isinstance(value, list) else ()


def _nullable(schema: object, indent: str) -> str:
    shown = _type(schema, indent)
    is_nullable = isinstance(schema, Mapping) and schema.get("nullable") is True and "null" not in shown
    return f"{shown} | null" if is_nullable else shown


def _object(schema: Schema, indent: str) -> str:
    comment = schema.get("description")
    opening = f"{indent}// {comment}\n" if isinstance(comment, str) else ""
    properties, required = schema.get("properties"), _listed(schema, "required")
    shown = [
        _property(f"{name}{'' if name in required else '?'}:", each if isinstance(each, Mapping) else {}, indent)
        for name, each in (properties.items() if isinstance(properties, Mapping) else ())
    ]
    return "".join([opening, "{\n", *shown, indent, "}"])


def _property(name: str, schema: Schema, indent: str) -> str:
    """Render a property, whose `name` has its colon, with the comments above it."""
    title, description, variants = schema.get("title"), schema.get("description"), schema.get("oneOf")
    default = _default(schema)
    comments = [title, ""] if isinstance(title, str) else []
    if examples := _listed(schema, "examples"):
        examples = ["Examples:", *(f'- "{each}"' for each in examples if isinstance(each, str))]
    is_described = isinstance(description, str)
    if not isinstance(variants, list):
        above = _lines([*comments, *([description] if is_described else []), *examples], indent)
        trailing = f" // {default}" if default else ""
        return f"{above}{indent}{name} {_nullable(schema, indent + '    ')},{trailing}\n"

    # The first of several types may say the same as the property: then it is written there alone.
    is_described = is_described and description != _described(variants[0] if variants else None)
    above = _lines(
        [*comments, *examples, *([description] if is_described else []), *([default] if default else [])], indent
    )
    shown = ""
    for index, variant in enumerate(variants):
        text = _described(variant)
        is_told = (index == 0 and is_described) or text == description
        shown += f"{indent} | {_variant(variant, indent, '' if is_told else text)}\n"
    return f"{above}{indent}{name}\n{shown}{indent},\n"


def _lines(comments: Sequence[object], indent: str) -> str:
    return "".join(f"{indent}// {each}\n" if each else f"{indent}//\n" for each in comments)


def _variant(schema: object, indent: str, description: str) -> str:
    """Render one of several types, with its comments behind it."""
    comments = [each for each in (description, _default(schema)) if each]
    return _nullable(schema, indent + "   ") + (f" // {' '.join(comments)}" if comments else "")


def _described(schema: object) -> str:
    text = schema.get("description") if isinstance(schema, Mapping) else None
    return text if isinstance(text, str) else ""


def _default(schema: object) -> str:
    """The comment of a default value; empty if there is none."""
    if not isinstance(schema, Mapping) or "default" not in schema:
        return ""
    value = schema["default"]
    # A word of an enumeration stands without quotation marks, any other string with them and as it is.
    if isinstance(value, str):
        return f"default: {value}" if schema.get("enum") else f'default: "{value}"'
    return f"default: {_json(value)}"
