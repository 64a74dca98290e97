"""Displays of a projection: panel, tables, samples and heat map."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console

from nemo_opd.alignment import pieces_of
from nemo_opd.alignment.roles import paired_roles
from nemo_opd.errors import ProjectionError
from nemo_opd.projection import Audit, ProjectionMatrix, audit, build_projection
from nemo_opd.projection.display import (
    KINDS,
    audit_lines,
    audit_table,
    counted_runs,
    heat_map,
    label,
    plot_samples,
    roles_table,
    sample_table,
    samples,
)
from tests.projection.conftest import SMALL
from tests.tokenizers_fixture import byte_level

PAIR = SMALL["three_digits"], SMALL["one_digit"]


@pytest.fixture(scope="module")
def matrix() -> ProjectionMatrix:
    return build_projection(*PAIR)


@pytest.fixture(scope="module")
def figures(matrix: ProjectionMatrix) -> Audit:
    return audit(*PAIR, matrix)


def rendered(renderable: object, width: int = 80) -> str:
    console = Console(width=width, file=StringIO())
    console.print(renderable)
    return console.file.getvalue()


def test_the_lines_of_a_header_fit_a_terminal(figures: Audit) -> None:
    """Catches lines that become too long with the figures of a large vocabulary."""
    large = replace(figures, special=replace(figures.special, exact=1234, total=6415))
    text = " ".join(audit_lines(large))
    assert max(map(len, audit_lines(large))) <= 76
    assert all(word in text for word in ("overlap", "1,234/6,415", "2-digit"))


def test_numerals_that_neither_side_has(figures: Audit) -> None:
    empty = replace(figures.digits[1], total=0, exact=0)
    lines = audit_lines(replace(figures, digits=(figures.digits[0], empty, empty)))
    assert "2-digit none on either side" in lines[1]


def test_tables_render_hostile_tokens() -> None:
    """Catches a token such as `[/b]` that rich reads as markup, which raises."""
    tokenizers = byte_level(400, eos="[/b]"), SMALL["sentencepiece"]
    matrix = build_projection(*tokenizers)
    text = rendered(audit_table(audit(*tokenizers, matrix)), 160)
    text += rendered(roles_table(paired_roles(*tokenizers)), 160)
    text += rendered(sample_table(samples(matrix, *tokenizers)), 160)
    assert all(word in text for word in ("overlap", "partial UTF-8", "[/b]", "end_of_turn"))


def test_samples_are_rows_of_the_matrix(matrix: ProjectionMatrix) -> None:
    """Catches kinds out of order, repeated tokens, and a lack of exact or other rows. Oracle: the tokenizers."""
    rows = samples(matrix, *PAIR, count=4)
    kinds = list(dict.fromkeys(sample.kind for sample in rows))
    assert kinds == [kind for kind in KINDS if kind in kinds]
    assert {"numerals", "white space", "special", "CJK", "partial UTF-8"} <= set(kinds)
    assert len({sample.id for sample in rows}) == len(rows)
    numerals = [sample for sample in rows if sample.kind == "numerals"]
    assert [sample.exact for sample in numerals].count(True) == 2
    for sample in numerals:
        assert sample.token == repr(PAIR[0].convert_ids_to_tokens(sample.id))
        assert {entry.id: entry.weight for entry in sample.entries} == {
            t: pytest.approx(w)
            for t, w in zip(matrix.indices[sample.id].tolist(), matrix.weights[sample.id].tolist(), strict=True)
            if t >= 0
        }
        assert all(entry.token == repr(PAIR[1].convert_ids_to_tokens(entry.id)) for entry in sample.entries)


def test_samples_of_a_kind_that_is_all_exact() -> None:
    """Bug: half of the samples if all rows are exact."""
    tokenizer = SMALL["three_digits"]
    rows = samples(build_projection(tokenizer, tokenizer), tokenizer, tokenizer, count=3)
    assert [sample.kind for sample in rows].count("numerals") == 3
    assert all(sample.exact for sample in rows)


def test_runs_of_spaces_are_counted() -> None:
    assert counted_runs("a  b") == "a␣␣b"
    assert counted_runs("' " + " " * 25 + "x") == "'␣×26x"
    assert counted_runs(repr("\n" * 31)) == r"'\n×31'"
    assert counted_runs(repr("\t\t\n\n\n\n")) == r"'\t\t\n×4'"


def test_labels_use_what_the_font_has() -> None:
    """Bug: unknown characters are equal boxes. DejaVu has Cyrillic, but no CJK."""
    assert label("'да'") == "да"
    assert label("'東京'") == r"\u6771\u4eac"
    assert label(repr(" \t")) == r"␣\t"
    assert label("'$x^2$'") == "$x^2$"
    assert len(label(repr("x" * 90))) <= 20


def test_the_heat_map_shows_the_weights(matrix: ProjectionMatrix) -> None:
    """Catches swapped rows and columns, by the image's labels."""
    rows = samples(matrix, *PAIR, count=3)
    axes = heat_map(rows).axes[0]
    image = np.asarray(axes.images[0].get_array().filled(0))
    columns = list(dict.fromkeys(entry.id for sample in rows for entry in sample.entries))
    assert image.shape == (len(rows), len(columns))
    for row, sample in enumerate(rows):
        assert image[row].sum() == pytest.approx(sum(entry.weight for entry in sample.entries))
        for entry in sample.entries:
            assert image[row, columns.index(entry.id)] == pytest.approx(entry.weight)
    assert [text.get_text() for text in axes.get_xticklabels()] == [
        label(next(e.token for s in rows for e in s.entries if e.id == column)) for column in columns
    ]


def test_the_picture_is_whole_or_not_there(matrix: ProjectionMatrix, tmp_path: Path) -> None:
    plot_samples(samples(matrix, *PAIR, count=2), tmp_path / "map.png", "title $ with [markup]")
    assert matplotlib.image.imread(tmp_path / "map.png").std() > 0
    assert [file.name for file in tmp_path.iterdir()] == ["map.png"]
    with pytest.raises(ProjectionError, match=r"cannot write the heat map to .*nothing"):
        plot_samples([], tmp_path / "map.png" / "nothing.png")


def test_an_empty_sample_still_draws(tmp_path: Path) -> None:
    """Bug: a picture of no samples fails."""
    matrix = build_projection(*PAIR)
    assert samples(matrix, *PAIR, count=0) == []
    plot_samples([], tmp_path / "map.png")
    assert pieces_of(PAIR[0]).vocab_size == matrix.student_vocab_size
