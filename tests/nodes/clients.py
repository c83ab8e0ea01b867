"""Ten clients, each of which sends its request again and again while something is done to the cluster."""

import itertools
import threading
from collections.abc import Sequence

from tests.chaos.harness import NUM_STREAMS, Load, Stream
from tests.integration.conftest import Server, eventually

THINK_S = 1.0
"""From a client's answer to its next request."""


class Clients:
    """Clients of one server, from `start` to `finish`."""

    def __init__(self, server: Server, load: Load, salt: str) -> None:
        self._server = server
        self._load = load
        self._salt = salt
        self._is_over = threading.Event()
        self._streams: list[list[Stream]] = [[] for _ in load.prompts]
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(NUM_STREAMS)]

    def start(self) -> None:
        """Send all requests; returns when all clients have tokens."""
        for thread in self._threads:
            thread.start()
        eventually(lambda: all(streams and len(streams[0].token_ids) >= 8 for streams in self._streams), "8 tokens")

    def finish(self) -> None:
        """Wait for the answers that are under way."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    @property
    def streams(self) -> Sequence[Stream]:
        """All requests so far."""
        return [*itertools.chain.from_iterable(self._streams)]

    @property
    def num_identical(self) -> int:
        """Number of requests with the answer of an undisturbed server."""
        return sum(
            stream.token_ids == answer
            for streams, answer in zip(self._streams, self._load.answers, strict=True)
            for stream in streams
        )

    @property
    def errors(self) -> Sequence[str]:
        """How streams broke; one message for each that did."""
        return [stream.error for stream in self.streams if stream.error is not None]

    def longest_gap_s(self, since: float) -> float:
        """The longest time between two tokens of a stream that ended after `since`."""
        gaps = (b - a for stream in self.streams for a, b in itertools.pairwise(stream.times) if b > since)
        return max(gaps, default=0.0)

    def longest_wait_s(self, since: float) -> float:
        """The longest time from a request to its first token that ended after `since`."""
        waits = (at - stream.sent_at for stream in self.streams for at in stream.times[:1] if at > since)
        return max(waits, default=0.0)

    def _run(self, index: int) -> None:
        prompt, answer = self._load.prompts[index], self._load.answers[index]
        while not self._is_over.is_set():
            stream = Stream(prompt, len(answer), self._salt)
            self._streams[index].append(stream)
            stream.run(self._server)
            self._is_over.wait(THINK_S)
