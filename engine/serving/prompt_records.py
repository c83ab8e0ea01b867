"""Prompts of the last chats, by the ids of their answers: what a later prompt is compared with."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import orjson

from raydix.engine.api.responses import Json
from raydix.engine.api.spec import ChatMessage, GenerationSpec
from raydix.engine.core.divergence import Divergence, Part, PartKind, PromptRecord, divergence, num_common
from raydix.engine.core.errors import RequestError
from raydix.engine.core.tenants import Tenant

BUDGET_BYTES = 64 << 20
"""Memory of the records of one replica: 16 million tokens, 160 prompts of 100,000."""
_ANTHROPIC = {
    PartKind.SYSTEM: "system_changed",
    PartKind.TOOL: "tools_changed",
    PartKind.MESSAGE: "messages_changed",
}
"""Anthropic's reason by the part that differs."""
MOST_LOOKED_AT = 256
"""Records among which the prompt before another is looked for."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A prompt beside an earlier one of the same tenant. `previous` is None where it is not known any more."""

    previous_id: str
    previous: PromptRecord | None
    now: PromptRecord
    text_of: Callable[[Sequence[int]], str]

    def divergence(self, cached_tokens: int | None) -> Divergence | None:
        """Where and why the prompt left the earlier one, given the tokens of it that were found."""
        return None if self.previous is None else divergence(self.previous, self.now, self.text_of, cached_tokens)

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
        missed = 0 if found is None else self.missed_tokens(cached)
        num_computed = max(1, len(self.now.token_ids) - cached)
        return {
            "previous": self.previous_id,
            "lost_tokens": missed,
            # The predicted time of the prompt's computation, shared among its tokens.
            "lost_s": None if worker is None else round(worker["compute_s"] * min(1.0, missed / num_computed), 6),
            **({"reason": None, "token_index": None, "part": None} if found is None else found.as_json()),
        }


@dataclass(slots=True)
class _Kept:
    tenant: str
    session: str | None
    record: PromptRecord
    ignored: tuple[str, ...]


class PromptRecords:
    """The records of one replica, the oldest forgotten first. `text_of` writes tokens, special ones by their names."""

    def __init__(self, text_of: Callable[[Sequence[int]], str], budget_bytes: int = BUDGET_BYTES) -> None:
        self._text_of = text_of
        self._budget_bytes = budget_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def add(
        self, name: str, tenant: str, session: str | None, record: PromptRecord, ignored: tuple[str, ...] = ()
    ) -> None:
        """Keep the prompt of an answer's id, and the names of the request's fields without effect."""
        if (earlier := self._kept.pop(name, None)) is not None:
            self._num_bytes -= earlier.record.num_bytes
        self._kept[name] = _Kept(tenant, session, record, ignored)
        self._num_bytes += record.num_bytes
        while self._num_bytes > self._budget_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.record.num_bytes

    def diagnosis(self, previous_id: str, tenant: Tenant, now: PromptRecord) -> Diagnosis:
        """A prompt beside that of an earlier answer. Raises RequestError for another tenant's answer."""
        kept = self._kept.get(previous_id)
        if kept is not None and kept.tenant != tenant.name:
            param = "diagnostics.previous_message_id"
            raise RequestError(f"'{param}' names a message of another tenant: '{previous_id[:100]}'.", param=param)
        return Diagnosis(previous_id, None if kept is None else kept.record, now, self._text_of)

    def explained(self, name: str, tenant: str | None, choices: Sequence[Json]) -> Json:
        """What is known of the prompt of an answer's id beside the manager's decisions about it. `tenant`: who asks;
        None for an administrator."""
        kept = self._kept.get(name)
        if kept is None or tenant not in (None, kept.tenant):
            return {"prefix": None, "ignored": None}
        found = self.before(name, tenant)
        prefix = None if found is None else found.explained(choices)
        return {"prefix": prefix, "ignored": kept.ignored}

    def before(self, name: str, tenant: str | None) -> Diagnosis | None:
        """The prompt of an answer beside the earlier one that it shares most tokens with, of the same tenant: of equal
        ones the one of its session, and the latest. None for an unknown id, and for a first prompt. `tenant`: who asks;
        None for an administrator."""
        kept = self._kept.get(name)
        if kept is None or tenant not in (None, kept.tenant):
            return None
        best: tuple[int, bool, int] | None = None
        found: tuple[str, PromptRecord] | None = None
        names = [*self._kept]
        earlier = names[: names.index(name)][-MOST_LOOKED_AT:]
        for place, each in enumerate(earlier):
            other = self._kept[each]
            if other.tenant != kept.tenant:
                continue
            is_session = kept.session is not None and other.session == kept.session
            common = num_common(other.record.token_ids, kept.record.token_ids)
            is_related = is_session or common >= kept.record.block_size
            if is_related and (best is None or (common, is_session, place) > best):
                best, found = (common, is_session, place), (each, other.record)
        return None if found is None else Diagnosis(*found, kept.record, self._text_of)

    def check_integrity(self) -> None:
        """Assert that the memory is the records' and within the budget."""
        assert self._num_bytes == sum(kept.record.num_bytes for kept in self._kept.values()) <= self._budget_bytes


def record_of(spec: GenerationSpec, prompt: Sequence[int], salt: bytes, block_size: int) -> PromptRecord:
    """The record of a chat's prompt."""
    tools = () if spec.tools is None else spec.tools.definitions
    parts = [Part.of(PartKind.TOOL, _written(tool)) for tool in tools]
    parts += map(_part, spec.messages)
    return PromptRecord(array("I", prompt), tuple(parts), salt, block_size)


def _part(message: ChatMessage) -> Part:
    kind = PartKind.SYSTEM if message["role"] == "system" else PartKind.MESSAGE
    content, reasoning = message.get("content"), message.get("reasoning_content")
    others = {name: value for name, value in message.items() if name not in ("content", "reasoning_content", "role")}
    text = content if isinstance(content, str) else _written(content)
    return Part.of(kind, f"{message['role']}\0{text}\0{_written(others) if others else ''}", str(reasoning or ""))


def _written(value: object) -> str:
    return orjson.dumps(value, default=_plain).decode()


def _plain(value: object) -> object:
    """A mapping that is no dictionary, as one."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError
