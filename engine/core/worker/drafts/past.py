"""Past answers of a worker, by salt: the continuation of a request's last tokens, where an earlier answer has them.

Answers of one salt are never found under another. They stand in *volumes* one behind the other, each with the last
tokens of its prompt: an answer to the same question is found from its first token on. The volume with the oldest last
answer is forgotten first.

Adding an answer copies its tokens; `index` makes them findable, a bounded number before each step.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

from raydix.engine.core.worker.drafts.suffix import MAX_MATCH
from raydix.engine.core.worker.drafts.texts import Volume

VOLUMES = 8  # full volumes for which there is memory
VOLUME_TOKENS = 16  # memory of an empty volume, in tokens


class PastVolume(Volume):
    """Answers of one salt."""

    def __init__(self, salt: bytes) -> None:
        super().__init__()
        self.salt = salt

    @property
    def size(self) -> int:
        return VOLUME_TOKENS + len(self.token_ids)


class Past:
    """The past answers of one worker, at most `max_tokens` of them."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        # Volumes of each salt, the latest last, to which answers are added.
        self._shelves: dict[bytes, list[PastVolume]] = {}
        # All volumes by their numbers, in the order of their last answers.
        self._by_age: OrderedDict[int, PastVolume] = OrderedDict()
        self._numbers: dict[bytes, int] = {}  # number of each salt's latest volume
        self._num_begun = 0
        self._unindexed: deque[PastVolume] = deque()
        self.num_tokens = 0
        """Sizes of all volumes."""

    def add(self, salt: bytes, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Take an answer, unless it is far too long."""
        # Half of the memory, so that what is forgotten for an answer is never the answer itself.
        if not answer or min(len(prompt), MAX_MATCH) + len(answer) + 1 > self._max_tokens // 2:
            return
        volume = self._writable(salt)
        if not volume.num_missing:
            self._unindexed.append(volume)
        self.num_tokens += volume.add(prompt, answer)
        while self.num_tokens > self._max_tokens:
            self._forget()

    def index(self, most: int) -> None:
        """Make up to so many tokens of added answers findable."""
        while self._unindexed and most > 0:
            most -= self._unindexed[0].index(most)
            if not self._unindexed[0].num_missing:
                self._unindexed.popleft()

    def clear(self) -> None:
        """Forget all answers."""
        for volume in self._by_age.values():
            volume.clear()
        self._shelves.clear()
        self._by_age.clear()
        self._numbers.clear()
        self._unindexed.clear()
        self.num_tokens = 0

    def volumes(self, salt: bytes) -> Sequence[PastVolume]:
        """The volumes of a salt, the latest last."""
        return self._shelves.get(salt, ())

    def check_integrity(self) -> None:
        """Assert that sizes, ages and shelves agree."""
        volumes = list(self._by_age.values())
        assert self.num_tokens == sum(volume.size for volume in volumes) <= self._max_tokens
        assert sorted(map(id, volumes)) == sorted(id(each) for shelf in self._shelves.values() for each in shelf)
        assert all(each.salt == salt for salt, shelf in self._shelves.items() for each in shelf)
        assert all(self._shelves.values()) and set(self._numbers) == set(self._shelves)
        assert all(self._by_age[number] is self._shelves[salt][-1] for salt, number in self._numbers.items())

    def _writable(self, salt: bytes) -> PastVolume:
        """The latest volume of a salt, or a new one if the latest is full."""
        shelf = self._shelves.setdefault(salt, [])
        if not shelf or shelf[-1].size > self._max_tokens // VOLUMES:
            shelf.append(PastVolume(salt))
            self._numbers[salt] = self._num_begun
            self._by_age[self._num_begun] = shelf[-1]
            self._num_begun += 1
            self.num_tokens += shelf[-1].size
        self._by_age.move_to_end(self._numbers[salt])
        return shelf[-1]

    def _forget(self) -> None:
        """Forget the volume with the oldest last answer: never the one with the newest, which is no larger than the
        limit."""
        number, volume = self._by_age.popitem(last=False)
        self.num_tokens -= volume.size
        shelf = self._shelves[volume.salt]
        shelf.remove(volume)
        # The salt's latest volume is gone, and with it all of the salt's, as older ones went before.
        if self._numbers[volume.salt] == number:
            del self._numbers[volume.salt]
        if not shelf:
            del self._shelves[volume.salt]
        if volume.num_missing:
            self._unindexed.remove(volume)
