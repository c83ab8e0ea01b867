"""Digest of an answer over HTTP, the same for equal answers: of any API, as a whole or as server-sent events.

Left out is what differs between two equal answers: ids, times, counts of cached tokens, and the places where a stream
divides the text into events. A whole answer and a stream of the same text have different digests.
"""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, TypeAlias

import orjson

Digest: TypeAlias = dict[str, str]
"""The parts of an answer by name, each as it is if it is short, else as its length and a hash."""

LEFT = "the client left"  # reason why an answer has no digest

# Keys of an answer's JSON under which everything counts.
PARTS = frozenset(
    {
        *("content", "text", "reasoning", "reasoning_content", "refusal", "thinking", "delta", "partial_json"),
        *("name", "arguments", "input", "finish_reason", "stop_reason", "reason"),
        *("logprobs", "prompt_logprobs", "token_ids", "prompt_token_ids", "embedding", "score", "scores"),
        *("code", "param"),
    }
)
# Keys of counts that a stream may tell again and again: the last one counts.
COUNTS = frozenset({"completion_tokens", "output_tokens"})
# Keys within parts that differ between equal answers, or that a stream repeats with each event.
UNEQUAL = frozenset({"id", "type", "object", "index", "output_index", "content_index", "signature", "annotations"})
# Keys with the number of a choice, an item or a call, which tell the parts of several apart.
PLACES = ("index", "output_index", "content_index")
LONGEST_SHOWN = 32  # characters of a part that is its own digest


def digest_of(body: bytes) -> Digest:
    """The digest of a response's body."""
    parts: dict[str, list[str]] = {}
    for event in _events(body):
        _add(event, "", None, parts)
    return {name: _short("".join(values)) for name, values in sorted(parts.items())}


def name_in(body: bytes) -> str | None:
    """The first id in a response's body, by which later requests name the answer; None without one."""
    for event in _events(body):
        for holder in (event, event.get("response"), event.get("message")) if isinstance(event, dict) else ():
            if isinstance(holder, dict) and isinstance(holder.get("id"), str):
                return str(holder["id"])
    return None


def _events(body: bytes) -> Iterator[Any]:
    """The JSON values of a body: the body itself, or the data of its events."""
    if body[:1] in (b"{", b"["):
        yield orjson.loads(body)
        return
    for line in body.splitlines():
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield orjson.loads(data)


def _add(value: Any, place: str, part: str | None, parts: dict[str, list[str]]) -> None:
    """Add a value to the parts. `place` has the numbers around the value; `part` is None outside of all parts."""
    if isinstance(value, dict):
        place += "".join(f"{value[key]}." for key in PLACES if type(value.get(key)) is int)
        for key, inner in value.items():
            if key in COUNTS:
                parts[key] = [str(inner)]
            elif key not in UNEQUAL:
                _add(inner, place, key if part is not None or key in PARTS else None, parts)
    elif isinstance(value, list):
        for inner in value:
            _add(inner, place, part, parts)
    elif part is not None and value is not None:
        # Texts are joined without anything between them, because a stream divides them anywhere.
        text = value if isinstance(value, str) else f"{orjson.dumps(value).decode()},"
        parts.setdefault(f"{place}{part}", []).append(text)


def _short(text: str) -> str:
    if len(text) <= LONGEST_SHOWN:
        return text
    return f"{len(text)} characters, {blake2b(text.encode(), digest_size=8).hexdigest()}"
