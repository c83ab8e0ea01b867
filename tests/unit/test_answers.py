"""The pages that answer one question each: their figures, and README's, are those of `benchmarks/results`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/answers").glob("*.md"))
MOST_LINES = 45


def page(name: str) -> str:
    return (ROOT / f"docs/answers/{name}.md").read_text()


def result(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def row(document: str, name: str) -> list[str]:
    """The cells behind the first one of the table's row of this name."""
    [found] = re.findall(rf"^\| {re.escape(name)}(?:, [^|]*)? \|(.*)\|$", document, re.M)
    return [cell.strip() for cell in found.split("|")]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_short_and_has_its_measurement_and_its_command(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert re.findall(r"^## (.*)", text, re.M) == ["Measured", "Try it"]
    assert "```sh\n" in text.partition("## Try it")[2]
    assert f"](docs/answers/{path.name})" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "circumstance", "title"),
    [
        ("drafts", "again, cached, with drafts", "again, with drafts"),
        ("drafts", "again, streamed, with drafts", None),
        ("same-answer", "in a crowd, with hand-overs", None),
        ("same-answer", "again, cached, with drafts", None),
        ("same-answer", "again, streamed, with drafts", None),
        ("same-answer", "after a restart, from disk", None),
    ],
)
def test_answers_were_compared_as_the_pages_say(name: str, circumstance: str, title: str | None) -> None:
    [found] = [each for each in result("exact")["circumstances"] if each["circumstance"] == circumstance]
    assert not found["errors"]
    figures = [found["answers"], len(found["differing"]), found["counts"]["cached_tokens"]]
    figures += [found["counts"]["drafted_tokens"]] if name == "drafts" else []
    assert row(page(name), title or circumstance) == [f"{figure:,}" for figure in figures]


def test_workers_were_killed_as_the_page_says() -> None:
    [found] = [each for each in result("exact")["circumstances"] if each["circumstance"] == "while workers are killed"]
    kills, failovers = found["counts"]["kills"], found["counts"]["failovers"]
    words = f"{found['answers']} answers, {kills} workers killed, {failovers} failovers, none differs"
    assert words in " ".join(page("restarts").split()) and not found["differing"]


def test_prompts_stalled_streams_as_the_page_says() -> None:
    found = result("stall")
    assert (found["streams"], found["prompt"]) == (8, 2048)
    for budget, name in (("128", "128"), ("2048", "2,048")):
        gap, first = row(page("long-prompts"), name)
        assert gap == f"{found['budgets'][budget]['longest_gap_ms']:.0f} ms"
        assert int(re.sub(r"\D", "", first)) == round(found["budgets"][budget]["prompt_ttft_s"] * 1000)


@pytest.mark.parametrize("what", ["decode node drained", "decode node added"])
def test_nodes_changed_as_the_page_says(what: str) -> None:
    [found] = [each for each in result("nodes")["disturbances"] if each["what"] == what]
    streams, broken, gap, rates = row(page("upgrades"), what)
    assert (int(streams), int(broken.split()[0])) == (found["streams"], found["broken"])
    assert gap == f"{found['longest_gap_s']:.1f} s" and found["identical"] == found["streams"]
    assert rates == f"{found['hit_rate_before']:.0%}, {found['hit_rate_after']:.0%}".replace("%", " %")


@pytest.mark.parametrize("workload", ["edits", "agents", "retry", "chats"])
def test_drafts_are_as_quick_as_the_page_says(workload: str) -> None:
    figure = result("speculation")["speed"][workload]["1"]["times_as_fast"]["median"]
    assert f"{figure:.2f} " in " ".join(page("drafts").split())


def test_the_readme_says_the_same() -> None:
    text = (ROOT / "README.md").read_text()
    stall, circumstances = result("stall")["budgets"], result("exact")["circumstances"]
    gaps = [round(stall[budget]["longest_gap_ms"]) for budget in ("128", "2048")]
    assert f"is {gaps[0]} ms instead of {gaps[1]}" in text
    drafted = sum(each["answers"] for each in circumstances if "drafts" in each["circumstance"])
    assert f"0 of {drafted} answers differ" in text
    [killed] = [each["counts"] for each in circumstances if "kills" in each["counts"]]
    assert f"{killed['kills']} workers killed, {killed['failovers']} failovers" in text
    [drained] = [each for each in result("nodes")["disturbances"] if each["what"] == "decode node drained"]
    assert f"{drained['streams']} streams, none broken" in text and drained["broken"] == 0
