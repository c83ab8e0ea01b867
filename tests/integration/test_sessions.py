"""Two workers of each role behind two ingress replicas: who gets which session, as a client and an operator see it.

The tests run in order: pools fill as they go on.
"""

import http.client
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from raydix.engine.core.hashing import preferred
from raydix.engine.model.sources import DEFAULT_MODEL, NULL
from tests.integration.cluster import Cluster, Pace, paced
from tests.integration.conftest import MODEL, WAIT_S, Server, eventually, random_prompt

NUM_BLOCKS = 600
CONFIG = {
    "model": {"source": f"{NULL}{DEFAULT_MODEL}", "max_model_len": 1024},
    "cache": {"num_blocks": NUM_BLOCKS, "segment_gib": 0.2, "swap_gib": 0.05, "eviction": "lru"},
    "workers": {
        "prefill": {"replicas": 2, "token_budget": 256, "max_requests": 16},
        "decode": {"replicas": 2, "token_budget": 128, "max_requests": 32},
    },
    "ingress": {"replicas": 2},
}
BLOCK = 16
PACE = Pace(step_s=0.01, prompt_token_s=0.001, decode_s=0.01)
"""Costs of all workers, so that none is preferred for its speed. They are long against what a busy machine adds to a
step."""
STICKING = 0.95
"""Least share of turns on their session's worker; a half would be there by chance."""
TURN = 70
"""New tokens of a turn: more than a decode worker computes by itself."""


@dataclass(frozen=True)
class Served:
    """What became of one request."""

    prompt: list[int]
    token_ids: list[int]
    cached_tokens: int
    prefill: str
    decode: str


class Placing(Server):
    """The server, with what its placement did."""

    def serve(self, prompt: list[int], header: str | None = None, **fields: Any) -> Served:
        """Complete a prompt, with an `x-session-id` if one is given, and ask where that happened."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
        extra = {} if header is None else {"x-session-id": header}
        answer = self._post("/v1/completions", {**body, "return_token_ids": True}, extra)
        status, _, data = self.request("GET", f"/v1/requests/{answer['id']}/explain")
        assert status == 200, data
        [request] = json.loads(data)["choices"]
        [attempt] = request["attempts"]
        return Served(
            prompt,
            answer["choices"][0]["token_ids"],
            answer["usage"]["prompt_tokens_details"]["cached_tokens"],
            attempt["prefill_worker"],
            attempt["decode_worker"],
        )

    def pools(self, role: str) -> dict[str, int]:
        """Cached blocks by worker of a role, in the order of ids."""
        workers = sorted(self.cache()["workers"], key=lambda worker: str(worker["id"]))
        return {worker["id"]: worker["cached_blocks"] for worker in workers if worker["role"] == role}

    def has_all_workers(self) -> bool:
        """Whether two workers of each role are known; on a busy machine the manager may not answer at once."""
        if self.request("GET", "/v1/cache")[0] != 200:
            return False
        return len(self.pools("prefill")) == len(self.pools("decode")) == 2

    def cache(self) -> dict[str, Any]:
        status, _, data = self.request("GET", "/v1/cache")
        assert status == 200, data
        report: dict[str, Any] = json.loads(data)
        return report

    def _post(self, path: str, body: dict[str, Any], extra: dict[str, str]) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=WAIT_S)
        try:
            connection.request("POST", path, json.dumps(body), {**self.headers, **extra})
            response = connection.getresponse()
            data = response.read()
            assert response.status == 200, data
            answer: dict[str, Any] = json.loads(data)
            return answer
        finally:
            connection.close()


@pytest.fixture(scope="module")
def placing(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Placing]:
    running = Placing("127.0.0.1", cluster.serve(CONFIG).server.port)
    eventually(running.has_all_workers, "all workers")
    with paced(running, tmp_path_factory.mktemp("pace") / "gate", PACE):
        yield running


def in_turn(placing: Placing, prompts: Sequence[list[int]], at_once: int, name: str) -> list[Served]:
    """Serve each session's prompt, `at_once` at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda pair: placing.serve(pair[1], session_id=f"{name} {pair[0]}"), enumerate(prompts)))


