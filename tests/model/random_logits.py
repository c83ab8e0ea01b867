"""A model with random logits over a real tokenizer's vocabulary, whose answers are as wild as can be."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from raydix.engine.core.settings import SchedulerLimits
from raydix.engine.core.types import Assignment, FinishReason, Grammar, Sampling, Stage, TokenEvent
from raydix.engine.core.worker.block_pool import BlockPool
from raydix.engine.core.worker.drafts.drafter import Drafter
from raydix.engine.core.worker.drafts.rows import Row, rows_of, sampled_by_request
from raydix.engine.core.worker.step import RunnerOutput, SchedulerOutput
from raydix.engine.model.engine import Engine
from raydix.engine.model.grammars import Grammars
from raydix.engine.model.sampler import sample_requests
from tests.unit.builders import FakeModel

BLOCK_SIZE = 16
PROMPT = (1, 2, 3)


class RandomModel(FakeModel):
    """Logits that depend on a request's tokens alone, normal ones, and `favoured` tokens more likely by a few nats."""

    def __init__(self, pool: BlockPool, grammars: Grammars, vocab_size: int, favoured: Iterable[int] = ()) -> None:
        super().__init__(pool)
        self.grammars = grammars
        self.vocab_size = vocab_size
        self.offset = torch.zeros(vocab_size)
        self.offset[list(favoured)] = 5.0
        self.num_steps = 0

    def run(self, output: SchedulerOutput) -> RunnerOutput:
        """Attend as the fake model does, then sample from the random logits."""
        self.num_steps += 1
        attended = super().run(output)
        rows = rows_of(output.chunks)
        masking = self.grammars.begin(rows)
        masks = None if masking is None else masking.result()
        if not rows:
            return attended
        tokens = sample_requests(torch.stack([self.logits(row) for row in rows]), rows, masks)
        refused = {} if masks is None else {rows[row].request_id: why for row, why in masks.dead_ends.items()}
        sampled = sampled_by_request(output.chunks, tokens, () if masks is None else masks.ended)
        return RunnerOutput(sampled, attended.scores, refused)

    def logits(self, request: Row) -> torch.Tensor:
        seed = hash((request.assignment.sampling.seed, *request.token_ids)) & (2**63 - 1)
        return torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(seed)) + self.offset


def make_engine(
    grammars: Grammars,
    vocab_size: int,
    favoured: Iterable[int] = (),
    *,
    num_blocks: int = 4000,
    max_requests: int = 64,
    drafter: Drafter | None = None,
) -> Engine:
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    model = RandomModel(pool, grammars, vocab_size, favoured)
    limits = SchedulerLimits(512, max_requests)
    return Engine(model, model, pool, limits, num_blocks * BLOCK_SIZE, "random", grammars=grammars, drafter=drafter)


def assignment(name: str, grammar: Grammar | None, **changes: object) -> Assignment:
    """A request at temperature 1."""
    params = Sampling(max_tokens=400, seed=sum(name.encode()), stop_token_ids=(2,), grammar=grammar)
    return Assignment(name, 0, Stage.WHOLE, PROMPT, len(PROMPT), replace(params, **changes), "ingress")  # type: ignore[arg-type]


def wait_for_grammars(engine: Engine) -> list[TokenEvent]:
    """Wait until every grammar asked for is compiled; returns the ends of the requests whose grammar cannot be."""
    refusals: list[TokenEvent] = []
    assert engine.grammars is not None
    engine.grammars.compiler.settle()
    refusals += engine.hear_of_grammars(0.0)
    return refusals


def run(engine: Engine, assignments: Sequence[Assignment]) -> dict[str, list[TokenEvent]]:
    """The events of each request, all submitted at once."""
    for each in assignments:
        engine.submit(each, 0.0)
    events: list[TokenEvent] = wait_for_grammars(engine)
    while (step := engine.step(0.0)) is not None:
        events += [*step.events, *step.failures]
    engine.scheduler.check_integrity()
    assert engine.pool.num_available == engine.pool.num_blocks
    found: dict[str, list[TokenEvent]] = {each.request_id: [] for each in assignments}
    for event in events:
        found[event.request_id].append(event)
    return found


def tokens_of(events: Iterable[TokenEvent]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


def finish_of(events: Sequence[TokenEvent]) -> FinishReason | None:
    return events[-1].finish
