"""Figures of the audit against published figures and independent counts."""

import numpy as np
import pytest

from nemo_opd.alignment import pieces_of
from nemo_opd.errors import ProjectionError
from nemo_opd.projection import Audit, Coverage, ProjectionMatrix, audit, build_projection, exact_map
from nemo_opd.projection.build import fit_warnings
from nemo_opd.projection.exact import exact_pairs
from tests.projection.conftest import SMALL
from tests.tokenizers_fixture import real_tokenizer


@pytest.mark.tokenizers
def test_published_overlap(llama_qwen: ProjectionMatrix) -> None:
    """Compare with methods.md §2.7: Qwen3–Llama .848; Llama's numerals have no exact partner for single digits."""
    figures = audit(real_tokenizer("llama3_1"), real_tokenizer("qwen3"), llama_qwen)
    assert figures.overlap == pytest.approx(0.848, abs=0.01)
    assert figures.digits == (Coverage(10, 10, 10), Coverage(100, 0, 100), Coverage(1000, 0, 1000))
    assert sum(figures.rows_by_pieces) == 128256


@pytest.mark.tokenizers
@pytest.mark.parametrize(
    ("student", "teacher", "published"),
    [
        ("qwen3", "gemma3", 0.632),
        ("qwen3", "gpt4o", 0.646),
        ("gemma3", "llama3_1", 0.674),
        ("llama3_1", "gpt4o", 0.798),
        ("gpt4o", "gemma3", 0.655),
    ],
)
def test_published_overlaps_of_pieces(student: str, teacher: str, published: float) -> None:
    """Bug: wrong pieces for a kind of token. From methods.md §2.7; gpt-oss has the pieces of gpt4o."""
    student_pieces, teacher_pieces = pieces_of(real_tokenizer(student)), pieces_of(real_tokenizer(teacher))
    pairs = exact_pairs(student_pieces, teacher_pieces, student_pieces.lengths > 0, teacher_pieces.lengths > 0)
    assert len(pairs) / min(student_pieces.vocab_size, teacher_pieces.vocab_size) == pytest.approx(published, abs=0.01)


def test_a_tokenizer_with_itself_is_fully_covered() -> None:
    figures = audit(SMALL["three_digits"], SMALL["three_digits"])
    assert (figures.overlap, figures.one_to_one) == (1.0, 1.0)
    assert {figures.whitespace.rate, figures.cjk.rate, figures.partial_utf8.rate, figures.special.rate} == {1.0}


def test_counts_of_a_small_pair() -> None:
    """Compare with counts over the rows by Python's string methods."""
    student, teacher = SMALL["three_digits"], SMALL["one_digit"]
    matrix = build_projection(student, teacher, top_k=2)
    figures = audit(student, teacher, matrix)
    pieces = pieces_of(student).as_list()
    lengths = [sum(i >= 0 for i in row) for row in matrix.indices.tolist()]
    assert figures.rows_by_pieces == tuple(lengths.count(n) for n in range(3))
    blank = [i for i, piece in enumerate(pieces) if piece and not piece.strip()]
    assert figures.whitespace == Coverage(len(blank), int(matrix.exact[blank].sum()), len(blank))
    broken = [i for i, piece in enumerate(pieces) if "\ufffd" in piece.decode("utf-8", "replace")]
    assert figures.partial_utf8.total == len(broken)
    numerals = {piece for piece in {*pieces, *pieces_of(teacher).as_list()} if piece.isdigit() and len(piece) == 2}
    assert figures.digits[1].total == len(numerals) > 0


def test_an_empty_map_is_refused() -> None:
    student, teacher = SMALL["three_digits"], SMALL["one_digit"]
    sizes = pieces_of(student).vocab_size, pieces_of(teacher).vocab_size
    empty = ProjectionMatrix(np.full((sizes[0], 1), -1), np.zeros((sizes[0], 1)), teacher_vocab_size=sizes[1])
    with pytest.raises(ProjectionError, match="has no entries"):
        audit(student, teacher, empty)


