"""Names of headers with a request's parameters, and checks of parameters in its query."""

from collections.abc import Mapping

from raydix.engine.core.errors import RequestError

# Objectives of a request, by the names that llm-d and GKE's gateways have for them.
TTFT_HEADER, TPOT_HEADER = "x-slo-ttft-ms", "x-slo-tpot-ms"

_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def flag(query: Mapping[str, str], name: str) -> bool:
    """The value of a parameter that is true or false; false by default. Raises RequestError for another value."""
    value = query.get(name, "false")
    if value.lower() not in _FLAGS:
        raise RequestError(f"'{name}' must be true or false, got '{value[:100]}'.", param=name)
    return _FLAGS[value.lower()]


def seconds(query: Mapping[str, str], name: str, *, default: float, most: float) -> float:
    """The value of a parameter that is a time. Raises RequestError for one that is no number above 0 and up to
    `most`."""
    text = query.get(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= most:
        what = f"'{name}' must be a number of seconds above 0 and up to {most:g}"
        raise RequestError(f"{what}, got '{text[:100]}'.", param=name)
    return value


def one_of(query: Mapping[str, str], name: str, *values: str) -> str:
    """The value of a parameter, by default the first of `values`. Raises RequestError for a value that is not among
    them."""
    value = query.get(name, values[0])
    if value not in values:
        words = ", ".join(f"'{each}'" for each in values)
        raise RequestError(f"'{name}' must be {words}, got '{value[:100]}'.", param=name)
    return value


def unsupported(name: str) -> RequestError:
    """The refusal of a parameter's value."""
    return RequestError(f"'{name}' is not supported yet.", param=name)
