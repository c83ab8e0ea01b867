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
RUN = 24  # tokens in a row that two texts have in common by more than a chat template and the frame of tools in JSON
LEAST_LOST = 48  # tokens behind a parting below which nothing is said of it
# Share of the shorter rest behind a parting below which two prompts are not taken for almost the same.
LEAST_SHARE = 0.4
SEED = 8  # tokens in a row by which a run is found


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
    BRANCH = "branch"
    """Another conversation with the same beginning, or another question in the same one: nothing was lost."""
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


def num_lost(previous: PromptRecord, now: PromptRecord, common: int) -> int:
    """Number of tokens behind the first `common` ones that both prompts have; 0 where they are so few that the prompt
    asks something else: other prompts with the same instructions somewhere behind do not almost match."""
    rests = previous.token_ids[common:], now.token_ids[common:]
    again = num_again(*rests)
    return again if again >= max(now.block_size, LEAST_LOST, LEAST_SHARE * min(map(len, rests))) else 0


def num_again(previous: "array[int]", now: "array[int]") -> int:
    """Number of tokens of `previous` that lie in runs of at least `RUN` which are also in `now`, wherever. Each run of
    `RUN + SEED` is found, and of shorter ones some are not; of a text that `previous` repeats, the first."""
    there: dict[bytes, int] = {}
    for start in range(0, len(previous) - SEED + 1, SEED):
        there.setdefault(previous[start : start + SEED].tobytes(), start)
    is_found = bytearray(len(previous))
    counted = at = 0
    while at <= len(now) - SEED:
        seed = there.get(now[at : at + SEED].tobytes())
        if seed is None:
            at += 1
            continue
        begin, before = at, seed
        while begin > counted and before > 0 and now[begin - 1] == previous[before - 1]:
            begin, before = begin - 1, before - 1
        end = at + num_common(previous[seed:], now[at:])
        # Shorter runs are the frame that templates and JSON put around any text. A longer frame, as of tools, repeats
        # itself, and counts once.
        if end - begin >= RUN:
            is_found[before : before + end - begin] = b"\1" * (end - begin)
            counted = end
        at = end
    return sum(is_found)


def divergence(
    previous: PromptRecord,
    now: PromptRecord,
    text_of: Callable[[Sequence[int]], str],
    cached_tokens: int | None = None,
    *,
    goes_on: bool = False,
) -> Divergence | None:
    """Where and why `now` did not hit all of `previous`; None where it did. `cached_tokens`: those of `now` that were
    found, None if that is not known. `goes_on`: the client says that `now` goes on from `previous`; without, it may be
    a branch."""
    if previous.salt != now.salt:
        return Divergence(Reason.ANOTHER_SALT, 0)
    common = num_common(previous.token_ids, now.token_ids)
    if common == min(len(previous.token_ids), len(now.token_ids)):
        return _of_equal(common, now.block_size, cached_tokens)

    before = text_of(previous.token_ids[max(0, common - WINDOW) : common])
    texts = [text_of(each.token_ids[common : common + WINDOW]) for each in (previous, now)]
    at = _first_other(previous, now, texts)
    part = None if at is None else (now.parts[at] if at < len(now.parts) else previous.parts[at])
    is_branch = at is not None and not goes_on and _is_branch(previous, now, at, common)
    index = None if part is None or at is None else sum(each.kind is part.kind for each in now.parts[:at])
    return Divergence(
        reason=Reason.BRANCH if is_branch else _reason(previous, now, at, before, *texts),
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


def _is_branch(previous: PromptRecord, now: PromptRecord, at: int, common: int) -> bool:
    """True if a prompt that parts from an earlier one in the part `at`, behind `common` tokens, has nothing behind it
    that the earlier one has, too: another conversation, or another question at the same place."""
    rests = previous.parts[at:], now.parts[at:]
    if any(part.kind is not PartKind.MESSAGE for rest in rests for part in rest):
        return False
    # The last message of the earlier prompt was changed, and then the conversation went on.
    if len(rests[0]) == 1 < len(rests[1]):
        return False
    # A short message that is in both says as much as a long one that is in both with some other words.
    is_there = not {part.plain for part in rests[0]}.isdisjoint(part.plain for part in rests[1])
    return not is_there and not num_lost(previous, now, common)


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
    return any(mark in text for mark in ("<think", "</think", "<|channel|>analysis"))


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
