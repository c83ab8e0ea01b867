"""Answers in a prescribed form, over HTTP and the handle: valid, and the same bits whatever happens around them."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel
from ray import serve

from raydix.cli.cluster import APP_NAME
from raydix.engine.api.generate import GenerateRequest
from raydix.engine.core.types import FinishReason
from tests.integration.cluster import paced
from tests.integration.conftest import MODEL, WAIT_S, Server, eventually, random_prompt
from tests.integration.test_faults import is_replaced, num_attempts

CHAT = "/v1/chat/completions"
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"},
        "country": {"enum": ["France", "Italy"]},
        "people": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["city", "country", "people", "tags"],
    "additionalProperties": False,
}
TIGHT = {"json": PLACE, "disable_any_whitespace": True}
QUESTION = [{"role": "user", "content": "Where is the Eiffel Tower?"}]


def chat(server: Server, **fields: Any) -> dict[str, Any]:
    """The answer to the question at temperature 1."""
    body = {"messages": QUESTION, "temperature": 1, "seed": 7, "max_tokens": 200, **fields}
    status, _, data = server.request("POST", CHAT, body)
    assert status == 200, data
    answer: dict[str, Any] = json.loads(data)
    return answer


def content(answer: dict[str, Any], index: int = 0) -> str:
    text: str = answer["choices"][index]["message"]["content"]
    return text


def completion(server: Server, prompt: Any, **fields: Any) -> dict[str, Any]:
    """The first choice of a completion under the schema, with everything whose bits could differ."""
    asked = {"structured_outputs": TIGHT, "temperature": 1, "seed": 3, "max_tokens": 120, "logprobs": 3}
    choice: dict[str, Any] = server.complete(prompt, **{**asked, "ignore_eos": False, **fields})["choices"][0]
    return choice


def test_a_schema_holds_for_every_choice(one_process: Server) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}
    answer = chat(one_process, response_format=schema, structured_outputs=None, n=3)
    for index, choice in enumerate(answer["choices"]):
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(content(answer, index)), PLACE)
    tight = chat(one_process, structured_outputs=TIGHT, n=3)
    assert [choice["finish_reason"] for choice in tight["choices"]] == ["stop"] * 3
    for index in range(3):
        jsonschema.validate(json.loads(content(tight, index)), PLACE)


def test_openai_s_client_parses_an_answer(one_process: Server) -> None:
    class Verdict(BaseModel):
        is_true: bool

    client = openai.OpenAI(base_url=f"{one_process.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
    parsed = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Is water wet?"}],
        response_format=Verdict,
        temperature=0,
        max_tokens=60,
    )
    assert parsed.choices[0].finish_reason != "stop" or isinstance(parsed.choices[0].message.parsed, Verdict)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]{1,20}!"}}, r"[0-9]{3}-[a-f]{1,20}!"),
        ({"regex": "(Paris|Rome)"}, "Paris|Rome"),
        ({"structured_outputs": {"choice": ["Paris 🌊", "Rome"]}}, "Paris 🌊|Rome"),
        ({"structured_outputs": {"grammar": 'start: "The " ("tower" | "city") "."'}}, r"The (tower|city)\."),
        ({"ebnf": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"json_schema": '{"type": "boolean", "const": true}'}, r"\s*true\s*"),
    ],
    ids=str,
)
def test_other_forms(one_process: Server, fields: dict[str, Any], pattern: str) -> None:
    answer = chat(one_process, **fields)
    assert re.fullmatch(pattern, content(answer)), content(answer)
    assert answer["choices"][0]["finish_reason"] == "stop"


TAG = {
    "triggers": ["@"],
    "structures": [{"begin": "@city:", "schema": {"enum": ["Paris", "Rome"]}, "end": ";"}],
}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "structural_tag", **TAG}},
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
        {"structural_tag": json.dumps(TAG)},
    ],
    ids=["response_format", "structured_outputs", "structural_tag"],
)
def test_structural_tags_bind_behind_their_triggers(one_process: Server, fields: dict[str, Any]) -> None:
    """The trigger is made likely everywhere, so it comes wherever the form lets it."""
    _, _, data = one_process.request("POST", "/tokenize", {"prompt": "@", "add_special_tokens": False})
    [trigger] = json.loads(data)["tokens"]
    likely = {str(trigger): 100}
    assert set(content(chat(one_process, logit_bias=likely, max_tokens=8))) == {"@"}
    text = content(chat(one_process, logit_bias=likely, max_tokens=60, **fields))
    *tags, last = text.split(";")
    assert len(tags) >= 2 and all(re.fullmatch(r'@city:\s*"(Paris|Rome)"', tag) for tag in tags), text
    assert last == "" or last.startswith("@"), "cut off in a tag"


def test_the_end_comes_where_the_grammar_ends_whatever_else_is_asked(one_process: Server) -> None:
    for fields in ({"min_tokens": 50}, {"ignore_eos": True}, {"min_tokens": 50, "ignore_eos": True}):
        answer = chat(one_process, structured_outputs={"choice": ["Paris", "Rome"]}, **fields)
        assert content(answer) in ("Paris", "Rome") and answer["choices"][0]["finish_reason"] == "stop"
    cut = chat(one_process, structured_outputs=TIGHT, max_tokens=3)
    assert cut["choices"][0]["finish_reason"] == "length" and cut["usage"]["completion_tokens"] == 3
    stopped = chat(one_process, structured_outputs=TIGHT, stop=['"country"'])
    assert stopped["choices"][0]["finish_reason"] == "stop" and '"country"' not in content(stopped)


def test_a_stream_says_the_same(one_process: Server) -> None:
    whole = completion(one_process, "A place: ")
    chunks = list(
        one_process.stream(
            "A place: ",
            structured_outputs=TIGHT,
            temperature=1,
            seed=3,
            max_tokens=120,
            logprobs=3,
            ignore_eos=False,
        )
    )
    texts = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert "".join(texts) == whole["text"] and reasons == [whole["finish_reason"]] == ["stop"]


def test_equal_bits_cold_warm_and_among_others(server: Server) -> None:
    prompt = random_prompt(711, 300)
    cold = completion(server, prompt, cache_salt="cold")
    warm = completion(server, prompt, cache_salt="cold")
    jsonschema.validate(json.loads(cold["text"]), PLACE)
    others: list[dict[str, Any]] = [
        {"structured_outputs": {"regex": "[a-z]{40,60}"}},
        {"structured_outputs": None},
        {"seed": 4},
    ]
    with ThreadPoolExecutor(16) as pool:
        among = pool.submit(completion, server, prompt, cache_salt="crowd")
        crowd = [
            pool.submit(completion, server, random_prompt(800 + number, 100), **others[number % 3])
            for number in range(15)
        ]
        assert all(each.result() for each in crowd)
    for other in (warm, among.result()):
        assert other["token_ids"] == cold["token_ids"] and other["logprobs"] == cold["logprobs"]


def test_equal_bits_after_the_death_of_the_decode_worker(server: Server, tmp_path: Path) -> None:
    """Of a form that leaves a choice at each letter, and of one that forces all words but one."""
    forms = ("[a-z]{300,400}", "(red green ){60}(blue ){60}")
    prompt = random_prompt(712, 200)
    asked: list[dict[str, Any]] = [
        {"structured_outputs": {"regex": form}, "temperature": 1, "seed": 5, "max_tokens": 120, "ignore_eos": False}
        for form in forms
    ]
    expected = [server.complete(prompt, **each, cache_salt="reference")["choices"][0]["token_ids"] for each in asked]
    worker = server.workers()["decode"]
    with paced(server, tmp_path / "gate"):
        streams = [server.stream(prompt, **each, cache_salt="killed") for each in asked]
        seen = [[next(stream), next(stream)] for stream in streams]
        server.kill(worker)
    for begun, stream, tokens in zip(seen, streams, expected, strict=True):
        chunks = [*begun, *stream]
        assert [token for chunk in chunks for each in chunk["choices"] for token in each.get("token_ids", ())] == tokens
        assert num_attempts(server, chunks[0]["id"]) == 2, "the answer was under way"
    eventually(lambda: is_replaced(server, worker), "the decode worker is back")


def test_log_probabilities_are_those_before_the_grammar(one_process: Server) -> None:
    prompt = "One, two, three,"
    free = completion(one_process, prompt, structured_outputs=None, temperature=0, max_tokens=1)
    bound = completion(one_process, prompt, structured_outputs={"choice": ["zebra"]}, temperature=0, max_tokens=1)
    assert free["token_ids"] != bound["token_ids"]
    likeliest = free["logprobs"]["top_logprobs"][0]
    assert likeliest.items() <= bound["logprobs"]["top_logprobs"][0].items()
    assert bound["logprobs"]["token_logprobs"][0] < min(likeliest.values())


def test_what_cannot_be_compiled_is_refused_with_its_place(one_process: Server) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "object", "not": {}}}}
    body = {
        "messages": QUESTION,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    status, _, data = one_process.request("POST", CHAT, body)
    assert status == 400 and json.loads(data)["error"]["param"] == "response_format.json_schema.schema.properties.x"

    # Known to the model's vocabulary alone, so found by a worker.
    lark = {"messages": QUESTION, "structured_outputs": {"grammar": "start: <|nonsense|>"}}
    status, _, data = one_process.request("POST", CHAT, lark)
    assert status == 400 and "nonsense" in json.loads(data)["error"]["message"]
    assert content(chat(one_process, structured_outputs={"choice": ["fine"]})) == "fine"


def test_the_handle_takes_the_same_fields(server: Server) -> None:
    handle = serve.get_app_handle(APP_NAME)
    request = GenerateRequest(prompt="Say", regex="(yes|no)", max_tokens=20, seed=1)
    answer = handle.generate.remote(request).result(timeout_s=WAIT_S)
    assert answer.text in ("yes", "no") and answer.finish_reason is FinishReason.STOP
