"""Prompts of the last chats, by the ids of their answers: what a later prompt is compared with."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import orjson

from raydix.engine.api.responses import Json, name_in
from raydix.engine.api.spec import ChatMessage, GenerationSpec
from raydix.engine.core.divergence import (
    Divergence,
    PartKind,
    PromptPart,
    PromptRecord,
    Reason,
    divergence,
    num_common,
    num_lost,
)
from raydix.engine.core.doctor import Miss, Prompt, report
from raydix.engine.core.shares import Shares
from raydix.engine.core.tenants import Tenant

BUDGET_BYTES = 64 << 20  # memory of the records of one replica: 16 million tokens, 160 prompts of 100,000
# Anthropic's reason by the part that differs.
_ANTHROPIC = {
    PartKind.SYSTEM: "system_changed",
    PartKind.TOOL: "tools_changed",
    PartKind.MESSAGE: "messages_changed",
}
MOST_LOOKED_AT = 256  # records of a tenant among which the prompt before another is looked for
# Fields of a divergence with pieces of prompts, which are shown to their own tenant alone.
TEXTS = ("text_before", "previous_text", "text")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A prompt beside an earlier one of the same tenant. `previous` is None where it is not known any more."""

    previous_id: str
    previous: PromptRecord | None
    now: PromptRecord
    text_of: Callable[[Sequence[int]], str]
    is_named: bool
    """The client says that the prompt goes on from the earlier one; otherwise this was the nearest one."""

    def divergence(self, cached_tokens: int | None) -> Divergence | None:
        """Where and why the prompt left the earlier one, given the tokens of it that were found."""
        if self.previous is None:
            return None
        return divergence(self.previous, self.now, self.text_of, cached_tokens, goes_on=self.is_named)

    def cache_miss(self, cached_tokens: int) -> Json | None:
        """The reason in Anthropic's form, with more beside it; None for a prompt that was hit."""
        if self.previous is None:
            return {"type": "previous_message_not_found"}
        found = self.divergence(cached_tokens)
        if found is None:
            return None
        kind = _ANTHROPIC.get(found.part) if found.part is not None else None
        missed = {} if kind is None else {"cache_missed_input_tokens": self.missed_tokens(cached_tokens)}
        return {"type": kind or "unavailable", **missed, **found.as_json()}

    def missed_tokens(self, cached_tokens: int) -> int:
        """Tokens of full blocks that would have been found if the prompt had gone on from the earlier one."""
        if self.previous is None:
            return 0
        most = min(len(self.previous.token_ids), len(self.now.token_ids)) // self.now.block_size
        return max(0, most * self.now.block_size - cached_tokens)

    def explained(self, choices: Sequence[Json]) -> Json:
        """The prompt beside the earlier one, with what was lost by the decision of the first choice's last attempt."""
        attempts = cast(Sequence[Json], choices[0]["attempts"]) if choices else ()
        decision = attempts[-1] if attempts else {}
        block_size = self.now.block_size
        blocks = cast(Sequence[Mapping[str, Any]], decision.get("blocks", ()))
        cached = sum(run["count"] for run in blocks if run["hit"]) * block_size
        candidates = cast(Sequence[Mapping[str, Any]], decision.get("candidates", ()))
        worker = next((each for each in candidates if each["worker"] == decision.get("prefill_worker")), None)
        found = self.divergence(cached) if decision else self.divergence(None)
        missed = 0 if found is None or found.reason is Reason.BRANCH else self.missed_tokens(cached)
        num_computed = max(1, len(self.now.token_ids) - cached)
        return {
            "previous": self.previous_id,
            "lost_tokens": missed,
            # The predicted time of the prompt's computation, shared among its tokens.
            "lost_s": None if worker is None else round(worker["compute_s"] * min(1.0, missed / num_computed), 6),
            **({"reason": None, "token_index": None, "part": None} if found is None else found.as_json()),
        }


