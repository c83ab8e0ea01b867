"""Last signs of life of other processes, to notice silent ones."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class SignsOfLife:
    """The time of each process's last sign, by the process's name. Times are monotonic seconds."""

    _heard_at: dict[str, float] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self._heard_at

    def __iter__(self) -> Iterator[str]:
        return iter(self._heard_at)

    def heard(self, name: str, now: float) -> None:
        """Note a sign of life, the first one too."""
        self._heard_at[name] = now

    def forget(self, name: str) -> None:
        """Expect no more signs of a process."""
        del self._heard_at[name]

    def stood_still(self, late_s: float) -> None:
        """Extend all deadlines by `late_s`, for which this process itself was stopped and received nothing."""
        for name in self._heard_at:
            self._heard_at[name] += late_s

    def silent(self, now: float, silence_s: float) -> list[str]:
        """The processes without a sign for longer than `silence_s`."""
        deadline = now - silence_s
        return [name for name, heard_at in self._heard_at.items() if heard_at < deadline]
