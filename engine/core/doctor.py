"""Names what costs a tenant's prompts their hits: prompts of the last hour that almost match earlier ones.

Each prompt is compared with the earlier one that it shares most tokens with, by the rules of `explain`
(`raydix.engine.core.divergence`). A prompt that goes on otherwise is not at fault by itself: what counts as lost are
the tokens behind the parting that both prompts have, such as the rest of a system prompt behind a date. Nothing is done
while requests are served; a report costs its thread at most some `MOST_TOKENS` looks.
"""

from array import array
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from raydix.engine.core.divergence import Divergence, PromptRecord, Reason, divergence, num_common, num_lost

PERIOD_S = 3600.0  # age of the oldest prompts of a report
DAY_S = 86_400.0
SHORTEST_S = 60.0  # prompts of less time than this are not extrapolated to a day as if they went on so
MOST_PROMPTS = 2048
MOST_TOKENS = 1 << 22  # tokens of the prompts of a report: the latest ones
MOST_FINDINGS = 20

# Sources of missing blocks (`raydix.engine.core.manager.explain.BlockSource`) that are reasons of their own.
EVICTED, LOST, RECOMPUTED, NO_STATE = "evicted", "lost", "recomputed", "no_state"

# What to change, by reason.
ADVICE: Mapping[str, str] = MappingProxyType(
    {
        Reason.VOLATILE: "A date, a time, a counter or an id changes here: move it behind everything that stays, into "
        "the last message.",
        Reason.SYSTEM_CHANGED: "Keep the system prompt the same for all requests, and say what is new in the last "
        "message.",
        Reason.TOOLS_CHANGED: "Keep the tools the same for a whole session; name those that may be used now in the "
        "last message.",
        Reason.TOOLS_REORDERED: "Send the tools in the same order each time, such as sorted by name.",
        Reason.KEYS_REORDERED: "Write JSON with its keys in the same order each time, such as sorted.",
        Reason.MESSAGE_EDITED: "Put what differs behind what stays, and append a correction rather than change or "
        "take away an earlier message.",
        Reason.BRANCH: "Nothing needs to change: the prompt asks something else.",
        Reason.REASONING_LEFT_OUT: "Send reasoning back as it came, or choose a chat template that keeps it, if later "
        "turns are long.",
        Reason.WHITE_SPACE: "Send texts back as they came: the words are the same with other spaces.",
        Reason.SHORTER_THAN_A_BLOCK: "Nothing shorter than a block is shared.",
        Reason.ANOTHER_SALT: "Prompts of different 'cache_salt' share nothing: use one for those that may share.",
        Reason.NOT_FOUND: "The prompt has an earlier one's tokens, and their KV was not found.",
        Reason.TEMPLATE: "Use one 'chat_template', 'chat_template_kwargs' and 'tool_choice' for a whole session.",
        EVICTED: "The cache is too small for these prompts: give it more blocks, an object store or a disk, or give "
        "them a higher 'cache_priority'.",
        LOST: "The KV went with a worker that ended, by a reset or by a failure.",
    }
)


class Miss(NamedTuple):
    """What the manager has decided about a prompt."""

    names: tuple[str, ...]
    """Names of the request at its client; one of them is the end of its answer's id."""
    num_cached: int
    """Tokens of blocks that were found."""
    token_s: float
    """Predicted time of computing a token of this prompt, in seconds."""
    source: str | None
    """Source of the first block that was computed; None without such a block."""
    evicted_ago_s: float | None
    num_more_blocks: int | None
    """Room that would have kept the prompt, in blocks; None unless it was evicted."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to look at."""

    name: str
    """The answer's id."""
    at: float
    """Time of its arrival, in seconds."""
    record: PromptRecord


@dataclass(slots=True)
class Finding:
    """Prompts with the same beginning that lost tokens for the same reason."""

    reason: str
    part: str | None
    example: dict[str, object]
    """The pair that lost most so far."""
    num_prompts: int = 0
    num_lost: int = 0
    lost_s: float = 0.0
    most: int = 0
    """Tokens that the example lost."""
    evicted_ago_s: float | None = None
    num_more_blocks: int | None = None
    is_timed: bool = True
    """False if the time of some of the tokens is not known."""

    def as_json(self, observed_s: float) -> dict[str, object]:
        """The finding as the report shows it, given the time in which it was found."""
        a_day = DAY_S / observed_s
        return {
            "reason": str(self.reason),
            "part": self.part,
            "prompts": self.num_prompts,
            "lost_tokens": self.num_lost,
            "lost_s": round(self.lost_s, 6) if self.is_timed else None,
            "lost_tokens_per_day": round(self.num_lost * a_day),
            "lost_s_per_day": round(self.lost_s * a_day, 3) if self.is_timed else None,
            "advice": ADVICE[self.reason],
            "evicted_ago_s": self.evicted_ago_s,
            "more_blocks": self.num_more_blocks,
            "example": self.example,
        }


