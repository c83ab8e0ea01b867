"""The figures of each agent's run, as a table of Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tests.clients.agents.relay import Exchange

HEAD = (
    "| program | version | requests | refused | turns | prompt of the last turn | least cached of the turn before |\n"
)


def turns_of(exchanges: Sequence[Exchange]) -> list[tuple[int, int]]:
    """Prompt and cached tokens of each turn of the agent's own conversation."""
    return [each.usage for each in exchanges if each.status == 200 and each.has_tools and each.usage[0]]


def shares_of(turns: Sequence[tuple[int, int]]) -> list[float]:
    """Of each turn but the first the cached tokens, as a part of the prompt of the turn before."""
    return [min(1.0, cached / before) for (before, _), (_, cached) in pairwise(turns)]


@dataclass(slots=True)
class AgentsTable:
    """Rows of agents in the order of their runs."""

    rows: list[str] = field(default_factory=list)

    def add(self, name: str, version: str, exchanges: Sequence[Exchange]) -> None:
        turns = turns_of(exchanges)
        refused = sum(each.is_refused for each in exchanges)
        figures = [name, version, len(exchanges), refused, len(turns)]
        last = f"{turns[-1][0]:,} tokens" if turns else ""
        share = f"{min(shares_of(turns)):.1%}" if len(turns) > 1 else ""
        self.rows.append(f"| {' | '.join(map(str, [*figures, last, share]))} |\n")

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEAD + "|---|---|---|---|---|---|---|\n" + "".join(self.rows))
