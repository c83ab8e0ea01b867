"""Index of one sequence: finds where its last tokens stood before, and so what may follow.

The *match* is the longest run of last tokens that stood before, at least `MIN_MATCH`, as far as it is looked for:
among the `MAX_CANDIDATES` latest places of the last two tokens, up to `MAX_MATCH` tokens. While the next tokens are
those that followed there, the match grows without a search, and stays the longest: a longer one would have been longer
before.

Each token takes O(1) time: an entry for its pair with the token before, and a bounded search where a match has ended.

`SourceRecord` learns, while a request decodes, the chance that a match goes on by one more token. A match of m tokens
of which d draft tokens were right is a match of m + d, so the chance is learnt by the length of the match alone, and
the chance of a draft is a product. Each guess counts, computed or not: so what was learnt stays up to date while no
draft pays.
"""

from array import array
from collections.abc import Sequence

MIN_MATCH = 2
MAX_MATCH = 32
MAX_CANDIDATES = 8
BOUNDS = (3, 4, 6, 9, 13, 20)  # lengths at which the next class of matches begins; the first class is below all
PRIORS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)  # chances before anything was learnt, of each class
PRIOR_WEIGHT = 4.0
MAX_WEIGHT = 40.0  # guesses that count: of older ones less and less is left
# The class of each length; longer matches have the last one's.
CLASSES = tuple(sum(length >= bound for bound in BOUNDS) for length in range(BOUNDS[-1] + 1))


class SourceRecord:
    """What one request has shown of one source."""

    def __init__(self) -> None:
        self._rates = list(PRIORS)
        self._weights = [PRIOR_WEIGHT] * len(PRIORS)

    def observe(self, length: int, *, is_right: bool) -> None:
        """Note whether the guess behind a match of so many tokens was right."""
        each = CLASSES[min(length, BOUNDS[-1])]
        # A mean of all guesses at first, and from `MAX_WEIGHT` on one that forgets: texts change while they go on.
        self._weights[each] = weight = min(MAX_WEIGHT, self._weights[each] + 1)
        self._rates[each] += (is_right - self._rates[each]) / weight

    def chance(self, length: int) -> float:
        """The chance that the guess behind a match of so many tokens is right."""
        return self._rates[CLASSES[min(length, BOUNDS[-1])]]

    def chances(self, length: int, count: int, least: float) -> list[float]:
        """Chances of the next `count` guesses, each that this one and all before are right, as far as the chance is at
        least `least`."""
        found: list[float] = []
        chance = 1.0
        for further in range(count):
            chance *= self.chance(length + further)
            if chance < least:
                break
            found.append(chance)
        return found


class Places:
    """The places of all pairs of neighbours in the beginning of a sequence, which belongs to the caller."""

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}  # latest position of the second token of each pair of tokens
        self._previous = array("i")  # position before each indexed one with the same pair; -1 without one

    def __len__(self) -> int:
        """Tokens indexed so far."""
        return len(self._previous)

    def append(self, token_ids: Sequence[int], position: int) -> None:
        """Index the next token of the sequence."""
        if position == 0:
            self._previous.append(-1)
            return
        pair = token_ids[position - 1] << 32 | token_ids[position]
        self._previous.append(self._latest.get(pair, -1))
        self._latest[pair] = position

    def latest(self, pair: Sequence[int]) -> int:
        """The latest position of the second of two neighbours; -1 without one."""
        return self._latest.get(pair[0] << 32 | pair[1], -1)

    def before(self, position: int) -> int:
        """The position before with the same pair; -1 without one."""
        return self._previous[position]

    def longest(self, token_ids: Sequence[int], place: int, tail: Sequence[int]) -> tuple[int, int]:
        """The longest match of the end of `tail`, from its last two tokens' `place` on, the latest of equally long
        ones: its length, 0 without one, and the position behind."""
        best, behind, last = 0, 0, len(tail) - 1
        for _ in range(MAX_CANDIDATES):
            if place < 0:
                break
            # A longer match than the best so far has also the token before that one's first.
            if not best or (place >= best and last >= best and token_ids[place - best] == tail[last - best]):
                length, most = MIN_MATCH, min(MAX_MATCH, place + 1, last + 1)
                while length < most and token_ids[place - length] == tail[last - length]:
                    length += 1
                if length > best:
                    best, behind = length, place + 1
            place = self._previous[place]
        return best, behind


class SuffixIndex:
    """The places in a growing sequence, and the present match of its own last tokens.

    The sequence belongs to the caller and is given to each call; what was indexed of it must not change.
    """

    def __init__(self) -> None:
        self.places = Places()
        self.length = 0
        """Tokens of the match; 0 without one."""
        self.next = 0
        """Position behind the match's earlier place: its token is the guess."""

    @property
    def num_indexed(self) -> int:
        return len(self.places)

    def extend(self, token_ids: Sequence[int], end: int) -> None:
        """Index the tokens up to `end`, and look for a match of the last ones."""
        for position in range(len(self.places), end):
            self.places.append(token_ids, position)
        self._search(token_ids)

    def follow(self, token_ids: Sequence[int], survival: SourceRecord) -> None:
        """Index the tokens that have come since, and tell of each guess whether it was right."""
        for position in range(len(self.places), len(token_ids)):
            if self.length:
                is_right = token_ids[self.next] == token_ids[position]
                survival.observe(self.length, is_right=is_right)
                # A right guess makes the match longer, without a search; a wrong one ends it.
                self.length = min(self.length + 1, MAX_MATCH) if is_right else 0
                self.next += 1
            self.places.append(token_ids, position)
            if not self.length:
                self._search(token_ids)

    def guess(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that followed the match's earlier place; where they reach the sequence's end, they go on
        with themselves, as a sequence that repeats does. None without a match."""
        if not self.length:
            return []
        end = len(self.places)
        found = list(token_ids[self.next : min(end, self.next + count)])
        # The text behind the earlier place reaches the present end, so what follows repeats with this period.
        period = end - self.next
        while len(found) < count:
            found.append(found[-period])
        return found

    def _search(self, token_ids: Sequence[int]) -> None:
        """Find the longest match of the tokens indexed so far."""
        last = len(self.places) - 1
        place = self.places.before(last) if last >= 0 else -1
        if place < 0:
            self.length = 0
        else:
            tail = token_ids[max(0, last + 1 - MAX_MATCH) : last + 1]
            self.length, self.next = self.places.longest(token_ids, place, tail)
