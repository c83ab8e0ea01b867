"""What a worker tells of its costs."""

from raydix.actors.worker.measurements import FIRST_STEPS, Measurements
from raydix.engine.core.costs import StepShape, WorkerCosts
from raydix.engine.core.types import Role
from raydix.engine.model.engine import StepResult
from tests.unit.test_isolation import make_engine

PROMPT = StepShape(num_prefill_tokens=100, num_decodes=0, num_pairs=5050.0)
STEP_S = 0.1


def test_the_first_steps_of_an_engine_teach_no_cost() -> None:
    """They take many times as long, since they read the weights and touch memory for the first time."""
    measurements, (engine, _) = Measurements("worker", Role.MIXED, WorkerCosts()), make_engine()
    for _ in range(FIRST_STEPS):
        measurements.step(StepResult(shape=PROMPT, step_s=20 * STEP_S))
    assert measurements.state(engine).costs is None, "the worker's peers are believed until then"

    measurements.step(StepResult(shape=PROMPT, step_s=STEP_S))
    costs = measurements.state(engine).costs
    assert costs is not None and costs.prefill_s(100, 0, 256, 0) < 1.2 * STEP_S
    assert measurements.num_prefill_tokens == (FIRST_STEPS + 1) * 100, "all of them are counted"
