"""Known texts in which the last tokens of a request may stand, and the match of one request in such texts.

A text belongs to whoever writes it; one that is being written grows at its end. An `END` in a text matches nothing, and
no guess goes beyond. `Past` has a worker's past answers, and `Suffixes` the matches of one request in all of them.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from raydix.engine.core.types import DraftSource
from raydix.engine.core.worker.drafts.suffix import MAX_MATCH, MIN_MATCH, Places, SourceRecord, SuffixIndex

END = -1  # mark in place of a token: the end of an answer in a text of several
# New tokens of a request with which its guesses are compared; of more, after a while without drafts, only the last
# tokens count, and the others are indexed as a prompt is.
MAX_COMPARED = 64
VOLUMES = 8  # full volumes for which there is memory
VOLUME_TOKENS = 16  # memory of an empty volume, in tokens
OwnTexts = Mapping[DraftSource, Sequence[Sequence[int]]]
"""Guesses of the whole answer by source, the likeliest last."""


class DraftText(Protocol):
    """Tokens, and the places of the first ones."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def places(self) -> Places: ...


class RunningText(NamedTuple):
    """The tokens of a request that runs, with the places in them."""

    token_ids: Sequence[int]
    places: Places


class Volume:
    """Answers one behind the other, each with the last tokens of its prompt before and an `END` behind."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.places = Places()

    @property
    def num_missing(self) -> int:
        """Tokens not indexed yet."""
        return len(self.token_ids) - len(self.places)

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """Write an answer behind the others; returns the number of tokens written."""
        before = len(self.token_ids)
        self.token_ids += prompt[-MAX_MATCH:]
        self.token_ids += answer
        self.token_ids.append(END)
        return len(self.token_ids) - before

    def index(self, most: int) -> int:
        """Index up to so many more tokens; returns their number."""
        first = len(self.places)
        end = min(len(self.token_ids), first + most)
        for position in range(first, end):
            self.places.append(self.token_ids, position)
        return end - first

    def clear(self) -> None:
        """Forget all answers, where a match has found one, too."""
        self.token_ids.clear()
        self.places = Places()


class TextMatch:
    """The match of one request's last tokens in some texts."""

    def __init__(self) -> None:
        self.length = 0
        """Tokens of the match; 0 without one."""
        self._text: DraftText | None = None
        self._next = 0  # position behind the match in its text: the guess
        self._num_compared = 0  # tokens of the request already seen

    def follow(self, texts: Sequence[DraftText], token_ids: Sequence[int], survival: SourceRecord) -> None:
        """Compare the request's new tokens with the guesses, and look for a match if there is none. Of two texts the
        later one counts first."""
        if len(token_ids) - self._num_compared > MAX_COMPARED:
            self.length = 0
        elif self._text is not None:
            for position in range(self._num_compared, len(token_ids)):
                self._compare(self._text, token_ids[position], survival)
        self._num_compared = len(token_ids)
        if not self.length:
            self._text = None
            if texts and len(token_ids) >= MIN_MATCH:
                self._search(texts, token_ids[-MAX_MATCH:])

    def guess(self, count: int) -> list[int]:
        """The `count` tokens that followed in the text, or fewer up to the end there; none without a match."""
        if not self.length or self._text is None:
            return []
        return up_to_end(self._text.token_ids[self._next : self._next + count])

    def _compare(self, text: DraftText, token_id: int, survival: SourceRecord) -> None:
        if not self.length:
            return
        if self._next >= len(text.token_ids):  # it grows more slowly than the request, or was cleared
            self.length = 0
            return
        guess = text.token_ids[self._next]
        if guess != END:
            survival.observe(self.length, is_right=guess == token_id)
        self.length = min(self.length + 1, MAX_MATCH) if guess == token_id else 0
        self._next += 1

    def _search(self, texts: Sequence[DraftText], tail: Sequence[int]) -> None:
        """Find the longest match, the latest of equally long ones."""
        for text in reversed(texts):
            place = text.places.latest(tail[-MIN_MATCH:])
            if place >= 0:
                length, behind = text.places.longest(text.token_ids, place, tail)
                if length > self.length:
                    self.length, self._next, self._text = length, behind, text


def up_to_end(token_ids: Sequence[int]) -> list[int]:
    """The tokens of the first answer."""
    found = list(token_ids)
    return found[: found.index(END)] if END in found else found


class PastVolume(Volume):
    """Answers of one salt."""

    def __init__(self, salt: bytes) -> None:
        super().__init__()
        self.salt = salt

    @property
    def size(self) -> int:
        return VOLUME_TOKENS + len(self.token_ids)


class Past:
    """Past answers of a worker, by salt, with at most `max_tokens` tokens.

    Answers of one salt are never found under another. They stand in *volumes* one behind the other, each with the last
    tokens of its prompt: an answer to the same question is found from its first token on. The volume with the oldest
    last answer is forgotten first.

    Adding an answer copies its tokens; `index` makes them findable, a bounded number before each step.
    """

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


class Suffixes:
    """A request's index, its matches in other texts, and its record of the guesses of each source.

    Each text of the request's own stands behind the end of the prompt, as the answer will: so the first token of the
    answer finds it already.
    """

    def __init__(self, num_known: int, prompt: Sequence[int] = (), own_texts: OwnTexts | None = None) -> None:
        """`num_known`: the request's tokens when decoding begins, indexed without a comparison of guesses. `prompt`:
        at least its last tokens, needed where there are `own_texts`."""
        self.index = SuffixIndex()
        self.survivals = {source: SourceRecord() for source in DraftSource}
        self.volumes: dict[DraftSource, Volume] = {}
        """The request's own texts."""
        for source, texts in (own_texts or {}).items():
            for text in texts:
                self.volumes.setdefault(source, Volume()).add(prompt, text)
        self.matches = {source: TextMatch() for source in self.volumes}
        """Matches of the request's last tokens in the volumes."""
        self.past = TextMatch()
        """Match in past answers."""
        self.siblings = TextMatch()
        """Match in answers under way to the same question."""
        self.tail = tuple(prompt[-MAX_MATCH:])
        """The end of the prompt."""
        self._num_known = num_known

    @property
    def num_missing(self) -> int:
        """Tokens of the known ones that are not indexed yet."""
        return max(0, self._num_known - self.index.num_indexed)

    @property
    def num_tokens(self) -> int:
        """Tokens of all indexes, so far or soon."""
        own = sum(len(volume.token_ids) for volume in self.volumes.values())
        return own + max(self._num_known, self.index.num_indexed)

    def know(self, num_tokens: int) -> None:
        """Index the first tokens of the request without a comparison of guesses."""
        self._num_known = num_tokens

    def index_volumes(self, most: int) -> int:
        """Index up to so many more tokens of the request's own texts; returns their number."""
        left = most
        for volume in self.volumes.values():
            left -= volume.index(left)
        return most - left

    def text(self, token_ids: Sequence[int]) -> RunningText:
        """The request's own tokens, for others."""
        return RunningText(token_ids, self.index.places)


def num_wanted(num_known: int, tail: Sequence[int], own_texts: OwnTexts) -> int:
    """Tokens of all indexes of a request to be."""
    texts = [text for texts in own_texts.values() for text in texts]
    return num_known + sum(len(tail) + len(text) + 1 for text in texts)
