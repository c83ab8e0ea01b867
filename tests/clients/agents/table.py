"""The figures of each agent's run, as a table of Markdown."""

import json
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.clients.agents.programs import Agent
from tests.clients.agents.relay import Exchange

HEAD = (
    "| program | version | requests | refused | turns | prompt of the last turn "
    "| least cached of the turn before | of what the turn keeps of it |\n"
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn behind the first: tokens of the prompt before, those with which this one begins alike, and cached ones."""

    before: int
    kept: int
    cached: int

    @property
    def of_before(self) -> float:
        """The cached tokens as a part of the prompt before."""
        return min(1.0, self.cached / self.before)

    @property
    def of_kept(self) -> float:
        """The cached tokens as a part of those that the prompt has in common with the one before."""
        return min(1.0, self.cached / self.kept)


def turns_of(agent: Agent, url: str, exchanges: Sequence[Exchange]) -> list[Turn]:
    """The turns of the agent's own conversation behind the first, which the server at `url` answered."""
    own = [each for each in exchanges if agent.is_turn(each)]
    turns = []
    for before, after in pairwise(own):
        length = before.usage[0]
        kept = kept_tokens(url, before.answer_id, after.answer_id, length) if agent.rewrites_end else length
        turns.append(Turn(length, kept, after.usage[1]))
    return turns


def kept_tokens(url: str, before: str, after: str, length: int) -> int:
    """Tokens with which the prompt of the answer `after` begins as that of `before` of `length` tokens does, by the
    server's explanation: all of them where it names no place at which the two part."""
    with urllib.request.urlopen(f"{url}/v1/requests/{after}/explain", timeout=30) as reply:
        explained: Any = json.load(reply)
    place = explained["prefix"]
    if place is None or place["reason"] is None:
        return length
    assert place["previous"] == before, "the prompt is compared with that of the turn before"
    return int(place["token_index"])


@dataclass(slots=True)
class AgentsTable:
    """Rows of agents in the order of their runs."""

    rows: list[str] = field(default_factory=list)

    def add(self, agent: Agent, exchanges: Sequence[Exchange], turns: Sequence[Turn]) -> None:
        own = [each for each in exchanges if agent.is_turn(each)]
        refused = sum(each.is_refused for each in exchanges)
        last = f"{own[-1].usage[0]:,} tokens" if own else ""
        shares = [min(turn.of_before for turn in turns), min(turn.of_kept for turn in turns)] if turns else []
        figures = [agent.name, agent.version, len(exchanges), refused, len(own), last]
        self.rows.append(f"| {' | '.join([*map(str, figures), *(f'{share:.1%}' for share in shares)])} |\n")

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{HEAD}|{'---|' * (HEAD.count('|') - 1)}\n{''.join(self.rows)}")