@dataclass(frozen=True, slots=True)
class Hints:
    """Fields of a request's body whose effect is none, or not their own."""

    ignored: tuple[str, ...] = ()
    applied: tuple[str, ...] = ()
    """Each with what it became."""


NO_HINTS = Hints()


@dataclass(slots=True)
class _Kept:
    name: str
    tenant: str
    number: int
    """Counts all records, so that a later one has a higher number."""
    session: str | None
    record: PromptRecord
    hints: Hints
    at: float
    """Time of the arrival, by the records' clock."""


class PromptRecords:
    """The records of one replica, each known to its tenant by the answer's id: clients choose ids, so two tenants may
    have the same. Where memory is short, the tenant with the most loses its oldest. `text_of` writes tokens, special
    ones by their names."""

    def __init__(
        self,
        text_of: Callable[[Sequence[int]], str],
        budget_bytes: int = BUDGET_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._text_of = text_of
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._num_added = 0
        self._num_bytes = Shares()
        # Records by tenant and id, of each tenant the oldest first; no tenant without a record.
        self._kept: dict[str, OrderedDict[str, _Kept]] = {}

    def add(self, name: str, tenant: str, session: str | None, record: PromptRecord, hints: Hints = NO_HINTS) -> None:
        """Keep the prompt of an answer's id, and what became of the request's hints."""
        if name in self._own(tenant):
            self._forget(tenant, name)
        self._num_added += 1
        kept = _Kept(name, tenant, self._num_added, session, record, hints, self._clock())
        self._kept.setdefault(tenant, OrderedDict())[name] = kept
        self._num_bytes.add(tenant, record.num_bytes)
        while self._num_bytes.total > self._budget_bytes:
            most = self._num_bytes.first_to_give()
            self._forget(most, next(iter(self._kept[most])))

    def _forget(self, tenant: str, name: str) -> None:
        own = self._kept[tenant]
        self._num_bytes.add(tenant, -own.pop(name).record.num_bytes)
        if not own:
            del self._kept[tenant]

    def _own(self, tenant: str) -> Mapping[str, _Kept]:
        return self._kept.get(tenant) or {}

    def diagnosis(self, previous_id: str, tenant: Tenant, now: PromptRecord) -> Diagnosis:
        """A prompt beside that of an earlier answer of the same tenant."""
        kept = self._own(tenant.name).get(previous_id)
        return Diagnosis(previous_id, None if kept is None else kept.record, now, self._text_of, is_named=True)

    async def explained(self, name: str, tenant: Tenant, choices: Sequence[Json]) -> Json:
        """What is known of the prompt of an answer's id beside the manager's decisions about it, for the tenant that
        asks. An administrator sees other tenants' prompts without their texts."""
        kept = self._find(name, tenant)
        if kept is None:
            return {"prefix": None, "ignored": None, "applied": None}
        # The records may change while a thread compares, so it gets a list of its own.
        later_first = reversed(self._kept[kept.tenant].values())
        earlier = [*islice((each for each in later_first if each.number < kept.number), MOST_LOOKED_AT)]
        # Prompts of 100,000 tokens that all begin alike take tens of milliseconds to compare.
        found = await asyncio.to_thread(self._before, kept, earlier)
        prefix = None if found is None else found.explained(choices)
        if prefix is not None and kept.tenant != tenant.name:
            prefix = {field: None if field in TEXTS else value for field, value in prefix.items()}
        return {"prefix": prefix, "ignored": kept.hints.ignored, "applied": kept.hints.applied}

    async def doctor(self, tenant: str, misses: Iterable[Miss]) -> Json:
        """What costs the tenant's prompts of the last hour their hits, of those that are still here. `misses`: the
        manager's decisions about the tenant's requests, the latest first."""
        by_name: dict[str, Miss] = {}
        for miss in misses:
            for name in miss.names:
                by_name.setdefault(name, miss)
        own = [Prompt(kept.name, kept.at, kept.record) for kept in self._own(tenant).values()]
        known = {each.name: found for each in own if (found := by_name.get(name_in(each.name))) is not None}
        # Decoding and comparing thousands of prompts takes a second.
        return await asyncio.to_thread(report, own, known, self._text_of, self._clock())

    def _find(self, name: str, tenant: Tenant) -> _Kept | None:
        """The record of an id that a tenant may ask for: its own, or else for an administrator the latest."""
        own = self._own(tenant.name).get(name)
        if own is not None or not tenant.is_admin:
            return own
        found = [records[name] for records in self._kept.values() if name in records]
        return max(found, key=lambda kept: kept.number, default=None)

    def _before(self, kept: _Kept, earlier: Iterable[_Kept]) -> Diagnosis | None:
        """The prompt of an answer beside the one of `earlier` (of the same tenant, the latest first) that it shares
        most KV with: before all one of the same salt, of equal ones that of its session, and the latest. Without KV to
        share, such as with the time in a prompt's first words, the one that it begins most like, if it is that prompt
        again behind the parting. None for a first prompt."""
        best: tuple[bool, int, bool] | None = None
        found: _Kept | None = None
        nearest: _Kept | None = None
        most = -1
        for other in earlier:
            is_same_salt = other.record.salt == kept.record.salt
            if best is not None and best[0] > is_same_salt:
                continue
            common = num_common(other.record.token_ids, kept.record.token_ids)
            if is_same_salt and common > most:
                nearest, most = other, common
            is_session = kept.session is not None and other.session == kept.session
            is_related = is_session or common >= kept.record.block_size
            if is_related and (best is None or (is_same_salt, common, is_session) > best):
                best, found = (is_same_salt, common, is_session), other
        if found is None and nearest is not None and num_lost(nearest.record, kept.record, most):
            found = nearest
        return (
            None if found is None else Diagnosis(found.name, found.record, kept.record, self._text_of, is_named=False)
        )

    def check_integrity(self) -> None:
        """Assert that the memory is the records' and within the budget."""
        for tenant, own in self._kept.items():
            assert self._num_bytes.used(tenant) == sum(kept.record.num_bytes for kept in own.values()) > 0
            assert [kept.number for kept in own.values()] == sorted(kept.number for kept in own.values())
        assert self._num_bytes.total == sum(map(self._num_bytes.used, self._kept)) <= self._budget_bytes


def parts_of(spec: GenerationSpec) -> tuple[PromptPart, ...]:
    """The parts of a chat's prompt."""
    tools = () if spec.tools is None else spec.tools.definitions
    return (*map(_tool, tools), *map(_part, spec.messages))


def _tool(tool: object) -> PromptPart:
    return PromptPart.of(PartKind.TOOL, _written(tool), in_order=_written(tool, orjson.OPT_SORT_KEYS))


def _part(message: ChatMessage) -> PromptPart:
    kind = PartKind.SYSTEM if message["role"] == "system" else PartKind.MESSAGE
    content, reasoning = message.get("content"), message.get("reasoning_content")
    others = {name: value for name, value in message.items() if name not in ("content", "reasoning_content", "role")}
    text = content if isinstance(content, str) else _written(content)
    in_order = None
    if others or not isinstance(content, str) or content.startswith(("{", "[")):
        in_order = f"{message['role']}\0{_in_order(content)}\0{_in_order(others) if others else ''}"
    whole = f"{message['role']}\0{text}\0{_written(others) if others else ''}"
    return PromptPart.of(kind, whole, str(reasoning or ""), in_order)


def _in_order(value: object) -> str:
    """A value, or the one in a JSON text, as a text with the keys of objects sorted."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            return str(value)
    return _written(value, orjson.OPT_SORT_KEYS)


def _written(value: object, option: int = 0) -> str:
    """A value as a text, the same for equal ones."""
    try:
        return orjson.dumps(value, default=_plain, option=option).decode()
    except TypeError:  # such as an integer of more than 64 bits in a schema
        return repr(value)


def _plain(value: object) -> object:
    """A mapping that is no dictionary, as one."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError
