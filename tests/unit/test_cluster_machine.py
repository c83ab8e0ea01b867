"""Whatever happens to a cluster, in whatever order: each request is answered as if it had been alone, and all end.

See `cluster.Cluster` for what is real here. `builders.FakeModel` finds out who reads KV that is not its own.
"""

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raydix.engine.core.types import DraftSource, Role
from raydix.engine.core.worker.imports import KEEP_S
from tests.unit.cluster import AWAIT_TIMEOUT_S, PING_S, Channel, Cluster, Sizes

MAX_WORKERS = 4
MAX_PROMPT = 30
PROMPTS = st.tuples(
    st.integers(1, 20), st.integers(0, 1), st.lists(st.integers(0, 1), min_size=0, max_size=MAX_PROMPT - 20)
)


def prompt_of(num_shared: int, branch: int, rest: list[int]) -> tuple[int, ...]:
    """One of two families of prompts; those of a family begin alike."""
    return (*range(10 * branch, 10 * branch + num_shared), *rest)


class ClusterMachine(RuleBasedStateMachine):
    """A cluster and everything that may happen to it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_requests = 0
        self.is_disturbed = False
        """Whether anything happened after which somebody may have to wait until time passes."""

    @initialize(
        roles=st.lists(st.sampled_from(Role), min_size=1, max_size=MAX_WORKERS),
        num_blocks=st.sampled_from([10, 14, 200]),
        token_budget=st.integers(2, 16),
        segment_budget_bytes=st.sampled_from([0, 200, 1 << 20]),
        sources=st.sampled_from([(), (DraftSource.CLUSTER,), tuple(DraftSource)]),
    )
    def build(
        self,
        roles: list[Role],
        num_blocks: int,
        token_budget: int,
        segment_budget_bytes: int,
        sources: tuple[DraftSource, ...],
    ) -> None:
        sizes = Sizes(4, num_blocks, token_budget, max_requests=6)
        self.cluster = Cluster(roles, sizes, segment_budget_bytes, sources=sources)
        self.is_disturbed = num_blocks < 200

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=4), max_tokens=st.integers(1, 6))
    def request(self, prompts: list[tuple[int, int, list[int]]], max_tokens: int) -> None:
        named = {f"r{self.num_requests + index}": prompt_of(*prompt) for index, prompt in enumerate(prompts)}
        self.num_requests += len(named)
        self.cluster.request(named, max_tokens)

    @rule(seed=st.integers(0, 1 << 20), num_turns=st.integers(1, 30))
    def go_on(self, seed: int, num_turns: int) -> None:
        random = Random(seed)
        for _ in range(num_turns):
            self.cluster.turn(random)

    @precondition(lambda self: self.cluster.mail)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        self.cluster.deliver(data.draw(st.sampled_from(list(self.cluster.mail))))

    @precondition(lambda self: self._calls_and_tokens())
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A call of a worker, or tokens, are lost."""
        self.is_disturbed = True
        self.cluster.lose(data.draw(st.sampled_from(self._calls_and_tokens())))

    def _calls_and_tokens(self) -> list[Channel]:
        return [channel for channel in self.cluster.mail if channel[0] in ("calls", "tokens")]

    @precondition(lambda self: self.cluster.active)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.cluster.leave(data.draw(st.sampled_from(list(self.cluster.active))))

    @rule(data=st.data(), loses_mail=st.booleans(), role=st.sampled_from(Role))
    def kill_or_restart(self, data: st.DataObject, loses_mail: bool, role: Role) -> None:
        worker = data.draw(st.sampled_from(list(self.cluster.workers.values())))
        self.is_disturbed = True
        if worker.is_alive:
            self.cluster.kill(worker.worker_id, loses_mail)
        else:
            self.cluster.start_worker(worker.worker_id, role, worker.epoch + 1)

    @rule()
    def restart_manager(self) -> None:
        self.is_disturbed = True
        self.cluster.restart_manager()

    @precondition(lambda self: len(self.cluster.manager.directory.stock.segments) > 0)
    @rule(data=st.data())
    def lose_segment(self, data: st.DataObject) -> None:
        self.is_disturbed = True
        manager = self.cluster.manager
        manager.unreadable.add(data.draw(st.sampled_from(sorted(manager.directory.stock.segments._segments))))

    @rule(data=st.data(), is_stalled=st.booleans())
    def stall(self, data: st.DataObject, is_stalled: bool) -> None:
        """A worker does nothing for a while."""
        worker_id = data.draw(st.sampled_from(list(self.cluster.workers)))
        (self.cluster.stall if is_stalled else self.cluster.resume)(worker_id)

    @precondition(lambda self: any(generation.prefill for generation in self.cluster.active.values()))
    @rule(data=st.data(), seed=st.integers(0, 1 << 20), num_turns=st.integers(1, 100))
    def stall_for_long(self, data: st.DataObject, seed: int, num_turns: int) -> None:
        """A worker that has something to do does nothing for so long that others take over."""
        busy = sorted({generation.prefill for generation in self.cluster.active.values() if generation.prefill})
        self.cluster.stall(data.draw(st.sampled_from(busy)))
        random = Random(seed)
        for _ in range(num_turns):
            self.cluster.turn(random)
        self.cluster.ping()
        self.cluster.pass_time(AWAIT_TIMEOUT_S)

    @rule(data=st.data(), num_pings=st.integers(1, 5))
    def fall_silent(self, data: st.DataObject, num_pings: int) -> None:
        """A worker works, and nobody hears its heartbeats and answers for a while."""
        worker_id = data.draw(st.sampled_from(list(self.cluster.workers)))
        self.cluster.mute(worker_id)
        self._let_requests_be_late(num_pings * PING_S)
        for _ in range(num_pings):
            self.cluster.pass_time(PING_S)
            self.cluster.ping()
        if data.draw(st.booleans()):
            self.cluster.unmute(worker_id)

    @rule(data=st.data(), count=st.integers(1, 3))
    def cannot_send(self, data: st.DataObject, count: int) -> None:
        """A worker's next segments are not sent."""
        data.draw(st.sampled_from(list(self.cluster.workers.values()))).num_unsent = count

    @rule(seconds=st.sampled_from([0.1, 6.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self._let_requests_be_late(seconds)
        self.cluster.pass_time(seconds)

    def _let_requests_be_late(self, seconds: float) -> None:
        """A worker forgets what has overtaken a request, if the request or its admission is on its way for long."""
        is_on_its_way = any(channel[0] in ("from manager", "found", "calls") for channel in self.cluster.mail)
        self.is_disturbed |= seconds > KEEP_S and is_on_its_way

    @rule()
    def ping(self) -> None:
        self.cluster.ping()

    @invariant()
    def check(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.check_integrity()

    def teardown(self) -> None:
        """What is dead comes back, what is stalled goes on, and everything ends; undisturbed, it does so at once."""
        if not hasattr(self, "cluster"):
            return
        for worker in list(self.cluster.workers.values()):
            self.cluster.resume(worker.worker_id)
            self.cluster.unmute(worker.worker_id)
            if not worker.is_alive:
                self.cluster.start_worker(worker.worker_id, worker.role, worker.epoch + 1)
        self.cluster.drain(Random(self.num_requests))
        assert len(self.cluster.ended) == self.num_requests
        is_disturbed = self.is_disturbed or self.cluster.num_silent
        assert is_disturbed or self.cluster.num_timeouts == 0, "somebody waited in vain"


TestCluster = pytest.mark.no_cover(ClusterMachine.TestCase)
TestCluster.settings = settings(max_examples=100, stateful_step_count=30)
