"""A range of private addresses that no network of this machine uses."""

import json
from collections.abc import Collection, Iterable, Iterator
from ipaddress import IPv4Network
from typing import Any

RANGES = (IPv4Network("10.77.0.0/16"), IPv4Network("172.30.0.0/16"), IPv4Network("192.168.0.0/16"))
PREFIX_LENGTH = 24
ABSENT = f"every network of 256 addresses in {', '.join(map(str, RANGES))} overlaps with a route of this machine"


def free_subnet(taken: Collection[IPv4Network]) -> IPv4Network | None:
    """The first range that overlaps with none of `taken`; None if there is none."""
    candidates = (each for large in RANGES for each in large.subnets(new_prefix=PREFIX_LENGTH))
    return next((each for each in candidates if not any(map(each.overlaps, taken))), None)


def networks(routes: str, addresses: str) -> Iterator[IPv4Network]:
    """The networks in the output of `ip -json -4 route show table all` and of `ip -json -4 address`. A default route
    leads to no network of its own."""
    yield from _destinations(json.loads(routes or "[]"))
    for device in json.loads(addresses or "[]"):
        for each in device.get("addr_info", ()):
            yield IPv4Network(f"{each['local']}/{each['prefixlen']}", strict=False)


def _destinations(routes: Iterable[dict[str, Any]]) -> Iterator[IPv4Network]:
    for route in routes:
        if route["dst"] not in ("default", "0.0.0.0/0"):
            yield IPv4Network(route["dst"], strict=False)
