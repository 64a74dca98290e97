"""The scripts of docs/figures draw the pages' pictures, for light and dark pages."""

import importlib
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.site.pages import DOCS, PAGES

FIGURES, IMAGES = DOCS / "figures", DOCS / "images"
SHOWN = re.compile(r"!\[([^\]]*)\]\((?:docs/|\.\./)?images/([\w.]+)\)")


@pytest.fixture(autouse=True)
def scripts_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FIGURES))


@pytest.mark.parametrize("script", ["alignment", "losses", "on_policy", "overview", "projection", "teachers", "step"])
def test_a_script_draws_the_pictures_of_its_name(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: a script fails after a change of the package; a picture has colours for white pages only."""
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--output", str(tmp_path)])
    runpy.run_path(str(FIGURES / f"{script}.py"), run_name="__main__")
    drawn = {file.name for file in tmp_path.iterdir()}
    assert drawn == {file.name for file in IMAGES.glob(f"{script}*") if file.name != "on_policy_accuracy.png"}
    for file in tmp_path.glob("*.svg"):
        assert "prefers-color-scheme:dark" in file.read_text(encoding="utf-8")


def test_pictures_on_pages_fit_dark_ones_too() -> None:
    files = {file.name for file in IMAGES.glob("*.svg")} - {"session.svg"}
    assert files
    assert [name for name in files if "prefers-color-scheme:dark" not in (IMAGES / name).read_text("utf-8")] == []


def test_every_picture_is_on_a_page_and_described() -> None:
    """Bugs: an unused picture; a picture without a description for readers who cannot see it."""
    descriptions = {name: text for page in PAGES for text, name in SHOWN.findall(page.read_text(encoding="utf-8"))}
    assert descriptions.keys() == {file.name for file in IMAGES.iterdir()}
    assert [name for name, text in descriptions.items() if len(text) < 30] == []


def test_cells_of_each_loss_give_the_value_of_the_library() -> None:
    """Bug: a picture shows a comparison that the loss does not make. Its cells follow the definitions."""
    cells = importlib.import_module("loss_cells")
    for comparison in cells.comparisons(cells.Place()):
        if comparison.value is not None:
            assert cells.value_of(comparison) == pytest.approx(comparison.value, rel=1e-12), comparison.loss
