"""Sessions of coding agents, replayed in a closed loop: each call comes when the one before has ended and its recorded
pause is over.

A *slot* is an agent at work: it runs one recorded session after the other. So there are always as many sessions, and a
slow server gets fewer calls. Sub-agents run beside the call during which they began.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from benchmarks.replaying.traces import ReplayError, TraceRequest
from raydix.engine.core.types import BlockHash, FinishReason

# Reasons for the end of an answer, by their names in the trace.
STOPS = {"tool_use": FinishReason.TOOL_CALLS, "end_turn": FinishReason.STOP, "max_tokens": FinishReason.LENGTH}


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One call of a chain."""

    think_s: float
    """Pause between the end of the chain's call before and this one."""
    num_prompt_tokens: int
    num_output_tokens: int
    num_blocks: int
    num_common: int
    """Leading blocks that the prompt has in common with the chain's prompt before."""
    stop: FinishReason | None


@dataclass(frozen=True, slots=True)
class Chain:
    """The calls of an agent, or of a sub-agent."""

    calls: Sequence[AgentCall]
    children: Sequence[tuple[int, Chain]]
    """Sub-agents, each with the number of the call during which it began."""


@dataclass(frozen=True, slots=True)
class AgentTrace:
    """Recorded sessions, of the tokens per block that each of them has."""

    block_size: int
    sessions: Sequence[Chain]

    @property
    def mean_footprint(self) -> float:
        """Mean of the blocks of a prompt, over all calls of the sessions' agents."""
        sizes = [call.num_blocks for chain in self.sessions for call in chain.calls]
        return sum(sizes) / len(sizes)


def read_agents(path: Path) -> AgentTrace:
    """Read the sessions of a trace.

    Raises:
        ReplayError: the file cannot be read, or is no such trace.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        sizes = {row["block"] for row in rows}
        sessions = [_session(row["chains"]) for row in rows]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise ReplayError(f"cannot read {path.name}: {error}") from error
    if len(sizes) != 1:
        raise ReplayError(f"{path.name} has sessions of different blocks, or none")
    return AgentTrace(sizes.pop(), sessions)


def _session(rows: Sequence[dict[str, object]]) -> Chain:
    """The agent of a session, with its sub-agents."""
    [agent] = [row for row in rows if row["parent"] is None]
    return _chain(agent, rows)


def _chain(row: dict[str, object], rows: Sequence[dict[str, object]]) -> Chain:
    calls = row["calls"]
    assert isinstance(calls, list)
    children = [(int(str(each["at"])), _chain(each, rows)) for each in rows if each["parent"] == row["chain"]]
    return Chain([_call(call) for call in calls], children)


def _call(row: dict[str, object]) -> AgentCall:
    numbers = {name: float(str(row[name])) for name in ("think", "in", "out", "blocks", "lcp")}
    return AgentCall(
        think_s=max(0.0, numbers["think"]),
        num_prompt_tokens=max(1, int(numbers["in"])),
        num_output_tokens=max(1, int(numbers["out"])),
        num_blocks=int(numbers["blocks"]),
        num_common=int(numbers["lcp"]),
        stop=STOPS.get(str(row["stop"])),
    )


@dataclass(slots=True, eq=False)
class AgentStep:
    """One call on its way. Times are virtual seconds."""

    slot: int
    request: TraceRequest
    go_on: Callable[[float], None]
    """To be called with the time of the answer's end."""


Submit = Callable[[AgentStep], None]
"""Sends a step at its time, which is not in the past."""


@dataclass(slots=True, eq=False)
class Agents:
    """Slots that run the sessions of a trace."""

    trace: AgentTrace
    submit: Submit
    random: Random
    _next_session: int = 0
    _num_blocks: int = 0
    _order: list[int] = field(default_factory=list)

    def start(self, num_slots: int) -> None:
        """Have so many sessions under way, each somewhere between its first and its last call."""
        for slot in range(num_slots):
            chain = self._session()
            # From the first call on, all at once, would be a load that no hour of work has.
            first = self.random.randrange(len(chain.calls))
            self._call(slot, chain, first, (), self.random.uniform(0.0, 60.0), is_main=True)

    def _session(self) -> Chain:
        """The next session, of all in an order drawn once."""
        if not self._order:
            self._order = list(range(len(self.trace.sessions)))
            self.random.shuffle(self._order)
        return self.trace.sessions[self._order.pop()]

    def _call(
        self, slot: int, chain: Chain, number: int, before: Sequence[BlockHash], when: float, *, is_main: bool
    ) -> None:
        """Send a call of a chain. `before`: blocks of the chain's prompt before."""
        call = chain.calls[number]
        common = before[: call.num_common]
        hashes = (*common, *(self._block() for _ in range(call.num_blocks - len(common))))

        def go_on(now: float) -> None:
            if number + 1 < len(chain.calls):
                self._call(slot, chain, number + 1, hashes, now + chain.calls[number + 1].think_s, is_main=is_main)
            # A sub-agent ends with its chain; the agent begins the next session, so that their number stays.
            elif is_main:
                self._call(slot, self._session(), 0, (), now, is_main=True)

        request = TraceRequest(
            when, hashes, call.num_prompt_tokens, call.num_output_tokens, stop=call.stop, has_session=False
        )
        self.submit(AgentStep(slot, request, go_on))
        for at, child in chain.children:
            if at == number:
                self._call(slot, child, 0, (), when, is_main=False)

    def _block(self) -> BlockHash:
        self._num_blocks += 1
        return self._num_blocks.to_bytes(16, "big")
