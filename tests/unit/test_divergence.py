"""Where and why a prompt has left an earlier one: made cases, ten of each reason, and what clients are told."""

import asyncio
import json
import random
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from raydix.engine.api.anthropic.requests import parse_messages
from raydix.engine.core.divergence import PartKind, PromptPart, PromptRecord, Reason, divergence, num_common
from raydix.engine.core.tenants import EVERYONE, Tenant, Tenants, key_hash
from raydix.engine.serving.prompt_records import Hints, PromptRecords
from raydix.engine.serving.reader_work import Reading
from raydix.engine.serving.reading import Reader
from tests.unit.ingress import Replica, Served, body_of, call
from tests.unit.served_app import app
from tests.unit.test_agents import reader
from tests.unit.waits import WAIT_S

WORDS = [
    *("parser", "cache", "router", "socket", "buffer", "index", "lexer", "window"),
    *("thread", "file", "server", "prompt", "block", "token", "worker"),
]
VERBS = ["fix", "move", "read", "test", "split", "measure", "remove", "rename"]
BLOCK = 16
CASES_OF_EACH = 10


def sentence(rng: random.Random, num_words: int = 12) -> str:
    return " ".join([rng.choice(VERBS).capitalize(), "the", *(rng.choice(WORDS) for _ in range(num_words))]) + "."


DAYS, MONTHS = ["Mon", "Tuesday", "Fri"], ["Jan", "March", "Nov"]
VOLATILE: list[Callable[[random.Random], str]] = [
    lambda rng: f"Today is 2026-{rng.randrange(1, 12):02}-{rng.randrange(1, 28):02}.",
    lambda rng: f"It is {rng.randrange(24):02}:{rng.randrange(60):02}:{rng.randrange(60):02} now.",
    lambda rng: f"Date: {rng.choice(DAYS)}, {rng.randrange(1, 28)} {rng.choice(MONTHS)}, {rng.randrange(24):02}:00.",
    lambda rng: f"Request {rng.randrange(10_000)} of this session.",
    lambda rng: f"Session {rng.getrandbits(64):016x} has begun.",
    lambda rng: f"<id>{rng.getrandbits(32):08x}-{rng.getrandbits(16):04x}-4{rng.getrandbits(12):03x}</id>",
    lambda rng: f"Timestamp: {1_700_000_000 + rng.getrandbits(28)}",
]
"""Lines that are others in each request."""


def tool(rng: random.Random, number: int) -> dict[str, Any]:
    return {
        "name": f"tool_{number}",
        "description": sentence(rng),
        "input_schema": {"type": "object", "properties": {}},
    }


def chat(rng: random.Random) -> dict[str, Any]:
    """A body of `/v1/messages` with some turns."""
    messages: list[dict[str, Any]] = []
    for _ in range(rng.randrange(2, 5)):
        messages.append({"role": "user", "content": sentence(rng, 20)})
        messages.append({"role": "assistant", "content": sentence(rng, 20)})
    messages.append({"role": "user", "content": sentence(rng, 20)})
    return {
        "max_tokens": 5,
        "system": " ".join(sentence(rng) for _ in range(4)),
        "messages": messages,
        "tools": [tool(rng, number) for number in range(4)],
    }


