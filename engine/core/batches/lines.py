"""The lines of batches: in which order they run, which of them wait, and how many run at a time.

`PrefixOrder` orders the lines of a batch so that lines with a common beginning run one after the other. A prompt is cut
into pieces of `PIECE` characters. Lines with equal first pieces stand side by side, within these the lines with more
equal pieces, and so on, as in a walk through a prefix tree: a beginning is needed in one stretch of time and is evicted
at most once. Otherwise the order is the file's.

`LineQueue` has the waiting lines of a batch in that order, with lines to be tried again later. `LineAllowance` shares a
limit of running lines among the tenants with batches under way, and each share among the batches.
"""

import heapq
from collections import Counter, deque
from collections.abc import Collection, Sequence
from hashlib import blake2b

PIECE = 256  # characters of a piece: a few KV blocks
MAX_PIECES = 64  # most pieces compared of one prompt
DIGEST_BYTES = 12
MAX_ATTEMPTS = 20  # attempts of one line; with all pauses some eight minutes
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0  # pause before a line is tried again; each further one is twice as long


class PrefixOrder:
    """Collects the prompts of a batch, then gives the order of the lines."""

    def __init__(self) -> None:
        self._first_with: dict[bytes, int] = {}  # first line with some pieces, by the chained hash of the pieces
        self._places: list[tuple[tuple[int, ...], int]] = []

    def add(self, number: int, prompt: str) -> None:
        """Note the prompt of a line; numbers are given in the file's order."""
        place = []
        chain = b""
        for start in range(0, min(len(prompt), PIECE * MAX_PIECES), PIECE):
            # Any text must have a place in the order, also one that is refused when it runs.
            piece = prompt[start : start + PIECE].encode("utf-8", "surrogatepass")
            chain = blake2b(piece, key=chain, digest_size=DIGEST_BYTES).digest()
            # The first line with these pieces stands for the group, so that groups keep the file's order among each
            # other.
            place.append(self._first_with.setdefault(chain, number))
        self._places.append((tuple(place), number))

    def numbers(self) -> list[int]:
        """The lines in the order of running."""
        return [number for _, number in sorted(self._places)]


class LineQueue:
    """Lines by number. Each is waiting, running, or answered."""

    def __init__(self, order: Sequence[int], answered: Collection[int] = ()) -> None:
        self._waiting = deque(number for number in order if number not in answered)
        self._later: list[tuple[float, int]] = []  # a heap of lines to be tried again, with times
        self._attempts: dict[int, int] = {}
        self._running: set[int] = set()

    @property
    def is_empty(self) -> bool:
        """True if every line is answered."""
        return not (self._waiting or self._later or self._running)

    def take(self, count: int, now: float) -> list[int]:
        """The next lines to run, at most `count`: lines to be tried again first."""
        taken: list[int] = []
        # Lines that were tried before go first: their prompts may still be cached.
        while len(taken) < count and self._later and self._later[0][0] <= now:
            taken.append(heapq.heappop(self._later)[1])
        while len(taken) < count and self._waiting:
            taken.append(self._waiting.popleft())
        self._running.update(taken)
        return taken

    def answered(self, number: int) -> None:
        self._running.remove(number)
        self._attempts.pop(number, None)

    def try_again(self, number: int, now: float) -> bool:
        """Have a running line wait; False after `MAX_ATTEMPTS`."""
        attempts = self._attempts.get(number, 0) + 1
        if attempts == MAX_ATTEMPTS:
            return False
        self._attempts[number] = attempts
        self._running.remove(number)
        heapq.heappush(self._later, (now + min(FIRST_PAUSE_S * 2 ** (attempts - 1), MAX_PAUSE_S), number))
        return True

    def check_integrity(self) -> None:
        """Assert: each line is in one place."""
        numbers = [*self._waiting, *(number for _, number in self._later), *self._running]
        assert len(numbers) == len(set(numbers))
        assert all(attempts < MAX_ATTEMPTS for attempts in self._attempts.values())


class LineAllowance:
    """A limit of `limit` running lines, less the requests of clients, in equal shares."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._running: Counter[str] = Counter()  # running lines by batch, batches without running lines included
        self._tenant_of: dict[str, str] = {}

    def change(self, limit: int) -> None:
        """Take another limit; lines that run beyond a lower one run to their end."""
        self._limit = limit

    @property
    def num_running(self) -> int:
        """Running lines of all batches."""
        return self._running.total()

    def join(self, batch: str, tenant: str) -> None:
        """Give a batch a share of its tenant's."""
        assert batch not in self._running
        self._running[batch] = 0
        self._tenant_of[batch] = tenant

    def leave(self, batch: str) -> None:
        """Take the share of a batch without running lines."""
        assert self._running.pop(batch) == 0
        del self._tenant_of[batch]

    def free(self, batch: str, num_others: int) -> int:
        """Lines with room to begin for a batch: a share of the limit less `num_others` requests of clients. All batches
        together always have room for one line, so no batch waits for ever."""
        # Clients' requests have the room first; one line goes on, so that a busy server still finishes its batches.
        left = max(self._limit - num_others, 1)
        num_batches = Counter(self._tenant_of.values())
        # Rounded up: with more tenants than room each may begin one line when another ends.
        share = -(-left // len(num_batches))
        share = -(-share // num_batches[self._tenant_of[batch]])
        return max(min(share - self._running[batch], left - self.num_running), 0)

    def begin(self, batch: str, count: int) -> None:
        """Count lines at the begin."""
        self._running[batch] += count

    def end(self, batch: str) -> None:
        """Count a line less."""
        assert self._running[batch] > 0
        self._running[batch] -= 1
