"""The load of a cluster in a response's header, in the form of ORCA (Open Request Cost Aggregation), for gateways that
spread requests over several servers by it. The names of the figures are vLLM's."""

from dataclasses import dataclass

import orjson

# Header of a request that asks for the figures, with a name of `LOAD_FORMATS` in any case.
FORMAT_HEADER = "endpoint-load-metrics-format"
LOAD_HEADER = "endpoint-load-metrics"  # header of the response with the figures
TEXT, JSON = LOAD_FORMATS = ("TEXT", "JSON")


@dataclass(frozen=True, slots=True)
class WorkersLoad:
    """Load of the workers together."""

    kv_usage: float
    """Share of the pools' blocks that requests hold, 0 to 1."""
    num_waiting: float
    """Requests that wait for blocks, imports or their turn."""


def load_format(asked: str) -> str | None:
    """The format that a request's header asks for; None for one that is not supported, which asks for nothing."""
    name = asked.strip().upper()
    return name if name in LOAD_FORMATS else None


def load_report(form: str, load: WorkersLoad) -> str:
    """The value of the response's header in one of `LOAD_FORMATS`."""
    metrics = {"kv_cache_usage_perc": float(load.kv_usage), "num_requests_waiting": float(load.num_waiting)}
    if form == JSON:
        return f"{JSON} {orjson.dumps({'named_metrics': metrics}).decode()}"
    return f"{TEXT} " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
