"""Each agent finishes a task of ten turns with tools, unmodified: no request is refused, and each turn finds the one
before it in the cache."""

import json
from pathlib import Path

import pytest

from tests.clients.agents.programs import AGENTS, NUM_STEPS, Agent, Place
from tests.clients.agents.relay import Relay
from tests.clients.agents.table import AgentsTable, shares_of, turns_of
from tests.clients.server import Server

LEAST_CACHED = 0.95


@pytest.mark.parametrize("agent", AGENTS, ids=[agent.name for agent in AGENTS])
def test_ten_turns(agent: Agent, server: Server, table: AgentsTable, tmp_path: Path) -> None:
    if not agent.version:
        pytest.skip("not installed: `make test-agents` installs it")
    relay = Relay(server.url)
    place = Place(relay.url, tmp_path / "home", tmp_path / "work")
    place.home.mkdir()
    place.work.mkdir()
    with relay.running():
        try:
            shown = agent.run(place)
        finally:
            table.add(agent.name, agent.version, relay.exchanges)

    assert agent.end in shown
    refused = [(each.path, each.status, each.answer[:300]) for each in relay.exchanges if each.is_refused]
    assert not refused
    last = json.loads(next(each.request for each in reversed(relay.exchanges) if each.has_tools))
    assert agent.result(NUM_STEPS) in json.dumps(last), "the last step was made"
    turns = turns_of(relay.exchanges)
    assert len(turns) >= NUM_STEPS + 1
    shares = shares_of(turns)
    assert min(shares) >= LEAST_CACHED, [f"{share:.1%}" for share in shares]
