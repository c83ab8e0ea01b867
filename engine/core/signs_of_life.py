"""Last signs of life of other processes, to notice silent ones.

A process that is slow is not dead: one that answers nothing but was seen to compute (its node's kernel can tell, see
`raydix.actors.processes`) is not silent for `COMPUTING_S` behind its last answer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

COMPUTING_S = 30.0  # longest time for which a process that computes may answer nothing


@dataclass(slots=True)
class SignsOfLife:
    """The time of each process's last sign, by the process's name. Times are monotonic seconds."""

    _heard_at: dict[str, float] = field(default_factory=dict)
    _computing_at: dict[str, float] = field(default_factory=dict)
    """The last time at which each process that answers nothing was seen to compute."""

    def __contains__(self, name: str) -> bool:
        return name in self._heard_at

    def __iter__(self) -> Iterator[str]:
        return iter(self._heard_at)

    def heard(self, name: str, now: float) -> None:
        """Note a sign of life, the first one too."""
        self._heard_at[name] = now
        self._computing_at.pop(name, None)

    def computes(self, name: str, now: float) -> None:
        """Note that a process which answers nothing computes."""
        if name in self._heard_at:
            self._computing_at[name] = now

    def forget(self, name: str) -> None:
        """Expect no more signs of a process."""
        del self._heard_at[name]
        self._computing_at.pop(name, None)

    def stood_still(self, late_s: float) -> None:
        """Extend all deadlines by `late_s`, for which this process itself was stopped and received nothing."""
        for times in (self._heard_at, self._computing_at):
            for name in times:
                times[name] += late_s

    def quiet(self, now: float, silence_s: float) -> list[str]:
        """The processes that have answered nothing for longer than `silence_s`, whether they compute or not."""
        deadline = now - silence_s
        return [name for name, heard_at in self._heard_at.items() if heard_at < deadline]

    def silent(self, now: float, silence_s: float) -> list[str]:
        """The processes without a sign for longer than `silence_s`, neither an answer nor, for a while, processor
        time."""
        deadline = now - silence_s
        return [name for name in self._heard_at if self._sign_at(name) < deadline]

    def _sign_at(self, name: str) -> float:
        heard_at = self._heard_at[name]
        # Computing extends the last answer by `COMPUTING_S` at most: a loop without an end computes, too.
        return max(heard_at, min(self._computing_at.get(name, heard_at), heard_at + COMPUTING_S))
