"""The prompts of `benchmarks.speculation` with the default model's tokenizer."""

import pytest

from benchmarks.drafting.questions import Question, QuestionReader
from benchmarks.drafting.workloads import WORKLOADS
from raydix.engine.core.errors import StartupError
from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model


@pytest.fixture(scope="module")
def questions() -> dict[str, list[Question]]:
    try:
        reader = QuestionReader(resolve_model(DEFAULT_MODEL), 4096)
    except StartupError as error:
        pytest.skip(str(error))
    return {name: reader.questions(workload) for name, workload in WORKLOADS.items()}


def test_prompts_are_as_long_as_real_ones(questions: dict[str, list[Question]]) -> None:
    lengths = [len(each.prompt) for asked in questions.values() for each in asked]
    assert min(lengths) >= 300 and max(lengths) <= 1500


def test_forms_and_predictions_arrive(questions: dict[str, list[Question]]) -> None:
    assert all(each.sampling.grammar is not None for each in questions["extraction"])
    assert questions["agents"][0].sampling.grammar is not None, "this step must be a call"
    for edit, predicted in zip(questions["edits"], questions["edits-predicted"], strict=True):
        assert not edit.prediction and edit.prompt == predicted.prompt
        assert stands_in(predicted.prediction[20:-5], predicted.prompt)


def stands_in(part: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return any(whole[place : place + len(part)] == part for place in range(len(whole)))


def test_a_step_of_an_agent_begins_with_the_steps_before(questions: dict[str, list[Question]]) -> None:
    first, second, third, *_ = (each.prompt for each in questions["agents"])
    assert len(first) < len(second) < len(third) and second[:700] == first[:700] == third[:700]
