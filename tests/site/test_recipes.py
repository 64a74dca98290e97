"""docs/recipes.md: our figures are in the linked results."""

import re

import pytest

from tests.site.pages import DOCS

ROWS = [
    line.split(" | ")
    for line in (DOCS / "recipes.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| [")
]
OURS = [
    (recipe, figure, results)
    for recipe, _, _, ours in ROWS
    for part, results in re.findall(r"([^()]*)\(\[[\w -]+\]\((\.\./benchmarks/results/\w+\.md)\)\)", ours)
    for figure in re.findall(r"[−+]?\d+\.\d+%?", part)
]


def test_each_recipe_says_whose_figures_it_has() -> None:
    assert len(ROWS) > 10
    assert {recipe for recipe, *_ in OURS} >= {recipe for recipe, _, _, ours in ROWS if re.search(r"\d\.\d", ours)}


@pytest.mark.parametrize(("recipe", "figure", "results"), OURS)
def test_a_figure_of_ours_is_in_the_results(recipe: str, figure: str, results: str) -> None:
    assert figure in (DOCS / results).resolve().read_text(encoding="utf-8")
