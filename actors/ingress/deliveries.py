"""Measures the time between two deliveries of a request's tokens, and traces it while a trace is recorded."""

from typing import NamedTuple

from raydix.actors.metrics import IngressMetrics
from raydix.actors.tracing import Recorder, Span


class Delivery(NamedTuple):
    """Tokens that came together. Times are of the monotonic clock."""

    request_id: str
    position: int
    """Position of the first of them."""
    num_tokens: int
    since: float
    """Time of the delivery before; of the first one the time of the request's beginning."""
    at: float

    @property
    def is_first(self) -> bool:
        return self.position == 0


class Deliveries:
    """Takes note of each delivery."""

    def __init__(self, metrics: IngressMetrics, recorder: Recorder) -> None:
        self._metrics = metrics
        self._recorder = recorder

    def took(self, delivery: Delivery) -> None:
        """Note a delivery."""
        seconds = delivery.at - delivery.since
        if not delivery.is_first:
            self._metrics.token_gap(seconds)
        if self._recorder.is_on:
            count = "" if delivery.num_tokens == 1 else f" and {delivery.num_tokens - 1} more"
            name = f"token {delivery.position + 1}{count}"
            about = {"position": delivery.position, "tokens": delivery.num_tokens}
            self._recorder.add(
                [Span(delivery.request_id, name, started_at=delivery.since, seconds=seconds, about=about)]
            )
