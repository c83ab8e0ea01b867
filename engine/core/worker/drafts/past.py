"""Past answers of a worker, by salt: the continuation of a request's last tokens, where an earlier answer has them.

Answers of one salt are never found under another. They stand in *volumes* one behind the other, each with the last
tokens of its prompt: an answer to the same question is found from its first token on. The volume with the oldest last
answer is forgotten first.

Adding an answer copies its tokens; `index` makes them findable, a bounded number before each step.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

from engine.core.worker.drafts.suffix import END, MAX_MATCH, MIN_MATCH, Places, up_to_end
from engine.core.worker.drafts.survival import Survival

VOLUMES = 8
"""Full volumes for which there is memory."""
VOLUME_TOKENS = 16
"""Memory of an empty volume, in tokens."""
MAX_COMPARED = 64
"""New tokens of a request with which its guesses are compared; of more, after a while without drafts, the last ones
count alone."""


class Volume:
    """Answers of one salt, each with an `END` behind."""

    def __init__(self, salt: bytes) -> None:
        self.salt = salt
        self.token_ids: list[int] = []
        self.places = Places()

    @property
    def size(self) -> int:
        return VOLUME_TOKENS + len(self.token_ids)

    @property
    def num_missing(self) -> int:
        """Tokens not indexed yet."""
        return len(self.token_ids) - len(self.places)

    def index(self, most: int) -> int:
        """Index up to so many more tokens; returns their number."""
        first = len(self.places)
        end = min(len(self.token_ids), first + most)
        for position in range(first, end):
            self.places.append(self.token_ids, position)
        return end - first


class Past:
    """The past answers of one worker, at most `max_tokens` of them."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._shelves: dict[bytes, list[Volume]] = {}
        """Volumes of each salt, the latest last, to which answers are added."""
        self._by_age: OrderedDict[int, Volume] = OrderedDict()
        """All volumes by their numbers, in the order of their last answers."""
        self._numbers: dict[bytes, int] = {}
        """Number of each salt's latest volume."""
        self._num_begun = 0
        self._unindexed: deque[Volume] = deque()
        self.num_tokens = 0
        """Sizes of all volumes."""

    def add(self, salt: bytes, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Take an answer, unless it is far too long."""
        token_ids = [*prompt[-MAX_MATCH:], *answer, END]
        if not answer or len(token_ids) > self._max_tokens // 2:
            return
        volume = self._writable(salt)
        if not volume.num_missing:
            self._unindexed.append(volume)
        volume.token_ids += token_ids
        self.num_tokens += len(token_ids)
        while self.num_tokens > self._max_tokens:
            self._forget()

    def index(self, most: int) -> None:
        """Make up to so many tokens of added answers findable."""
        while self._unindexed and most > 0:
            most -= self._unindexed[0].index(most)
            if not self._unindexed[0].num_missing:
                self._unindexed.popleft()

    def volumes(self, salt: bytes) -> Sequence[Volume]:
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

    def _writable(self, salt: bytes) -> Volume:
        """The latest volume of a salt, or a new one if the latest is full."""
        shelf = self._shelves.setdefault(salt, [])
        if not shelf or shelf[-1].size > self._max_tokens // VOLUMES:
            shelf.append(Volume(salt))
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
        if self._numbers[volume.salt] == number:
            del self._numbers[volume.salt]
        if not shelf:
            del self._shelves[volume.salt]
        if volume.num_missing:
            self._unindexed.remove(volume)


class PastMatch:
    """The match of one request's last tokens in past answers."""

    def __init__(self) -> None:
        self.length = 0
        """Tokens of the match; 0 without one."""
        self._volume: Volume | None = None
        self._next = 0
        """Position behind the match in its volume: the guess."""
        self._num_compared = 0
        """Tokens of the request already seen."""

    def follow(self, volumes: Sequence[Volume], token_ids: Sequence[int], survival: Survival) -> None:
        """Compare the request's new tokens with the guesses, and look for a match if there is none."""
        if len(token_ids) - self._num_compared > MAX_COMPARED:
            self.length = 0
        elif self._volume is not None:
            for position in range(self._num_compared, len(token_ids)):
                self._compare(self._volume, token_ids[position], survival)
        self._num_compared = len(token_ids)
        if not self.length and volumes and len(token_ids) >= MIN_MATCH:
            self._search(volumes, token_ids[-MAX_MATCH:])

    def guess(self, count: int) -> list[int]:
        """The `count` tokens that followed in the past answer, or fewer up to its end; none without a match."""
        if not self.length or self._volume is None:
            return []
        return up_to_end(self._volume.token_ids[self._next : self._next + count])

    def _compare(self, volume: Volume, token_id: int, survival: Survival) -> None:
        if not self.length:
            return
        guess = volume.token_ids[self._next]
        if guess != END:
            survival.observe(self.length, is_right=guess == token_id)
        self.length = min(self.length + 1, MAX_MATCH) if guess == token_id else 0
        self._next += 1

    def _search(self, volumes: Sequence[Volume], tail: Sequence[int]) -> None:
        """Find the longest match, the latest of equally long ones."""
        for volume in reversed(volumes):
            place = volume.places.latest(tail[-MIN_MATCH:])
            if place >= 0:
                length, behind = volume.places.longest(volume.token_ids, place, tail)
                if length > self.length:
                    self.length, self._next, self._volume = length, behind, volume
