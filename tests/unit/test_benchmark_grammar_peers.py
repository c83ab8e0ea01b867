"""Texts made for schemas, walks through a grammar, and the figures of the comparison of grammar libraries."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.distribution import distribution
from benchmarks.grammar_peers import Outcome, report, table
from benchmarks.made_instances import make_instances
from benchmarks.made_schemas import made_schema
from benchmarks.peers.process import Process, WorkerError
from benchmarks.peers.schemas import folder_cases, judge, made_cases, refers_outside, suite_cases
from benchmarks.peers.serve import follow, introduction

SHORT = {"type": "object", "properties": {"b": {"type": "integer", "minimum": 3}, "a": {}}, "required": ["a", "b"]}


def never(value: object) -> bool:
    return False


def test_made_texts_are_what_the_validator_says() -> None:
    num_valid = num_invalid = 0
    for number in range(60):
        schema = made_schema(number)
        is_valid = judge(schema)
        made = make_instances(schema, is_valid, number, 4)
        assert all(is_valid(json.loads(text)) for text in made.valid)
        assert not any(is_valid(json.loads(text)) for text in made.invalid)
        assert len(set(made.valid)) == len(made.valid) <= 4 and len(made.invalid) <= 4
        num_valid, num_invalid = num_valid + len(made.valid), num_invalid + len(made.invalid)
    assert num_valid > 60 * 3 and num_invalid > 60 * 3, "most schemas get what is asked for"


def test_made_texts_have_the_schemas_order_and_are_the_same_each_time() -> None:
    made = make_instances(SHORT, judge(SHORT), 1, 5)
    assert made.valid and all(list(json.loads(text))[:2] == ["b", "a"] for text in made.valid)
    assert made == make_instances(SHORT, judge(SHORT), 1, 5)
    assert make_instances(SHORT, never, 1, 5).valid == []


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"properties": {f"p{number}": {"$ref": "#"} for number in range(30)}},
        {"type": "array", "minItems": 10_000},
    ],
)
def test_endless_schemas_come_to_an_end(schema: dict[str, object]) -> None:
    assert len(make_instances(schema, lambda value: True, 0, 3).valid) <= 3


def test_cases_of_a_folder_are_short_and_whole_in_themselves(tmp_path: Path) -> None:
    schemas = {"good": SHORT, "long": {**SHORT, "title": "x" * 2000}, "far": {"items": [{"$ref": "other.json"}]}}
    for name, schema in schemas.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(schema))
    [case] = folder_cases(tmp_path, 1, 3)
    assert json.loads(case.schema) == SHORT and case.valid and case.invalid
    assert refers_outside(schemas["far"]) and not refers_outside({"$ref": "#/$defs/a"})
    assert len(list(made_cases(3, 2))) == 3


def test_cases_of_the_suite_keep_its_judgements(tmp_path: Path) -> None:
    folder = tmp_path / "tests/draft2020-12"
    folder.mkdir(parents=True)
    tests = [{"data": 1, "valid": True}, {"data": "ü", "valid": False}]
    for name in ("type.json", "format.json"):
        (folder / name).write_text(json.dumps([{"schema": {"type": "integer"}, "tests": tests}]))
    [case] = suite_cases(tmp_path)
    assert (case.schema, case.valid, case.invalid) == ('{"type": "integer"}', ["1"], ['"ü"'])


class Counting:
    """An answer of ascending tokens, complete at 3."""

    def __init__(self) -> None:
        self.at = 0
        self.num_masks = 0

    def fill_mask(self) -> None:
        self.num_masks += 1

    def consume(self, token_id: int) -> bool:
        self.at += 1
        return token_id == self.at

    def is_complete(self) -> bool:
        return self.at == 3


class CountingLibrary:
    version = "1"
    settings: dict[str, Any] = {}  # noqa: RUF012
    tokenizer_s = 0.5

    def compile(self, schema: str) -> Callable[[], Counting]:
        if schema != "count":
            raise ValueError("cannot")
        return Counting

    def begin(self, compiled: Callable[[], Counting]) -> Counting:
        return compiled()


def test_walks_end_at_a_forbidden_token_and_are_accepted_where_complete() -> None:
    library = CountingLibrary()
    reply = follow(library, "count", [[1, 2, 3], [1, 2]], [[1, 3, 3]])
    assert [walk["is_accepted"] for walk in reply["timed"] + reply["untimed"]] == [True, False, False]
    assert [len(walk["mask_s"]) for walk in reply["timed"] + reply["untimed"]] == [3, 2, 0]
    assert [len(walk["consume_s"]) for walk in reply["timed"] + reply["untimed"]] == [3, 2, 2]
    assert follow(library, "else", [], []) == {"refused": "ValueError: cannot"}
    assert introduction(library)["tokenizer_s"] == 0.5


def walk(*masks: float, is_accepted: bool = True) -> dict[str, object]:
    return {"is_accepted": is_accepted, "mask_s": list(masks), "consume_s": [1e-6]}


def test_times_are_of_what_both_take() -> None:
    good = Outcome(2e-3, [walk(1e-6, 3e-6), walk(5e-6)], [True, True], [False])
    half = Outcome(4e-3, [walk(2e-6), walk(9e-6, is_accepted=False)], [True, False], [True])
    outcomes = {
        "llguidance": [good, good, Outcome(refused="no")],
        "xgrammar": [half, Outcome(failed="its process ended"), good],
    }
    figures = report(outcomes)
    first, second = figures["llguidance"], figures["xgrammar"]
    assert (figures["schemas"], figures["compiled_by_both"]) == (3, 1)
    assert (first["compiled"], first["refused"], first["failed"], first["compiled_and_never_wrong"]) == (2, 1, 0, 2)
    assert (second["compiled"], second["failed"], second["compiled_and_never_wrong"]) == (2, 1, 1)
    assert (second["wrongly_rejected"], second["valid_texts"]) == (1, 4)
    assert (second["wrongly_accepted"], second["invalid_texts"]) == (1, 2)
    assert (first["masks"], first["mask_us_max"], first["first_mask_us_p50"]) == (2, pytest.approx(3), pytest.approx(1))
    assert (second["masks"], second["compile_ms_max"]) == (1, pytest.approx(4))


def test_the_table_has_a_column_for_each_library_and_set() -> None:
    figures = report({"llguidance": [Outcome(refused="no")], "xgrammar": [Outcome(valid=[True])]})
    libraries = {name: {"tokenizer_s": 0.25} for name in ("llguidance", "xgrammar")}
    lines = table({"libraries": libraries, "sets": {"made": figures}}).splitlines()
    assert lines[0] == "|  | made, llguidance | made, xgrammar |"
    assert lines[2] == "| schemas compiled | 0.0% of 1 | 100.0% of 1 |"
    assert "| mask, µs | – | – |" in lines
    assert len({line.count("|") for line in lines}) == 1


def test_distribution() -> None:
    assert distribution("a", [3.0, 1.0, 2.0], 10) == {"a_p50": 20, "a_p99": 30, "a_max": 30}
    assert distribution("a", [], 1) == {}


ECHO = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request["say"] == "end":
        break
    print(json.dumps({request["say"]: 1}), flush=True)
"""


def test_a_process_answers_fails_and_ends(tmp_path: Path) -> None:
    process = Process([sys.executable, "-c", ECHO], tmp_path / "log", {})
    try:
        assert process.ask({"say": "hello"}, 60) == {"hello": 1}
        with pytest.raises(WorkerError, match=r"^1$"):
            process.ask({"say": "error"}, 60)
        with pytest.raises(WorkerError, match="its process"):
            process.ask({"say": "end"}, 60)
    finally:
        process.close()
    assert not process.is_open and process.process.returncode is not None