def test_a_matrix_of_other_sizes_is_refused() -> None:
    matrix = build_projection(SMALL["nfc"], SMALL["one_digit"])
    with pytest.raises(ProjectionError, match="but the tokenizers have"):
        audit(SMALL["three_digits"], SMALL["one_digit"], matrix)


def healthy(**changes: object) -> Audit:
    """Return figures of a pair that suits every loss."""
    full = Coverage(100, 100, 100)
    figures = {
        "student_name": "student",
        "teacher_name": "teacher",
        "student_vocab_size": 1000,
        "teacher_vocab_size": 1000,
        "overlap": 0.8,
        "one_to_one": 0.8,
        "rows_by_pieces": (0, 800, 200),
        "digits": (Coverage(10, 10, 10), full, Coverage(0, 0, 0)),
        "whitespace": full,
        "cjk": full,
        "partial_utf8": full,
        "special": full,
        "text": Coverage(1000, 800, 1000),
    }
    return Audit(**figures | changes)


LOSSES = ("p_kl", "gold", "h_kl", "strict", "byte_prefix", "shared_prefix", "alm", "uld", "same_vocab")


@pytest.mark.parametrize("loss", LOSSES)
def test_no_warning_where_the_loss_fits(loss: str) -> None:
    assert fit_warnings(healthy(), loss) == []


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("changes", "warned", "figures"),
    [
        (
            {"digits": (Coverage(10, 10, 10), Coverage(100, 0, 100), Coverage(1000, 899, 1000))},
            {"gold", "h_kl", "strict"},
            ("0 of 100 numerals of 2 digits", "899 of 1,000 numerals of 3 digits", "p_kl"),
        ),
        ({"digits": (Coverage(10, 8, 10),) * 3}, {"gold", "h_kl", "strict"}, ("8 of 10 numerals of 1 digit ",)),
        ({"overlap": 0.366}, {"gold", "h_kl", "strict"}, ("80%", "0.366")),
        ({"one_to_one": 0.02}, {"gold", "h_kl", "strict"}, ("2%", "0.800")),
        ({"text": Coverage(1000, 800, 940)}, {"p_kl", "gold", "h_kl", "strict"}, ("60 of the student's 1,000 text",)),
    ],
    ids=["numerals", "digits", "overlap", "one_to_one", "rows"],
)
def test_warnings_name_the_loss_and_the_figures(
    loss: str, changes: dict[str, object], warned: set[str], figures: tuple[str, ...]
) -> None:
    warnings = fit_warnings(healthy(**changes), loss)
    assert len(warnings) == (loss in warned)
    for warning in warnings:
        assert loss in warning
        assert all(figure in warning for figure in figures)
        assert "\n" not in warning


def test_numerals_just_covered_are_no_reason_to_warn() -> None:
    assert fit_warnings(healthy(digits=(Coverage(10, 9, 10),) * 3), "h_kl") == []


@pytest.mark.tokenizers
def test_a_real_pair_warns_about_numerals_only(llama_qwen: ProjectionMatrix) -> None:
    figures = audit(real_tokenizer("llama3_1"), real_tokenizer("qwen3"), llama_qwen)
    assert fit_warnings(figures, "p_kl") == []
    (warning,) = fit_warnings(figures, "h_kl")
    assert "0 of 100 numerals of 2 digits and 0 of 1,000 numerals of 3 digits" in warning


def test_text_without_rows_is_counted() -> None:
    """Bug: special tokens without a row count as text, and a vocabulary with many of them gets a warning."""
    student, teacher = SMALL["three_digits"], SMALL["one_digit"]
    figures = audit(student, teacher, exact_map(student, teacher))
    lengths = pieces_of(student).lengths
    assert figures.text.total == int((lengths > 0).sum())
    assert figures.text.spelled == figures.text.exact == sum(figures.rows_by_pieces[1:]) - figures.special.spelled
    assert len(fit_warnings(figures, "p_kl")) == 1