@pytest.mark.parametrize("way", ["session_id", "x-session-id"])
def test_a_session_s_name_reaches_placement(placing: Placing, way: str) -> None:
    """Prompts that share nothing go to the workers that their session prefers; of requests without a session, each
    its own, half would go elsewhere."""
    expected, found = [], []
    for number in range(18):
        session = f"{way} {number}"
        prompt = random_prompt(hash_of(way, number), 100)
        served = placing.serve(prompt, session) if way == "x-session-id" else placing.serve(prompt, session_id=session)
        found += [served.prefill, served.decode]
        expected += [
            preferred(session, list(placing.pools("prefill"))),
            preferred(session, list(placing.pools("decode"))),
        ]
    assert len(set(expected)) == 4, "the names are such that all workers are preferred"
    num_equal = sum(one == other for one, other in zip(found, expected, strict=True))
    assert num_equal >= STICKING * len(expected), (found, expected)


def test_sessions_spread_and_stick(placing: Placing) -> None:
    """Three turns of 24 sessions one request at a time, then the first of 20 others four at a time, all behind one
    system prompt. (Where a worker is busy a turn may well be quicker elsewhere: only its hits are promised then.)"""
    system = random_prompt(1, 5 * BLOCK)
    # A worker without the system prompt would have to import it, which speaks against it more than a session does.
    used: set[str] = set()
    for number in range(10):
        at_once = in_turn(placing, [[*system, 1000 + number, other] for other in range(1000, 1008)], 8, f"all {number}")
        used |= {worker for served in at_once for worker in (served.prefill, served.decode)}
        if len(used) == 4:
            break
    assert len(used) == 4, "each worker holds the system prompt"

    prompts = [[*system, *random_prompt(1000 + number, TURN)] for number in range(24)]
    turns = [in_turn(placing, prompts, 1, "one at a time")]
    for turn in (1, 2):
        prompts = [
            [*before.prompt, *before.token_ids, *random_prompt(1000 + 100 * turn + number, TURN)]
            for number, before in enumerate(turns[-1])
        ]
        turns.append(in_turn(placing, prompts, 1, "one at a time"))
        for served in turns[-1]:
            assert served.cached_tokens >= len(served.prompt) - TURN - BLOCK, "all but new text and a partial block"
    prompts = [[*system, *random_prompt(2000 + number, TURN)] for number in range(20)]
    at_once = in_turn(placing, prompts, 4, "four at a time")

    for role in ("prefill", "decode"):
        found = [[getattr(served, role) for served in session] for session in zip(*turns, strict=True)]
        begun = [first for first, *_ in found] + [getattr(served, role) for served in at_once]
        for worker_id in placing.pools(role):
            assert 0.2 * len(begun) <= begun.count(worker_id) <= 0.8 * len(begun), (role, begun)
        stuck = [sum(later == first for later in others) for first, *others in found]
        assert sum(stuck) >= STICKING * 2 * len(found), (role, stuck, found)


def test_shared_prefixes_are_computed_once(placing: Placing) -> None:
    """Sixteen at once behind 512 cold tokens, of sessions of both pairs of workers."""
    shared = random_prompt(2, 32 * BLOCK)
    served = in_turn(
        placing, [[*shared, 1000 + number, *random_prompt(number, 20)] for number in range(16)], 16, "shared"
    )
    assert sorted(each.cached_tokens for each in served) == [0] + 15 * [len(shared)]


def test_both_pools_are_used(placing: Placing) -> None:
    """Sessions that share nothing need one pool and a half: when they come again nearly all is still there."""
    prompts = [random_prompt(5000 + number, 20 * BLOCK + 5) for number in range(NUM_BLOCKS * 3 // 2 // 20)]
    in_turn(placing, prompts, 4, "filling")
    again = in_turn(placing, prompts, 4, "filling")
    num_hit = sum(served.cached_tokens for served in again)
    assert num_hit >= 0.9 * sum(map(len, prompts)), (num_hit, placing.cache()["evicted_blocks"], placing.cache())


def hash_of(way: str, number: int) -> int:
    """A seed that no other test uses."""
    return 100_000 + 1000 * len(way) + number
