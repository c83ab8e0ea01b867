"""`raydix models`: families, the sizes that fit, refusals, and the table of the documentation."""

from dataclasses import replace
from pathlib import Path

import pytest

from raydix.cli.main import main
from raydix.cli.models import lines, markdown_lines
from raydix.configs.choose import Machine
from raydix.engine.model.families import FAMILIES
from raydix.engine.model.families.refused import REFUSED

DOCUMENT = Path(__file__).parents[2] / "docs" / "guides" / "models.md"
SMALL = Machine(2, 24, free_gib=20)


def cells(machine: Machine, title: str) -> list[str]:
    """The columns of a family's row."""
    table = list(lines(machine))
    heading, row = table[2], next(line for line in table if line.startswith(f"{title}  "))
    ends = [at for at in range(2, len(heading)) if heading[at - 2 : at] == "  " and heading[at] != " "]
    return [row[start:end].strip() for start, end in zip(ends, [*ends[1:], None], strict=True)]


def test_sizes_stand_under_the_first_weights_with_which_they_fit() -> None:
    assert cells(SMALL, "Qwen 3") == ["0.6B, 1.7B, 4B, 8B", "", "14B", "32B"]
    assert cells(SMALL, "Qwen 3 MoE") == ["", "", "", "30B-A3B, 235B-A22B"]
    assert cells(replace(SMALL, free_gib=64), "Qwen 3 MoE") == ["30B-A3B", "", "", "235B-A22B"]
    assert cells(replace(SMALL, free_gib=1), "Qwen 3") == ["", "", "", "0.6B, 1.7B, 4B, 8B, 14B, 32B"]
    assert cells(SMALL, "gpt-oss") == ["", "20B", "", "120B"]
    assert cells(replace(SMALL, free_gib=64), "gpt-oss") == ["20B", "", "", "120B"]


def test_a_gpu_has_one_kind_of_weights_and_no_experts() -> None:
    card = Machine(16, 128, (23.6,), free_gib=120)
    assert cells(card, "Qwen 3") == ["0.6B, 1.7B, 4B, 8B", "14B, 32B"]
    assert cells(card, "Qwen 3 MoE") == ["", "experts run on CPUs only"]
    assert cells(card, "Qwen 3.5, dense") == ["", "recurrent layers run on CPUs only"]
    assert cells(card, "Gemma 4") == ["", "layers of different shapes run on CPUs only"]
    assert cells(card, "StableLM") == ["", "layer norms run on CPUs only"]


def test_every_family_and_every_refusal_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    assert all(family.title in printed for family in FAMILIES.values())
    assert all(each.title in printed and each.missing in printed for each in REFUSED)


def test_the_document_has_these_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """`raydix models --markdown` prints what belongs there."""
    assert main(["models", "--markdown"]) == 0
    assert capsys.readouterr().out.splitlines() == list(markdown_lines())
    document = DOCUMENT.read_text()
    tables = "\n".join(markdown_lines()).split("\n\n")
    assert len(tables) == 2 and all(table in document for table in tables)
