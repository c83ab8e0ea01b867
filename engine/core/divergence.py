"""Finds where a prompt has left an earlier one, and says why by rule.

Two prompts of one client are compared by their tokens, as the cache does, and by the parts that they were made of. Of
the texts nothing is kept but tokens, so that a record of a prompt is small; a part is known by a digest. The rules look
at some words around the first other token, and never guess: where none fits, the part that differs is named.
"""

import re
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

WINDOW = 64  # tokens behind the first other one that the rules look at
SHOWN = 160  # characters of a text that is shown
SLACK = 24  # characters at the end of a window that are not compared: another token may have cut them otherwise
DIGEST_BYTES = 8
COMPARED_AT_ONCE = 4096  # tokens


class PartKind(StrEnum):
    """Where in a request a part of the prompt stands."""

    TOOL = "tools"
    SYSTEM = "system"
    MESSAGE = "messages"


class Reason(StrEnum):
    """Why a prompt did not hit all of an earlier one."""

    SYSTEM_CHANGED = "system_changed"
    TOOLS_CHANGED = "tools_changed"
    TOOLS_REORDERED = "tools_reordered"
    KEYS_REORDERED = "keys_reordered"
    """The same JSON, with the keys of objects in another order."""
    VOLATILE = "volatile"
    """A date, a time, a counter or an id differs, and nothing else around it."""
    MESSAGE_EDITED = "message_edited"
    REASONING_LEFT_OUT = "reasoning_left_out"
    WHITE_SPACE = "white_space"
    SHORTER_THAN_A_BLOCK = "shorter_than_a_block"
    ANOTHER_SALT = "another_salt"
    NOT_FOUND = "not_found"
    """The prompts agree, and the KV was not found: it may be evicted or lost, or computing it was quicker."""
    TEMPLATE = "template"
    """All parts are the same, and the chat template has written them otherwise."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of a prompt, by digests."""

    kind: PartKind
    digest: bytes
    """Digest of everything, reasoning too."""
    plain: bytes
    """Digest of everything but reasoning."""
    unordered: bytes
    """As `plain`, with the keys of JSON objects sorted."""

    @classmethod
    def of(cls, kind: PartKind, text: str, reasoning: str = "", in_order: str | None = None) -> "PromptPart":
        """Make the part with this text, and with this reasoning beside the text. `in_order`: the text with the keys of
        JSON objects sorted, where this is another text."""
        hashed = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES)
        # Mostly one digest, which is kept once.
        plain = whole = unordered = hashed.digest()
        if reasoning:
            hashed.update(b"\0" + reasoning.encode("utf-8", "surrogatepass"))
            whole = hashed.digest()
        if in_order is not None and in_order != text:
            unordered = blake2b(in_order.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()
        return cls(kind, whole, plain, unordered)


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """What is kept of a prompt."""

    token_ids: "array[int]"
    parts: tuple[PromptPart, ...]
    salt: bytes
    """The private salt: no KV is shared between two of them."""
    block_size: int

    @property
    def num_bytes(self) -> int:
        """Memory, roughly."""
        return 4 * len(self.token_ids) + 200 * len(self.parts) + 500


@dataclass(frozen=True, slots=True)
class Divergence:
    """The place where a prompt has left an earlier one. Texts are of the one client that sent both."""

    reason: Reason
    token_index: int
    """Number of the first token that differs."""
    part: PartKind | None = None
    """Kind of the first part that differs; None where all parts are the same."""
    part_index: int | None = None
    """Number of that part among the parts of its kind."""
    before: str = ""
    """Text of both prompts before the place."""
    previous: str = ""
    """How the earlier prompt goes on."""
    now: str = ""

    def as_json(self) -> dict[str, object]:
        """The divergence as answers and `explain` show it."""
        part = None if self.part is None else str(self.part)
        if part is not None and self.part is not PartKind.SYSTEM:
            part = f"{part}[{self.part_index}]"
        return {
            "reason": str(self.reason),
            "token_index": self.token_index,
            "part": part,
            "text_before": self.before,
            "previous_text": self.previous,
            "text": self.now,
        }


def num_common(one: "array[int]", other: "array[int]") -> int:
    """Number of tokens with which both sequences begin."""
    most = min(len(one), len(other))
    # Slices are compared without a loop here, and nothing is compared behind the first slice that differs.
    step = COMPARED_AT_ONCE
    start = next((at for at in range(0, most, step) if one[at : at + step] != other[at : at + step]), most)
    ends = range(start + 1, min(most, start + step) + 1)
    return start + bisect_left(ends, 1, key=lambda end: one[start:end] != other[start:end])


def divergence(
    previous: PromptRecord,
    now: PromptRecord,
    text_of: Callable[[Sequence[int]], str],
    cached_tokens: int | None = None,
) -> Divergence | None:
    """Where and why `now` did not hit all of `previous`; None where it did. `cached_tokens`: those of `now` that were
    found, None if that is not known."""
    if previous.salt != now.salt:
        return Divergence(Reason.ANOTHER_SALT, 0)
    common = num_common(previous.token_ids, now.token_ids)
    if common == min(len(previous.token_ids), len(now.token_ids)):
        return _of_equal(common, now.block_size, cached_tokens)

    before = text_of(previous.token_ids[max(0, common - WINDOW) : common])
    texts = [text_of(each.token_ids[common : common + WINDOW]) for each in (previous, now)]
    at = _first_other(previous, now, texts)
    part = None if at is None else (now.parts[at] if at < len(now.parts) else previous.parts[at])
    index = None if part is None or at is None else sum(each.kind is part.kind for each in now.parts[:at])
    return Divergence(
        reason=_reason(previous, now, at, before, *texts),
        token_index=common,
        part=None if part is None else part.kind,
        part_index=index,
        before=before[-SHOWN:],
        previous=texts[0][:SHOWN],
        now=texts[1][:SHOWN],
    )


def _first_other(previous: PromptRecord, now: PromptRecord, texts: Sequence[str]) -> int | None:
    """Index of the first part that explains another token; None if all parts are the same. Reasoning that one of the
    requests lacks counts only where it was written into the prompt: most templates leave old reasoning out anyway."""
    pairs = [*zip(previous.parts, now.parts, strict=False)]
    plain = next((index for index, (was, is_) in enumerate(pairs) if was.plain != is_.plain), None)
    if plain is None and len(previous.parts) > len(now.parts):
        plain = len(now.parts)  # messages at the end were taken back
    whole = next((index for index, (was, is_) in enumerate(pairs) if was.digest != is_.digest), None)
    is_written = plain is None or _has_reasoning(texts[0]) != _has_reasoning(texts[1])
    return whole if whole is not None and is_written else plain


def _of_equal(common: int, block_size: int, cached_tokens: int | None) -> Divergence | None:
    """The divergence of prompts of which one begins with the other, in `common` tokens."""
    num_full = common // block_size * block_size
    if not num_full:
        return Divergence(Reason.SHORTER_THAN_A_BLOCK, common)
    # Of a prompt that is found as a whole the last token is computed all the same.
    if cached_tokens is not None and cached_tokens < num_full - block_size:
        return Divergence(Reason.NOT_FOUND, cached_tokens)
    return None


def _reason(previous: PromptRecord, now: PromptRecord, at: int | None, before: str, was: str, is_: str) -> Reason:
    """The reason, given the first other part and the texts before and behind the first other token."""
    tools = [[part.digest for part in each.parts if part.kind is PartKind.TOOL] for each in (previous, now)]
    if tools[0] != tools[1]:
        alike = [[part.unordered for part in each.parts if part.kind is PartKind.TOOL] for each in (previous, now)]
        if alike[0] == alike[1]:
            return Reason.KEYS_REORDERED
        if Counter(alike[0]) == Counter(alike[1]):
            return Reason.TOOLS_REORDERED
    if at is None:
        return Reason.REASONING_LEFT_OUT if _has_reasoning(was) != _has_reasoning(is_) else Reason.TEMPLATE
    first = [each.parts[at] if at < len(each.parts) else None for each in (previous, now)]
    # A number may have begun before the first other token.
    opening = re.split(r"(?<=[\s\"'(=])", before)[-1]
    if _are_equal(_without_space(opening + was), _without_space(opening + is_)):
        return Reason.WHITE_SPACE
    if first[0] is not None and first[1] is not None and _is_reordered(first[0], first[1]):
        return Reason.KEYS_REORDERED
    if _are_equal(_without_volatile(opening + was), _without_volatile(opening + is_)):
        return Reason.VOLATILE
    if tools[0] != tools[1]:
        return Reason.TOOLS_CHANGED
    if first[0] is not None and first[1] is not None and first[0].plain == first[1].plain:
        return Reason.REASONING_LEFT_OUT
    is_system = any(part is not None and part.kind is PartKind.SYSTEM for part in first)
    return Reason.SYSTEM_CHANGED if is_system else Reason.MESSAGE_EDITED


def _is_reordered(one: PromptPart, other: PromptPart) -> bool:
    """True for parts that differ in the order of JSON keys alone."""
    return one.plain != other.plain and (one.kind, one.unordered) == (other.kind, other.unordered)


def _has_reasoning(text: str) -> bool:
    return "<think" in text or "</think" in text


def _are_equal(one: str, other: str) -> bool:
    """True if two texts are equal as far as both go."""
    most = min(len(one), len(other))
    # A short rest of a prompt is compared to its end.
    most = max(most - SLACK, min(most, SLACK))
    return bool(most) and one[:most] == other[:most]


def _without_space(text: str) -> str:
    return re.sub(r"\s+", "", text)


_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_DAY = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?"
_VOLATILE = re.compile(
    rf"\b{_MONTH}\b\.?|\b{_DAY}\b,?|\b[ap]\.?m\b\.?"
    # Ids: of hexadecimal digits, or of letters with digits among them.
    r"|\b(?=[0-9a-z_-]*\d)[0-9a-z]+(?:[_-][0-9a-z]+)*\b"
    r"|\d+",
    re.IGNORECASE,
)


def _without_volatile(text: str) -> str:
    """The text without dates, times, numbers and ids."""
    return re.sub(r"#[#:.,/+TZ-]*", "#", _VOLATILE.sub("#", text))