def goes_on(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """The next turn's body."""
    body = deepcopy(body)
    body["messages"].append({"role": "assistant", "content": sentence(rng)})
    body["messages"].append({"role": "user", "content": sentence(rng)})
    return body


Pair = tuple[dict[str, Any], dict[str, Any]]


def of_system(rng: random.Random) -> Pair:
    before = chat(rng)
    now = goes_on(rng, before)
    sentences = now["system"].split(". ")
    sentences[rng.randrange(len(sentences))] = sentence(rng)
    return before, {**now, "system": ". ".join(sentences)}


def of_tools(rng: random.Random) -> Pair:
    before = chat(rng)
    now = goes_on(rng, before)
    at = rng.randrange(4)
    change: Callable[[], object] = rng.choice(
        [
            lambda: now["tools"].pop(at),
            lambda: now["tools"].insert(at, tool(rng, 9)),
            lambda: now["tools"][at].update(description=sentence(rng)),
        ]
    )
    change()
    return before, now


def of_order(rng: random.Random) -> Pair:
    before = chat(rng)
    now = goes_on(rng, before)
    while now["tools"] == before["tools"]:
        rng.shuffle(now["tools"])
    return before, now


def of_keys(rng: random.Random) -> Pair:
    """The same tools, or the same JSON as a tool's result, from another writer of JSON."""
    before = chat(rng)
    if rng.random() < 0.5:
        now = goes_on(rng, before)
        at = rng.randrange(4)
        now["tools"][at] = dict(reversed(now["tools"][at].items()))
        now["tools"][at]["input_schema"] = dict(reversed(now["tools"][at]["input_schema"].items()))
        before["tools"][at]["input_schema"]["properties"] = {"b": {"type": "string"}, "a": {"type": "integer"}}
        now["tools"][at]["input_schema"]["properties"] = {"a": {"type": "integer"}, "b": {"type": "string"}}
        return before, now
    found = {"path": sentence(rng), "lines": [{"text": sentence(rng), "number": 3}], "count": rng.randrange(9)}
    before["messages"][0]["content"] = json.dumps(found)
    now = goes_on(rng, before)
    now["messages"][0]["content"] = json.dumps(found, sort_keys=True)
    return before, now


def of_volatile(rng: random.Random) -> Pair:
    """The same words with another date, number or id in the system's message, or in an old message."""
    before = chat(rng)
    now = goes_on(rng, before)
    line = rng.choice(VOLATILE)
    texts = [line(rng), line(rng)]
    opening, is_system = sentence(rng), rng.random() < 0.5
    for body, text in zip((before, now), texts, strict=True):
        if is_system:
            body["system"] = f"{opening} {text} {body['system']}"
        else:
            body["messages"][0]["content"] += f"\n{text}\nThat is all."
    return before, now


def of_message(rng: random.Random) -> Pair:
    before = chat(rng)
    now = goes_on(rng, before)
    at = rng.randrange(len(before["messages"]))
    kind = rng.choice(["replaced", "longer", "gone"])
    if kind == "replaced":
        now["messages"][at]["content"] = sentence(rng, 20)
    elif kind == "longer":
        now["messages"][at]["content"] += " " + sentence(rng)
    else:
        del now["messages"][: 2 * (1 + at // 4)]
    return before, now


def of_branch(rng: random.Random) -> Pair:
    """A new chat beside the earlier one, whose first question is the first other text; or an old question asked in
    other words, or the last one, and perhaps an answer to it."""
    before = chat(rng)
    now = deepcopy(before)
    kind = rng.choice(["new", "longer", "earlier", "again"])
    if kind in ("new", "longer"):
        now["messages"] = chat(rng)["messages"][: 1 if kind == "new" else None]
    else:
        questions = range(0, len(now["messages"]), 2)
        at = rng.choice(questions[1:-1]) if kind == "earlier" else questions[-1]
        now["messages"] = [*now["messages"][:at], {"role": "user", "content": sentence(rng, 20)}]
    return before, now


def of_space(rng: random.Random) -> Pair:
    before = chat(rng)
    now = goes_on(rng, before)
    at = rng.randrange(len(before["messages"]))
    content = now["messages"][at]["content"]
    cut = content.index(" ", rng.randrange(len(content) // 2))
    space = rng.choice(["  ", "\n", "\t", " \n"])
    if rng.random() < 0.5:
        now["messages"][at]["content"] = content[:cut] + space + content[cut + 1 :]
    else:
        cut = now["system"].index(" ", 30)
        now["system"] = now["system"][:cut] + space + now["system"][cut + 1 :]
    return before, now


THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.reasoning_content %}<think>\n"
    "{{ message.reasoning_content }}\n</think>\n{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
LATE_THINKING = THINKING.replace("message.reasoning_content %}", "message.reasoning_content and loop.revindex < 4 %}")


def of_reasoning(rng: random.Random) -> Pair:
    """The client sends old reasoning no more, or the template leaves old reasoning out."""
    before = chat(rng)
    del before["tools"]
    thought = {"type": "thinking", "thinking": sentence(rng), "signature": ""}
    at = len(before["messages"]) - 2
    before["messages"][at]["content"] = [thought, {"type": "text", "text": before["messages"][at]["content"]}]
    now = goes_on(rng, before)
    before["template"] = now["template"] = LATE_THINKING
    if rng.random() < 0.5:
        before["template"] = now["template"] = THINKING
        now["messages"][at]["content"] = now["messages"][at]["content"][1:]
    return before, now


def of_short(rng: random.Random) -> Pair:
    body: dict[str, Any] = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    opening = "hi {{ messages[-1].content }}"
    return {**body, "template": opening}, {**body, "template": f"{opening} and more {sentence(rng)}"}


def of_equal(rng: random.Random) -> Pair:
    before = chat(rng)
    return before, goes_on(rng, before)


def of_template(rng: random.Random) -> Pair:
    before, now = of_equal(rng)
    del before["tools"], now["tools"]
    return {**before, "template": THINKING}, {
        **now,
        "template": THINKING.replace("<|im_start|>", "<|im_start|>the ", 1),
    }


MADE: dict[Reason, Callable[[random.Random], Pair]] = {
    Reason.SYSTEM_CHANGED: of_system,
    Reason.TOOLS_CHANGED: of_tools,
    Reason.TOOLS_REORDERED: of_order,
    Reason.KEYS_REORDERED: of_keys,
    Reason.VOLATILE: of_volatile,
    Reason.MESSAGE_EDITED: of_message,
    Reason.BRANCH: of_branch,
    Reason.REASONING_LEFT_OUT: of_reasoning,
    Reason.WHITE_SPACE: of_space,
    Reason.SHORTER_THAN_A_BLOCK: of_short,
    Reason.ANOTHER_SALT: of_equal,
    Reason.NOT_FOUND: of_equal,
    Reason.TEMPLATE: of_template,
}


@cache
def template_reader() -> Reader:
    """The reader of the agents' tests, which also takes clients' templates."""
    own = reader()
    return Reader(replace(own._facts, chat_templates_in_requests=True), own._tokenizer)


def record(body: dict[str, Any], salt: bytes = b"") -> PromptRecord:
    """The record of a body's prompt, with the default model's tokenizer."""
    body = dict(body)
    template = body.pop("template", None)
    spec = parse_messages(json.dumps({"max_tokens": 5, **body}).encode())
    if template is not None:
        spec = replace(spec, template=replace(spec.template, source=template))
    reading = template_reader().read(spec)
    assert reading.chat is not None
    return PromptRecord(array("I", reading.chat.token_ids), reading.parts, salt, BLOCK)


def text_of(token_ids: Sequence[int]) -> str:
    return template_reader()._tokenizer.decode(token_ids, skip_special_tokens=False)


def cases() -> Iterator[tuple[Reason, Any]]:
    for reason, made in MADE.items():
        for number in range(CASES_OF_EACH):
            before, now = made(random.Random(f"{reason}{number}"))
            salts = (b"a", b"b") if reason is Reason.ANOTHER_SALT else (b"", b"")
            cached = 0 if reason is Reason.NOT_FOUND else None
            yield reason, divergence(record(before, salts[0]), record(now, salts[1]), text_of, cached)


def test_nine_of_ten_made_cases_have_their_reason() -> None:
    right: Counter[Reason] = Counter()
    wrong = []
    for reason, found in cases():
        is_right = found is not None and found.reason is reason
        right[reason] += is_right
        if not is_right:
            wrong.append((reason, found))
    assert sum(right.values()) >= 0.9 * CASES_OF_EACH * len(MADE), wrong
    assert min(right[reason] for reason in MADE) >= 0.7 * CASES_OF_EACH, wrong


@pytest.mark.parametrize(
    ("begin", "end"), [("<think>", "</think>"), ("<|channel|>analysis<|message|>", "<|end|>")], ids=["think", "harmony"]
)
def test_reasoning_that_the_template_leaves_out_is_named(begin: str, end: str) -> None:
    template = LATE_THINKING.replace("<think>", begin).replace("</think>", end)
    before, _ = of_reasoning(random.Random(1))
    now = goes_on(random.Random(2), before)
    found = divergence(record({**before, "template": template}), record({**now, "template": template}), text_of)
    assert found is not None and found.reason is Reason.REASONING_LEFT_OUT


def test_a_prompt_that_goes_on_has_no_divergence() -> None:
    before, now = of_equal(random.Random(1))
    one, other = record(before), record(now)
    assert divergence(one, other, text_of) is None
    assert divergence(one, other, text_of, cached_tokens=len(one.token_ids)) is None
    assert divergence(other, one, text_of) is None


def test_the_place_is_the_first_other_token_with_the_texts_around_it() -> None:
    body = chat(random.Random(2))
    before = {**body, "system": "You act. Today is 2026-11-27. " + body["system"]}
    now = {**goes_on(random.Random(2), body), "system": "You act. Today is 2026-11-28. " + body["system"]}
    one, other = record(before), record(now)
    found = divergence(one, other, text_of)
    assert found is not None and (found.reason, found.part) == (Reason.VOLATILE, PartKind.SYSTEM)
    assert one.token_ids[: found.token_index] == other.token_ids[: found.token_index]
    assert one.token_ids[found.token_index] != other.token_ids[found.token_index]
    assert found.before.endswith("Today is 2026-11-2")
    assert found.previous.startswith("7. ") and found.now.startswith("8. ")


def test_a_new_question_is_a_branch_and_an_edit_is_none() -> None:
    rng = random.Random(7)
    before = chat(rng)
    [*_, last] = before["messages"]

    def reason(changed: dict[str, Any], **given: Any) -> Reason | None:
        found = divergence(record(before), record(changed), text_of, **given)
        return None if found is None else found.reason

    fresh = {**before, "messages": [{"role": "user", "content": "What is 17 + 4?"}]}
    assert reason(fresh) is Reason.BRANCH
    assert reason(fresh, goes_on=True) is Reason.MESSAGE_EDITED, "the client says that it goes on"
    # The last message, and then the conversation goes on: the edit is what cost the hit.
    edited = goes_on(rng, {**before, "messages": [*before["messages"][:-1], {**last, "content": sentence(rng, 20)}]})
    assert reason(edited) is Reason.MESSAGE_EDITED
    # A short message that comes again behind an edited one.
    short = [
        {"role": "user", "content": "First."},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "On."},
    ]
    before = {**before, "messages": short}
    assert reason({**before, "messages": [{"role": "user", "content": "Second."}, *short[1:]]}) is Reason.MESSAGE_EDITED
    # One long message that differs at its beginning alone, as of requests without a conversation.
    text = sentence(rng, 300)
    before = {**before, "messages": [{"role": "user", "content": f"For Ann: {text}"}]}
    assert reason({**before, "messages": [{"role": "user", "content": f"To Bob: {text}"}]}) is Reason.MESSAGE_EDITED


def test_reasoning_that_no_template_writes_is_not_the_reason() -> None:
    """Most templates leave old reasoning out, so that it does not matter whether a client still sends it."""
    before = chat(random.Random(3))
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    before["messages"][1]["content"] = [thought, {"type": "text", "text": before["messages"][1]["content"]}]
    now = goes_on(random.Random(3), before)
    now["messages"][1]["content"] = now["messages"][1]["content"][1:]
    assert divergence(record(before), record(now), text_of) is None
    now["messages"][2]["content"] = "Something else is wanted now, if you please."
    found = divergence(record(before), record(now), text_of)
    assert found is not None and found.reason is Reason.MESSAGE_EDITED
    assert found.as_json()["part"] == "messages[2]"


@pytest.mark.parametrize("lengths", [(0, 0), (1, 0), (5, 5), (5, 3), (3, 5)], ids=str)
def test_the_number_of_common_tokens(lengths: tuple[int, int]) -> None:
    for common in range(min(lengths) + 1):
        one, other = (
            array("I", [*range(common), *[100 + at] * (length - common)]) for at, length in enumerate(lengths)
        )
        assert num_common(one, other) == common


# What answers and `explain` say


def ask(served: Served, replica: Replica, key: str | None = None, **fields: Any) -> Any:
    headers = {} if key is None else {"x-api-key": key}
    reply = served(replica, lambda: call(app, "POST", "/v1/messages", body_of("messages", **fields), headers=headers))
    return reply if "stream" in fields else reply.json


NOT_FOUND = {"type": "previous_message_not_found"}
FIRST: dict[str, Any] = {"system": "be a brief one", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("changed", "kind", "reason"),
    [
        ({"system": "be a sweet one"}, "system_changed", "system_changed"),
        ({"messages": [{"role": "user", "content": "ho, and more than that"}]}, "messages_changed", "message_edited"),
        ({"cache_salt": "s"}, "unavailable", "another_salt"),
        ({}, "unavailable", "not_found"),  # the dispatcher of the tests finds two tokens of every prompt
    ],
    ids=str,
)
def test_an_answer_says_why_an_earlier_prompt_was_not_hit(
    served: Served, changed: dict[str, Any], kind: str, reason: str
) -> None:
    made = Replica()
    first = ask(served, made, **FIRST)
    assert "diagnostics" not in first
    fields = {**FIRST, **changed, "diagnostics": {"previous_message_id": first["id"]}}
    why = ask(served, made, **fields)["diagnostics"]["cache_miss_reason"]
    assert (why["type"], why["reason"]) == (kind, reason)
    if kind != "unavailable":
        assert why["cache_missed_input_tokens"] == 16 - 2
    stream = ask(served, made, stream=True, **fields).body
    start = json.loads(stream.split(b"event: message_start\ndata: ")[1].split(b"\n")[0])
    assert start["message"]["diagnostics"]["cache_miss_reason"] == why


def test_a_message_that_is_not_known_is_named_so(served: Served) -> None:
    answer = ask(served, Replica(), **FIRST, diagnostics={"previous_message_id": "msg_gone"})
    assert answer["diagnostics"] == {"cache_miss_reason": NOT_FOUND}
    assert "diagnostics" not in ask(served, Replica(), **FIRST, diagnostics={"previous_message_id": None})


def test_tenants_with_the_same_id_have_records_of_their_own(served: Served) -> None:
    made = Replica(tenants=Tenants([Tenant("a"), Tenant("b")], {key_hash(name): name for name in "ab"}))
    first = ask(served, made, key="a", **FIRST)
    asking = {"diagnostics": {"previous_message_id": first["id"]}}
    assert ask(served, made, key="b", **FIRST, **asking)["diagnostics"] == {"cache_miss_reason": NOT_FOUND}
    assert made.room.num_held == 0
    own = made.records.diagnosis(first["id"], Tenant("a"), record(FIRST)).previous
    made.records.add(first["id"], "b", None, record(FIRST))
    assert own and made.records.diagnosis(first["id"], Tenant("a"), record(FIRST)).previous is own
    made.records.check_integrity()


@pytest.mark.parametrize("value", [2**70, {"deep": [-(2**64)]}], ids=str)
def test_a_schema_with_a_large_number_is_served(served: Served, value: Any) -> None:
    schema = {"type": "object", "properties": {"at": {"type": "integer", "maximum": value}}}
    tools = [{"name": "look", "input_schema": schema}]
    made = Replica()
    first = ask(served, made, **FIRST, tools=tools)
    answer = ask(served, made, **FIRST, tools=tools, diagnostics={"previous_message_id": first["id"]})
    assert answer["diagnostics"]["cache_miss_reason"]["part"] is None


NOTHING = {"prefix": None, "ignored": None, "applied": None}


def test_explain_finds_the_earlier_prompt_by_itself() -> None:
    records = PromptRecords(text_of)
    before, now = of_volatile(random.Random(5))
    others = [("other", "b", now), ("far", "a", chat(random.Random(6)))]
    for name, tenant, body in [*others, ("one", "a", before), ("two", "a", now)]:
        records.add(name, tenant, None, record(body), Hints(("speed",), ("effort:limit:9",)))
    blocks = [{"source": "local", "hit": True, "count": 2}, {"source": "diverged", "hit": False, "count": 9}]
    attempt = {"blocks": blocks, "prefill_worker": "w", "candidates": [{"worker": "w", "compute_s": 2.0}]}
    own, admin = Tenant("a"), Tenant("b", is_admin=True)
    known = asyncio.run(records.explained("two", own, [{"id": "x", "attempts": [attempt]}]))
    prefix = known["prefix"]
    assert isinstance(prefix, dict) and (known["ignored"], known["applied"]) == (("speed",), ("effort:limit:9",))
    assert (prefix["previous"], prefix["reason"]) == ("one", "volatile")
    assert prefix["lost_tokens"] > 0 and 0 < prefix["lost_s"] <= 2.0
    assert asyncio.run(records.explained("two", Tenant("b"), [])) == NOTHING
    assert asyncio.run(records.explained("gone", own, [])) == NOTHING
    # An administrator sees why, and no text of another tenant.
    other = asyncio.run(records.explained("two", admin, [{"id": "x", "attempts": [attempt]}]))["prefix"]
    assert isinstance(other, dict) and prefix["text_before"]
    assert other == {**prefix, "text_before": None, "previous_text": None, "text": None}


def test_explain_compares_with_a_prompt_of_the_same_salt() -> None:
    """With a prompt of another salt no KV is shared, however much of it is the same."""
    records = PromptRecords(text_of)
    body = chat(random.Random(8))
    records.add("own", "a", None, record({**body, "messages": body["messages"][:1]}, b"one"))
    records.add("other", "a", None, record(body, b"two"))
    records.add("now", "a", None, record(goes_on(random.Random(9), body), b"one"))
    prefix = asyncio.run(records.explained("now", Tenant("a"), []))["prefix"]
    assert isinstance(prefix, dict) and prefix["previous"] == "own"


def test_explain_names_the_time_in_the_first_words_of_a_prompt() -> None:
    """It leaves no block to share; the rest of the prompt is that of the one before all the same."""
    text = " ".join(random.Random(3).choices(WORDS, k=120))
    records = PromptRecords(text_of)

    def add(name: str, system: str, salt: bytes = b"") -> None:
        records.add(name, "a", None, record({"system": system, "messages": [{"role": "user", "content": "hi"}]}, salt))

    add("salted", f"It is 14:11. {text}", b"another")
    add("elsewhere", "Nothing of this is in the prompts behind it, which begin in another way.")
    add("before", f"It is 14:10. {text}")
    add("unlike", f"Answer in French. {VERBS} " * 9)
    add("now", f"It is 14:12. {text}")
    prefix = asyncio.run(records.explained("now", Tenant("a"), []))["prefix"]
    assert isinstance(prefix, dict) and (prefix["previous"], prefix["reason"]) == ("before", "volatile")
    assert prefix["token_index"] < BLOCK
    assert asyncio.run(records.explained("unlike", Tenant("a"), []))["prefix"] is None


class Gated(array):  # type: ignore[type-arg]
    """Token ids whose comparison waits for a gate."""

    is_compared = threading.Event()
    may_go_on = threading.Event()

    def __getitem__(self, at: Any) -> Any:
        self.is_compared.set()
        assert self.may_go_on.wait(WAIT_S), "the comparison holds up the event loop"
        return super().__getitem__(at)


def test_explain_compares_beside_the_event_loop_which_keeps_other_prompts_meanwhile() -> None:
    async def run() -> dict[str, Any]:
        records = PromptRecords(text_of)
        for name in ("one", "two"):
            records.add(name, "a", None, PromptRecord(Gated("I", range(100)), (), b"", BLOCK))
        asked = asyncio.create_task(records.explained("two", Tenant("a"), []))
        await asyncio.to_thread(Gated.is_compared.wait, WAIT_S)
        records.add("three", "a", None, PromptRecord(array("I", range(100)), (), b"", BLOCK))
        Gated.may_go_on.set()
        return await asked

    prefix = asyncio.run(run())["prefix"]
    assert prefix["previous"] == "one"


class Counted(array):  # type: ignore[type-arg]
    """Token ids that count how many of them are copied to be compared."""

    num_copied = 0

    def __getitem__(self, at: Any) -> Any:
        part = super().__getitem__(at)
        Counted.num_copied += len(part) if isinstance(at, slice) else 1
        return part


@pytest.mark.parametrize(("common", "most"), [(100_000, 110_000), (10, 20_000), (50_000, 75_000)], ids=str)
def test_a_comparison_copies_little_more_than_what_is_common(common: int, most: int) -> None:
    """`explain` compares a prompt with many others."""
    one = Counted("I", range(100_000))
    other = array("I", [*range(common), *[1 << 30] * (100_000 - common)])
    Counted.num_copied = 0
    assert num_common(one, other) == common
    assert Counted.num_copied <= most


def test_the_records_keep_within_their_memory() -> None:
    records = PromptRecords(text_of, budget_bytes=10_000)
    part = PromptPart.of(PartKind.MESSAGE, "x")
    for number in range(50):
        records.add(f"m{number % 30}", "a", None, PromptRecord(array("I", range(number * 10)), (part,), b"", BLOCK))
        records.check_integrity()
    now = record(FIRST)
    assert records.diagnosis("m19", Tenant("a"), now).previous is not None
    assert records.diagnosis("m25", Tenant("a"), now).previous is None


def test_a_tenant_with_many_prompts_takes_no_memory_of_another() -> None:
    records = PromptRecords(text_of, budget_bytes=10_000)
    small = PromptRecord(array("I", range(10)), (), b"", BLOCK)
    records.add("first", "quiet", None, small)
    for number in range(50):
        records.add(f"m{number}", "busy", None, small)
        records.check_integrity()
    assert records.diagnosis("first", Tenant("quiet"), small).previous is small
    assert records.diagnosis("m1", Tenant("busy"), small).previous is None


def test_the_digests_of_a_prompt_are_made_where_it_is_read(served: Served) -> None:
    """Those of a long chat would hold up the event loop, and long chats are read beside it."""
    made, part = Replica(), PromptPart.of(PartKind.MESSAGE, "as it was read")
    read = made.reader.read

    async def with_part(*arguments: Any, **fields: Any) -> Reading:
        return replace(await read(*arguments, **fields), parts=(part,))

    made.reader.read = with_part  # type: ignore[method-assign]
    first = ask(served, made, **FIRST)
    previous = made.records.diagnosis(first["id"], EVERYONE, record(FIRST)).previous
    assert previous is not None and previous.parts == (part,)


def test_prompts_that_nobody_looks_for_are_not_recorded() -> None:
    """Lines of batches, and a conversation that begins anew before it is answered."""

    async def run() -> None:
        made = Replica(max_model_len=40_000)

        async def ignored(answer_id: str) -> object:
            return (await made.records.explained(answer_id, Tenant("a"), []))["ignored"]

        line = await made.preparation.of_line("messages", body_of("messages", **FIRST), Tenant("a"), "line")
        line.close()
        assert await ignored(line.head.id) is None
        rule = [{"type": "compaction", "compact_threshold": 1000}]
        said = [{"role": role, "content": "a word " * 200} for role in ("user", "assistant", "user")]
        body = body_of("responses", input=said, context_management=rule)
        job = await made.frontend.preparation.of_body("responses", body, Tenant("a"))
        assert job.begins_anew and await ignored(job.head.id) is None
        anew = await made.frontend.compaction.begin_anew(job)
        anew.close()
        assert await ignored(anew.head.id) is not None

    asyncio.run(run())
