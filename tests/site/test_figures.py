"""The scripts of docs/figures still draw what the pages show, for light and for dark pages."""

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
    """Bug: a change of what a script reads, found by whoever draws a picture next; a colour for white pages alone."""
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
    """Bug: a picture that no page shows any more, or one that a reader who cannot see it knows nothing of."""
    shown = {name: text for page in PAGES for text, name in SHOWN.findall(page.read_text(encoding="utf-8"))}
    assert shown.keys() == {file.name for file in IMAGES.iterdir()}
    assert [name for name, text in shown.items() if len(text) < 30] == []


def test_cells_of_each_loss_give_the_value_of_the_library() -> None:
    """The cells are made from the definitions. Bug: a picture of another comparison than the loss's."""
    cells = importlib.import_module("loss_cells")
    for found in cells.comparisons(cells.Place()):
        if found.value is not None:
            assert cells.value_of(found) == pytest.approx(found.value, rel=1e-12), found.loss
