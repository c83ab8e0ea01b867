"""Sets of JSON Schemas with valid and invalid texts for each: made ones, JSON-Schema-Test-Suite, files of a folder."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from benchmarks.made_instances import Instances, Schema, make_instances, text_of
from benchmarks.made_schemas import made_schema

SUITE_DRAFT = "draft2020-12"
LEFT_OUT = ("content.json", "format.json", "refRemote.json", "vocabulary.json")
"""Files of the suite about annotations that grammars enforce, and about documents elsewhere."""


@dataclass(frozen=True, slots=True)
class Case:
    """A schema, and JSON texts that are to be accepted and rejected."""

    schema: str
    valid: list[str] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)


def made_cases(count: int, num_instances: int) -> Iterator[Case]:
    for number in range(count):
        yield _case(made_schema(number), number, num_instances)


def folder_cases(folder: Path, max_kib: float, num_instances: int) -> Iterator[Case]:
    """The schemas of a folder's files in a fixed random order, but for long ones and for those that refer to other
    documents."""
    paths = sorted(folder.rglob("*.json"))
    Random(0).shuffle(paths)
    for number, path in enumerate(paths):
        schema = json.loads(path.read_text())
        if len(text_of(schema)) <= 1024 * max_kib and not refers_outside(schema):
            yield _case(schema, number, num_instances)


def suite_cases(suite: Path) -> Iterator[Case]:
    """The tests of JSON-Schema-Test-Suite for its newest finished draft in a fixed random order, with the suite's own
    judgements."""
    paths = sorted((suite / "tests" / SUITE_DRAFT).glob("*.json"))
    groups = [group for path in paths if path.name not in LEFT_OUT for group in json.loads(path.read_text())]
    Random(0).shuffle(groups)
    for group in groups:
        texts: dict[bool, list[str]] = {True: [], False: []}
        for test in group["tests"]:
            texts[test["valid"]].append(text_of(test["data"]))
        yield Case(text_of(group["schema"]), texts[True], texts[False])


def refers_outside(schema: Any) -> bool:
    """True if any reference leads out of the schema."""
    if isinstance(schema, list):
        return any(map(refers_outside, schema))
    if not isinstance(schema, dict):
        return False
    reference = schema.get("$ref")
    leads_out = isinstance(reference, str) and not reference.startswith("#")
    return leads_out or any(map(refers_outside, schema.values()))


def judge(schema: Schema) -> Callable[[object], bool]:
    """Return a function that says if a value is valid, formats included, by `jsonschema`."""
    kind = validator_for(schema, default=Draft202012Validator)
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    return lambda value: bool(validator.is_valid(value))


def _case(schema: Schema, seed: int, num_instances: int) -> Case:
    try:
        instances = make_instances(schema, judge(schema), seed, num_instances)
    except Exception:  # of any kind: some published schemas are beyond `jsonschema`, and are compiled all the same
        instances = Instances([], [])
    return Case(text_of(schema), instances.valid, instances.invalid)
