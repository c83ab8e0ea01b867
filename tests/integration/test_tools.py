"""Tools with OpenAI's client, on the real model, which is small: its calls are as good as it is."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.integration.cluster import paced
from tests.integration.conftest import MODEL, Server, eventually
from tests.integration.test_faults import is_replaced, num_attempts

ZONE = {"type": "object", "properties": {"zone": {"type": "string", "maxLength": 20}}, "required": ["zone"]}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "description": "The time now.", "parameters": ZONE}}
MESSAGES: Any = [{"role": "user", "content": "What time is it in UTC? Call the clock."}]
CALLED = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'


def client_of(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=server.api_key, max_retries=0)


@pytest.fixture
def client(one_process: Server) -> OpenAI:
    return client_of(one_process)


def ask(client: OpenAI, messages: Any = MESSAGES, **fields: Any) -> Any:
    body = {"model": MODEL, "messages": messages, "tools": [CLOCK], "temperature": 0, "max_tokens": 80, **fields}
    return client.chat.completions.create(**body)


def test_a_model_that_may_call(client: OpenAI) -> None:
    """Whatever the model writes is text, or a call of JSON."""
    answer = ask(client)
    [choice] = answer.choices
    for call in choice.message.tool_calls or ():
        json.loads(call.function.arguments)
    assert (choice.finish_reason == "tool_calls") == bool(choice.message.tool_calls)
    assert answer.usage.prompt_tokens > 100, "the functions are in the prompt"
    assert ask(client, tool_choice="none").usage.prompt_tokens == answer.usage.prompt_tokens


def test_a_call_is_parsed_whole_and_streamed(client: OpenAI) -> None:
    """The model is led to write the text of a call."""
    lead = {"messages": [*MESSAGES, {"role": "user", "content": f"Repeat exactly:\n{CALLED}"}]}
    whole = ask(client, **lead, max_tokens=40).choices[0]
    functions: dict[int, list[str]] = {}
    text, finish = "", None
    for chunk in ask(client, **lead, max_tokens=40, stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for part in delta.tool_calls or ():
            if part.id:
                functions[part.index] = [part.function.name, ""]
            functions[part.index][1] += part.function.arguments or ""
        finish = chunk.choices[0].finish_reason or finish
    calls = whole.message.tool_calls or []
    assert [[call.function.name, call.function.arguments] for call in calls] == list(functions.values())
    assert (whole.message.content or "") == text and whole.finish_reason == finish


def test_results_go_on_from_the_cache(client: OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "It is 12:34 in UTC."}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    first = ask(client, messages)
    again = ask(client, messages)
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens // 16 * 16 - 16


NAMED: Any = {"type": "function", "function": {"name": "clock"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_prescribed_calls_follow_their_schema(client: OpenAI, choice: Any, stream: bool) -> None:
    """At temperature 1 the small model writes whatever the grammar leaves to it."""
    fields: dict[str, Any] = {
        "tool_choice": choice,
        "temperature": 1,
        "seed": 3,
        "max_tokens": 200,
        "stop": ["</none>"],
    }
    if stream:
        name, arguments, finish = "", "", None
        for chunk in ask(client, **fields, stream=True):
            for part in chunk.choices[0].delta.tool_calls or ():
                if part.index == 0:
                    name += part.function.name or ""
                    arguments += part.function.arguments or ""
            assert not chunk.choices[0].delta.content
            finish = chunk.choices[0].finish_reason or finish
    else:
        [answered] = ask(client, **fields).choices
        assert answered.message.content is None
        function = answered.message.tool_calls[0].function
        name, arguments, finish = function.name, function.arguments, answered.finish_reason
    assert name == "clock"
    if finish == "tool_calls":
        found = json.loads(arguments)
        assert isinstance(found["zone"], str) and len(found["zone"]) <= 20
    else:
        assert finish == "length"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_answers_with_tools_have_the_same_bits_cold_warm_and_among_others(server: Server, choice: str) -> None:
    """Token ids and log-probabilities; the others decode beside it, under grammars and without."""
    client = client_of(server)

    def answered(number: int, salt: str) -> tuple[object, ...]:
        fields: dict[str, Any] = {
            "temperature": 1,
            "seed": number,
            "max_tokens": 60,
            "logprobs": True,
            "top_logprobs": 3,
        }
        extra = {"cache_salt": salt, "return_token_ids": True}
        mode = choice if number % 2 else "auto"
        whole = ask(client, tool_choice=mode, **fields, extra_body=extra)
        [found] = whole.choices
        scores = [
            (score.logprob, [(top.token, top.logprob) for top in score.top_logprobs])
            for score in found.logprobs.content
        ]
        return found.token_ids, scores, found.finish_reason

    cold = {number: answered(number, f"{choice} alone") for number in (1, 3)}
    assert cold[1] != cold[3] and all(scores for _, scores, _ in cold.values())
    warm = {number: answered(number, f"{choice} alone") for number in cold}
    with ThreadPoolExecutor(16) as threads:
        among = dict(
            zip(range(16), threads.map(lambda number: answered(number, f"{choice} many"), range(16)), strict=True)
        )
    assert cold == warm == {number: among[number] for number in cold}


def test_a_call_goes_on_after_the_death_of_the_decode_worker(server: Server, tmp_path: Path) -> None:
    client = client_of(server)
    number = {"type": "integer", "minimum": 100_000, "maximum": 999_999}
    numbers = {"type": "array", "items": number, "minItems": 12, "maxItems": 12}
    fields_of = {"properties": {"numbers": numbers}, "required": ["numbers"], "additionalProperties": False}
    parameters = {"type": "object", **fields_of}
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    fields: dict[str, Any] = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    fields |= {"temperature": 1, "seed": 9, "max_tokens": 300}
    whole = ask(client, **fields, extra_body={"cache_salt": "reference"}).choices[0]
    [call] = whole.message.tool_calls

    worker = server.workers()["decode"]
    name, arguments, gate = "", "", tmp_path / "gate"
    with paced(server, gate):
        for chunk in ask(client, **fields, stream=True, extra_body={"cache_salt": "killed"}):
            for part in chunk.choices[0].delta.tool_calls or ():
                name += part.function.name or ""
                arguments += part.function.arguments or ""
            if len(arguments) > 20 and gate.exists():
                server.kill(worker)
                gate.unlink()
    assert (name, arguments) == ("add", call.function.arguments)
    assert len(json.loads(arguments)["numbers"]) == 12
    eventually(lambda: is_replaced(server, worker), "the decode worker is back")
    assert num_attempts(server, chunk.id) == 2, "the call was under way"


def test_at_most_one_call_and_several_choices(client: OpenAI) -> None:
    answer = ask(client, tool_choice="required", parallel_tool_calls=False, n=2, temperature=1, max_tokens=200)
    calls = [choice.message.tool_calls or [] for choice in answer.choices]
    assert [len(each) for each in calls] == [1, 1]
    assert calls[0][0].id != calls[1][0].id


def test_a_strict_function_and_a_second_turn(client: OpenAI) -> None:
    strict = {"type": "object", "properties": {"hour": {"type": "integer"}}, "required": ["hour"]}
    function = {"name": "alarm", "parameters": {**strict, "additionalProperties": False}, "strict": True}
    tools: Any = [{"type": "function", "function": function}]
    chosen: Any = {"type": "function", "function": {"name": "alarm"}}
    answer = ask(client, tools=tools, tool_choice=chosen, max_tokens=100)
    message = answer.choices[0].message
    assert set(json.loads(message.tool_calls[0].function.arguments)) == {"hour"}

    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "The alarm is set."}
    messages = [*MESSAGES, message.model_dump(exclude_none=True), result]
    second = ask(client, messages, tools=tools, tool_choice="none")
    assert second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens // 16 * 16


def test_what_is_refused(client: OpenAI) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
    ]
    for fields, param in bad:
        with pytest.raises(BadRequestError) as caught:
            ask(client, **fields)
        assert caught.value.param == param
