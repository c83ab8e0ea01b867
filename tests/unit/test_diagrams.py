"""The diagrams of the documents: each is the one that the program draws, and everybody can read it on every screen."""

import re
import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = runpy.run_path(str(ROOT / "docs/diagrams.py"))
NAMES = sorted(PROGRAM["DIAGRAMS"])
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
SVG = "{http://www.w3.org/2000/svg}"
PHONE = 328
"""Pixels that a page leaves an image on a screen of 360."""
SMALLEST = 10
"""Pixels of the smallest letters there."""


def written(name: str) -> str:
    return (ROOT / f"docs/images/{name}.svg").read_text()


def test_there_are_no_others() -> None:
    assert sorted(path.stem for path in (ROOT / "docs/images").glob("*.svg")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_diagram_is_the_one_that_the_program_draws(name: str) -> None:
    assert written(name) == PROGRAM["DIAGRAMS"][name]().svg(), "python docs/diagrams.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_document_shows_it_with_words_for_those_who_do_not_see_it(name: str) -> None:
    shown = [
        words for each in DOCUMENTS for words in re.findall(rf"!\[(.*)\]\(\S*images/{name}\.svg\)", each.read_text())
    ]
    assert shown and all(shown)


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_shows_and_loads_nothing(name: str) -> None:
    root = ElementTree.fromstring(written(name))
    assert root.get("role") == "img"
    named = {each.get("id"): each.text for each in root if each.tag in (f"{SVG}title", f"{SVG}desc")}
    assert all(named[part] for part in (root.get("aria-labelledby") or "").split()) and len(named) == 2
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|<script|<image", written(name))


@pytest.mark.parametrize("name", NAMES)
def test_its_letters_are_large_enough_on_a_phone(name: str) -> None:
    root = ElementTree.fromstring(written(name))
    wide = float((root.get("viewBox") or "").split()[2])
    sizes = [float(size) for size in re.findall(r"(?:font: |font-size: )(\d+)px", written(name))]
    assert len(sizes) == 2 and min(sizes) * PHONE / wide >= SMALLEST


@pytest.mark.parametrize("name", NAMES)
def test_its_colours_follow_light_and_dark(name: str) -> None:
    light, dark = written(name).split("@media (prefers-color-scheme: dark)")
    colours = re.compile(r"(--[\w-]+): (#\w+)")
    used = set(re.findall(r"var\((--[\w-]+)\)", written(name)))
    first, second = dict(colours.findall(light)), dict(colours.findall(dark))
    assert used == first.keys() == second.keys()
    assert [key for key in first if first[key] == second[key]] == []


@pytest.mark.parametrize(
    "drawn",
    [
        lambda: PROGRAM["text"](430, 20, "too far to the right"),
        lambda: PROGRAM["box"](0, 0, 40, 20, "plain", "a long title"),
    ],
)
def test_words_that_do_not_fit_are_refused(drawn: Any) -> None:
    with pytest.raises(ValueError, match=r"reaches|takes"):
        drawn()