@dataclass(slots=True)
class _Doctor:
    text_of: Callable[[Sequence[int]], str]
    misses: Mapping[str, Miss]
    findings: dict[tuple[str, str | None, bytes], Finding] = field(default_factory=dict)
    seen: dict[bytes, list[Prompt]] = field(default_factory=dict)
    """Earlier prompts by salt, sorted by their tokens: a prompt shares most with one beside its place."""
    all_seen: list[Prompt] = field(default_factory=list)
    """Earlier prompts of all salts, sorted likewise."""

    def look(self, prompt: Prompt) -> None:
        """Compare a prompt with those before it."""
        own = self.seen.setdefault(prompt.record.salt, [])
        previous, common = _nearest(own, prompt)
        other, shared = _nearest(self.all_seen, prompt)
        insort(own, prompt, key=_tokens)
        insort(self.all_seen, prompt, key=_tokens)

        size = prompt.record.block_size
        if previous is not None and common >= size:
            self._compare(previous, prompt, common)
        # Of prompts with other salts only what is known to be the same from the beginning would have been found.
        elif other is not None and other.record.salt != prompt.record.salt and shared >= size:
            found = divergence(other.record, prompt.record, self.text_of)
            if found is not None:
                self._add(found.reason, found, other, prompt, shared // size * size)
        elif previous is not None:
            self._compare(previous, prompt, common)

    def _compare(self, previous: Prompt, prompt: Prompt, common: int) -> None:
        miss, size = self.misses.get(prompt.name), prompt.record.block_size
        num_full = common // size * size
        if miss is not None and miss.num_cached > num_full:
            return  # more was found than these prompts know of
        # Of a prompt that is found as a whole the last token is computed all the same, and with it a block.
        if miss is not None and miss.num_cached < num_full - size and miss.source not in (RECOMPUTED, NO_STATE):
            reason = miss.source if miss.source in (EVICTED, LOST) else Reason.NOT_FOUND
            found = Divergence(Reason.NOT_FOUND, miss.num_cached)
            self._add(reason, found, previous, prompt, num_full - miss.num_cached)
        lost = num_lost(previous.record, prompt.record, common)
        if lost:
            # What was found is known to be all that could be: only the parting is left to explain.
            parting = divergence(previous.record, prompt.record, self.text_of)
            if parting is not None:
                self._add(parting.reason, parting, previous, prompt, lost)

    def _add(self, reason: str, found: Divergence, previous: Prompt, prompt: Prompt, num_lost: int) -> None:
        size = prompt.record.block_size
        part = None if found.part is None else str(found.part)
        # One application's prompts begin alike; what begins anew in the first block has no beginning to know it by.
        beginning = prompt.record.token_ids[:size].tobytes() if found.token_index >= size else b""
        finding = self.findings.setdefault((reason, part, beginning), Finding(reason, part, {}))
        finding.num_prompts += 1
        finding.num_lost += num_lost
        miss = self.misses.get(prompt.name)
        if miss is None:
            finding.is_timed = False
        else:
            finding.lost_s += num_lost * miss.token_s
            if reason == EVICTED:
                finding.evicted_ago_s = max(finding.evicted_ago_s or 0.0, miss.evicted_ago_s or 0.0)
                finding.num_more_blocks = max(finding.num_more_blocks or 0, miss.num_more_blocks or 0)
        if num_lost > finding.most:
            finding.most = num_lost
            shown = found.as_json()
            del shown["reason"]
            finding.example = {"id": prompt.name, "previous": previous.name, "lost_tokens": num_lost, **shown}


def report(
    prompts: Sequence[Prompt], misses: Mapping[str, Miss], text_of: Callable[[Sequence[int]], str], now: float
) -> dict[str, object]:
    """What costs one tenant's prompts their hits. `prompts`: the tenant's own, oldest first, `misses`: by the answers'
    ids, `now`: in seconds of the prompts' clock."""
    looked_at = _latest(prompts, now)
    doctor = _Doctor(text_of, misses)
    for prompt in looked_at:
        doctor.look(prompt)
    observed_s = max(SHORTEST_S, now - looked_at[0].at) if looked_at else 0.0
    worst = sorted(doctor.findings.values(), key=lambda finding: -finding.num_lost)[:MOST_FINDINGS]
    known = [miss for prompt in looked_at if (miss := misses.get(prompt.name)) is not None]
    return {
        "object": "cache.doctor",
        "observed_s": round(observed_s, 3),
        "prompts": len(looked_at),
        "prompt_tokens": sum(len(prompt.record.token_ids) for prompt in looked_at),
        "cached_tokens": sum(miss.num_cached for miss in known) if known or not looked_at else None,
        "findings": [finding.as_json(observed_s) for finding in worst],
    }


def _latest(prompts: Sequence[Prompt], now: float) -> list[Prompt]:
    """The prompts of the period, oldest first; of very many the latest."""
    taken: list[Prompt] = []
    num_tokens = 0
    for prompt in reversed(prompts[-MOST_PROMPTS:]):
        num_tokens += len(prompt.record.token_ids)
        if num_tokens > MOST_TOKENS or now - prompt.at > PERIOD_S:
            break
        taken.append(prompt)
    return taken[::-1]


def _nearest(ordered: Sequence[Prompt], prompt: Prompt) -> tuple[Prompt | None, int]:
    """The one of these sorted prompts that shares most tokens with another one, and their number."""
    at = bisect_right(ordered, prompt.record.token_ids, key=_tokens)
    beside: Iterable[Prompt] = ordered[max(0, at - 1) : at + 1]
    shared = [(num_common(each.record.token_ids, prompt.record.token_ids), each.at, each) for each in beside]
    if not shared:
        return None, 0
    common, _, nearest = max(shared, key=lambda pair: pair[:2])
    return nearest, common


def _tokens(prompt: Prompt) -> "array[int]":
    return prompt.record.token_ids
