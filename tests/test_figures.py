"""The figures of the documentation are those that their sources draw, and the packages in them those that there are."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.figures import house
from docs.figures.__main__ import FIGURES
from docs.figures.svg import Box, Figure


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_a_figure_is_what_its_source_draws(path: Path) -> None:
    assert path.read_text() == FIGURES[path](), "draw it again: make figures"


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_a_figure_has_colours_for_light_and_dark_pages_and_no_outside_parts(path: Path) -> None:
    text = path.read_text()
    ElementTree.fromstring(text)
    light, dark = text.split("@media (prefers-color-scheme: dark)")
    for kind in set(re.findall(r'class="([a-z-]+)', text)) - {"title"}:
        assert f".{kind}" in light
        assert f".{kind}" in dark
    assert "href" not in text


def test_every_package_has_its_place_once() -> None:
    there = {path.parent.name for path in house.ROOT.glob("trinity_sync/*/__init__.py")} | {"errors"}
    drawn = [name for layer in house.layers() for name in layer] + house.BESIDE
    assert sorted(drawn) == sorted(there)
    assert house.PURPOSES.keys() == there


def test_the_arrows_of_the_house_lead_to_all_that_is_imported() -> None:
    edges = house.imports()
    arrows = house.reduced(edges)

    def reach(name: str) -> set[str]:
        return arrows[name].union(*(reach(below) for below in arrows[name]))

    assert all(below <= reach(name) for name, below in edges.items())


def test_words_that_do_not_fit_are_refused() -> None:
    figure = Figure(200, 100, "a test")
    with pytest.raises(ValueError, match="does not fit"):
        figure.box(Box(0, 0, 60, 40), "box", "more words than there is room for")
    with pytest.raises(ValueError, match="leaves the figure"):
        figure.note(150, 50, "too far to the right")
