"""Figures of the audit, against published ones and against counts made here."""

from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from nemo_opd.alignment import pieces_of
from nemo_opd.errors import ProjectionError
from nemo_opd.projection import Coverage, ProjectionMatrix, audit, build_projection, recommended_loss
from nemo_opd.projection.exact import exact_pairs
from nemo_opd.projection.report import audit_table, sample_table
from tests.projection.conftest import SMALL
from tests.tokenizers_fixture import byte_level, real_tokenizer


def test_published_overlap(llama_qwen: ProjectionMatrix) -> None:
    """METHODS §2: Qwen3–Llama .848; Llama numerals have no exact partner in a single-digit vocabulary."""
    figures = audit(real_tokenizer("llama3_1"), real_tokenizer("qwen3"), llama_qwen)
    assert figures.overlap == pytest.approx(0.848, abs=0.01)
    assert figures.recommended_loss == "p_kl"
    assert figures.digits == (Coverage(10, 10, 10), Coverage(100, 0, 100), Coverage(1000, 0, 1000))
    assert sum(figures.rows_by_pieces) == 128256


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
    """METHODS §2, gpt4o for gpt-oss, which has its pieces. Catches pieces that are wrong for a whole kind of token."""
    left, right = pieces_of(real_tokenizer(student)), pieces_of(real_tokenizer(teacher))
    pairs = exact_pairs(left, right, left.lengths > 0, right.lengths > 0)
    assert len(pairs) / min(left.vocab_size, right.vocab_size) == pytest.approx(published, abs=0.01)


def test_a_tokenizer_with_itself_is_fully_covered() -> None:
    figures = audit(SMALL["three_digits"], SMALL["three_digits"])
    assert (figures.overlap, figures.one_to_one, figures.recommended_loss) == (1.0, 1.0, "h_kl")
    assert {figures.whitespace.rate, figures.cjk.rate, figures.partial_utf8.rate, figures.special.rate} == {1.0}


def test_counts_of_a_small_pair() -> None:
    """Oracle: the rows themselves, by Python's own text methods."""
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
    assert figures.recommended_loss == "p_kl"


def test_numerals_decide_the_loss() -> None:
    full, none, most = Coverage(10, 10, 10), Coverage(0, 0, 0), Coverage(1000, 899, 1000)
    assert recommended_loss([full, none, none]) == "h_kl"
    assert recommended_loss([full, none, most]) == "p_kl"


def test_an_empty_map_is_refused() -> None:
    student, teacher = SMALL["three_digits"], SMALL["one_digit"]
    sizes = pieces_of(student).vocab_size, pieces_of(teacher).vocab_size
    empty = ProjectionMatrix(np.full((sizes[0], 1), -1), np.zeros((sizes[0], 1)), teacher_vocab_size=sizes[1])
    with pytest.raises(ProjectionError, match="no entry at all"):
        audit(student, teacher, empty)


def test_a_matrix_of_other_sizes_is_refused() -> None:
    matrix = build_projection(SMALL["nfc"], SMALL["one_digit"])
    with pytest.raises(ProjectionError, match="but the tokenizers have"):
        audit(SMALL["three_digits"], SMALL["one_digit"], matrix)


def test_tables_render_hostile_tokens() -> None:
    """Catches a token such as `[/b]` taken for rich markup, which raises."""
    tokenizers = byte_level(400, eos="[/b]"), SMALL["sentencepiece"]
    matrix = build_projection(*tokenizers)
    console = Console(width=160, file=StringIO())
    console.print(audit_table(audit(*tokenizers, matrix)))
    console.print(sample_table(matrix, *tokenizers, *map(pieces_of, tokenizers)))
    text = console.file.getvalue()
    assert all(word in text for word in ("overlap", "partial UTF-8", "[/b]"))
