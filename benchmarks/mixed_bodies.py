"""Requests of every kind whose answers are determined by their bodies, and what must be equal when one is asked again.

A body is made of its kind and a number; the same number gives the same body. Bodies with neighbouring numbers share the
beginning of their prompts, so that later ones find some of their blocks in caches.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

SHARED = 4  # bodies of a kind in a row whose prompts begin alike
TOOL = {
    "type": "function",
    "function": {
        "name": "find_river",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12}, "order": {"enum": ["length", "age"]}},
            "required": ["name", "order"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "town": {"type": "string", "maxLength": 12},
        "rank": {"type": "integer"},
        "large": {"type": "boolean"},
    },
    "required": ["town", "rank", "large"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= clause (", " clause)*\nclause ::= ("the" | "a") " " [a-z]+ " " ("is" | "has") " " [a-z]+'
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
GREEDY: dict[str, Any] = {"temperature": 0}


JSON = {"content-type": "application/json"}
# Plain English words that prompts are made of; most are one token in most vocabularies.
TEXT = """
about above across after again air almost along animal answer apple around autumn away baby back ball bank basket
beach bear beautiful because before began behind below between bird blue boat body book both bottle bottom box branch
bread bridge bright bring brother brown build busy butter cake call camp capital captain carry castle cause chair
change children choose circle city class clean clear climb clock close cloud coast cold color common complete cook
cool corner cotton count country course cover cross crowd current dance danger dark daughter decide deep desert dinner
direct distance doctor door double doubt draw dream dress drink drive early earth east easy edge electric empty energy
engine evening every exact example eye family famous farm father favor field figure fire fish floor flower follow food
forest forward fresh friend fruit garden gather general gentle glass gold grass great green ground group guide hand
happy harbor heart heavy hill history holiday honest horse hour house hundred idea island journey kitchen knife ladder
lake language large laugh leaf lesson letter level library light line listen little machine market meadow measure
method middle mile milk minute mirror money month moon morning mother mountain music narrow nation nature needle never
night noise north number ocean office orange order paint paper parent park party pencil people picture piece plain
plane plant plate pocket poem point pool position power present price problem promise proud quarter question quiet
race rain reach ready reason record region repair result river road rock room round sail salt sand school science
season second seed sentence service shape sheep shell ship shoe shore silver simple sister sky sleep small smile snow
soft soil soldier song south space spring square stand star station steel stone storm story straight street strong
student sugar summer sun surface sweet table teacher thousand thunder ticket tower town trade train travel tree
triangle valley village visit voice wagon wait walk wall warm watch water weather week west wheel white wild window
winter wire wonder wood word world yellow young
"""
WORDS = tuple(TEXT.split())


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    kind: str
    number: int
    path: str
    body: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"

    @property
    def streams(self) -> bool:
        """Whether the answer can also be streamed, and put together of chunks by `Collected`."""
        return self.path in ("/v1/completions", "/v1/chat/completions") and "prompt_logprobs" not in self.body

    def data(self, *, stream: bool = False) -> bytes:
        return json.dumps({**self.body, "stream": True} if stream else self.body).encode()


def prompt(kind: str, number: int, num_words: int) -> str:
    """Words of which all but the last quarter are those of the neighbouring numbers, too."""
    chance = random.Random(f"{kind} {number // SHARED}")
    words = [chance.choice(WORDS) for _ in range(num_words)]
    own = random.Random(f"{kind} {number}")
    return " ".join([*words[: num_words * 3 // 4], *(own.choice(WORDS) for _ in range(num_words // 4))])


def _completion(kind: str, number: int, size: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"prompt": prompt(kind, number, size), "logprobs": 2, "seed": number, "return_token_ids": True}
    return "/v1/completions", body | fields


def _chat(kind: str, number: int, size: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": prompt(kind, number, size)}]
    body = {"messages": messages, "logprobs": True, "top_logprobs": 2, "seed": number, "return_token_ids": True}
    return "/v1/chat/completions", body | fields


def _response(kind: str, number: int, size: int) -> tuple[str, dict[str, Any]]:
    include = ["message.output_text.logprobs"]
    body = {"input": prompt(kind, number, size), "include": include, "top_logprobs": 2, "store": True, **GREEDY}
    return "/v1/responses", body


def _message(kind: str, number: int, size: int) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"messages": [{"role": "user", "content": prompt(kind, number, size)}], **GREEDY}


Maker = Callable[[str, int, int], tuple[str, dict[str, Any]]]
# Kinds of bodies. All but the last generate.
KINDS: Mapping[str, Maker] = {
    "completion": lambda *of: _completion(*of, **GREEDY),
    "sampled completion": lambda *of: _completion(*of, **SAMPLED),
    "two choices": lambda *of: _completion(*of, n=2, **SAMPLED, presence_penalty=0.4),
    "prompt scores": lambda *of: _completion(*of, **GREEDY, prompt_logprobs=1),
    "penalties": lambda *of: _completion(*of, **GREEDY, repetition_penalty=1.2, frequency_penalty=0.3, min_tokens=4),
    "grammar": lambda *of: _completion(*of, **GREEDY, structured_outputs={"grammar": GRAMMAR}),
    "regex": lambda *of: _completion(*of, **SAMPLED, structured_outputs={"regex": "([a-z]{2,6} ){1,4}[0-9]{2}"}),
    "chat": lambda *of: _chat(*of, **GREEDY),
    "sampled chat": lambda *of: _chat(*of, **SAMPLED, min_p=0.02),
    "tools": lambda *of: _chat(*of, **GREEDY, tools=[TOOL], tool_choice="required"),
    "schema": lambda *of: _chat(
        *of, **GREEDY, response_format={"type": "json_schema", "json_schema": {"name": "town", "schema": SCHEMA}}
    ),
    "predicted chat": lambda *of: _chat(
        *of, **GREEDY, prediction={"type": "content", "content": prompt("prediction", of[1], 8)}
    ),
    "response": _response,
    "message": _message,
    "embedding": lambda kind, number, size: ("/v1/embeddings", {"input": prompt(kind, number, size)}),
}
GENERATED = [kind for kind in KINDS if kind != "embedding"]


def ask(kind: str, number: int, num_words: int, num_tokens: int) -> Asked:
    """The body of this kind and number, with that many words in its prompt and tokens in its answer."""
    path, body = KINDS[kind](kind, number, num_words)
    if kind != "embedding":
        body["max_output_tokens" if kind == "response" else "max_tokens"] = num_tokens
    return Asked(kind, number, path, body)


def essence(answer: Mapping[str, Any]) -> Any:
    """The part of an answer that depends on its body alone: tokens, texts, log-probabilities, vectors, reasons."""
    if "choices" in answer:
        return [_choice(choice) for choice in answer["choices"]]
    if "output" in answer:
        return [item.get("content") for item in answer["output"]], answer["status"]
    if "data" in answer:
        return [item["embedding"] for item in answer["data"]]
    return answer["content"], answer["stop_reason"]


def num_tokens(answer: Mapping[str, Any]) -> int:
    """Generated tokens of an answer."""
    usage = answer["usage"]
    return int(usage.get("completion_tokens", usage.get("output_tokens", 0)))


def _choice(choice: Mapping[str, Any]) -> tuple[Any, ...]:
    """Calls have ids of their own each time, so of a call only its name and arguments are compared."""
    message = choice.get("message", {})
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    logprobs, scores = choice.get("logprobs"), choice.get("prompt_logprobs")
    text = choice.get("text", message.get("content"))
    return choice["token_ids"], text, calls, logprobs, scores, choice["finish_reason"]


def collected(chunks: Sequence[Mapping[str, Any]]) -> Any:
    """The same of the chunks of a stream, as far as chunks have it: tokens and log-probabilities of each choice."""
    token_ids: dict[int, list[int]] = {}
    logprobs: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            token_ids.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
            if choice.get("logprobs"):
                logprobs.setdefault(choice["index"], []).extend(_listed(choice["logprobs"]))
    return [(token_ids[index], logprobs.get(index, [])) for index in sorted(token_ids)]


def as_collected(answer: Mapping[str, Any]) -> Any:
    """An answer in the form of `collected`."""
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    return [(choice["token_ids"], _listed(choice["logprobs"])) for choice in choices]


def _listed(logprobs: Mapping[str, Any]) -> list[Any]:
    """The log-probabilities of an answer, an entry for each token."""
    if "content" in logprobs:
        return list(logprobs["content"] or ())
    return list(
        zip(logprobs["tokens"], logprobs["token_logprobs"], map(_sorted, logprobs["top_logprobs"]), strict=True)
    )


def _sorted(top: Mapping[str, float] | None) -> list[tuple[str, float]]:
    return sorted((top or {}).items())


async def answered(session: aiohttp.ClientSession, url: str, data: bytes) -> dict[str, Any]:
    """POST a JSON body; returns the answer. Raises RuntimeError unless its status is 200."""
    async with session.post(url, data=data, headers=JSON) as response:
        return await json_of(response)


async def streamed(session: aiohttp.ClientSession, url: str, asked: Asked) -> list[dict[str, Any]]:
    """The chunks of an answer that is streamed. Raises RuntimeError if it fails, at once or within the stream."""
    return [chunk async for chunk in chunks_of(session, url, asked)]


async def chunks_of(session: aiohttp.ClientSession, url: str, asked: Asked) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a streamed answer as they come. Raises RuntimeError as `streamed` does."""
    async with session.post(url + asked.path, data=asked.data(stream=True), headers=JSON) as response:
        if response.status != 200:
            raise RuntimeError(f"{asked.path}: {response.status} {(await response.text())[:200]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(f"{asked.path}: a stream ended with {chunk}")
                yield chunk


async def json_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The body of a response. Raises RuntimeError unless its status is 200."""
    if response.status != 200:
        raise RuntimeError(f"{response.url.path}: {response.status} {(await response.text())[:200]}")
    answer: dict[str, Any] = await response.json()
    return answer
