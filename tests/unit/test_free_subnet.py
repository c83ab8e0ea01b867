"""The addresses of the machines of `tests/nodes`: none that a network of this machine has."""

import json
from ipaddress import IPv4Network

from tests.nodes.subnet import RANGES, free_subnet, networks


def test_the_first_range_that_nothing_overlaps_is_taken() -> None:
    assert free_subnet([]) == IPv4Network("10.77.0.0/24")
    assert free_subnet([IPv4Network("10.77.0.128/25"), IPv4Network("10.77.1.7/32")]) == IPv4Network("10.77.2.0/24")
    assert free_subnet([IPv4Network("10.0.0.0/8")]) == IPv4Network("172.30.0.0/24")
    assert free_subnet(RANGES) is None


def test_routes_and_addresses_are_networks_and_the_default_route_is_none() -> None:
    routes = [
        {"dst": "default", "gateway": "192.0.2.1"},
        {"dst": "10.77.0.0/16"},
        {"type": "local", "dst": "127.0.0.1"},
    ]
    addresses = [{"addr_info": [{"local": "172.30.0.5", "prefixlen": 16}]}, {"ifname": "lo"}]
    found = set(networks(json.dumps(routes), json.dumps(addresses)))
    assert found == {IPv4Network("10.77.0.0/16"), IPv4Network("127.0.0.1/32"), IPv4Network("172.30.0.0/16")}
    assert set(networks("", "")) == set()
