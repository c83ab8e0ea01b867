"""Each agent finishes a task of ten turns with tools, unmodified: no request is refused, and each turn finds the one
before it in the cache, or what it keeps of it."""

import json
from pathlib import Path

import pytest

from tests.clients.agents.programs import AGENTS, NUM_STEPS, Agent, Place
from tests.clients.agents.relay import Relay
from tests.clients.agents.table import AgentsTable, turns_of
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
            turns = turns_of(agent, server.url, relay.exchanges)
            table.add(agent, relay.exchanges, turns)

    refused = [(each.path, each.status, each.answer[:300]) for each in relay.exchanges if each.is_refused]
    assert not refused
    sent = json.loads(next(each.request for each in reversed(relay.exchanges) if agent.is_turn(each)))
    made = (place.work / agent.leaves).read_text() if agent.leaves else json.dumps(sent)
    assert agent.result(NUM_STEPS) in made, "the last step was made"
    assert agent.end in shown + made
    assert len(turns) >= NUM_STEPS
    assert min(turn.of_kept for turn in turns) >= LEAST_CACHED, turns
