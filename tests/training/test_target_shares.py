"""The share of tokens that losses across tokenizers can compare, against counts by hand."""

import pytest
import torch

from nemo_opd.config.loss import BytePrefixTerm, GoldTerm, PKLTerm
from nemo_opd.preflight.survey import TargetShares, sampled_rows
from nemo_opd.types import Batch, ChunkRows, TeacherRows, TokenRows
from tests.losses.projections import spelled_matrix

STUDENT = (b"", b"ab", b"c", b"d")
TEACHER = (b"", b"abc", b"d", b"cd", b"abcd")
SPELLINGS = ([0], [1, 2], [3], [2, 3], [])
"""Student tokens that spell each teacher token; the last one has no image."""


def batch(student: list[int], teacher: list[int], chunks: tuple[list[int], list[int]]) -> Batch:
    sides = []
    for ids in (student, teacher):
        mask = torch.ones(1, len(ids), dtype=torch.bool)
        mask[0, 0] = False
        sides.append(TokenRows(torch.tensor([ids]), torch.tensor([len(ids)]), mask, mask.int()))
    ours, theirs = (torch.tensor([side], dtype=torch.int32) for side in chunks)
    return Batch(sides[0], (TeacherRows(sides[1], ChunkRows(ours, theirs)),))


# Chunks of the texts, student tokens → teacher tokens (after the begin token):
# 1. ab·c → abc, d → d, ab·c·d → abcd, which has no student spelling; 2. ab·c → abc, d → d; 3. ab·c·d → abc·d.
MATRIX = spelled_matrix([(0, 0), (3, 2)], 4, TEACHER, SPELLINGS, STUDENT)
BATCHES = [
    batch([0, 1, 2, 3, 1, 2, 3], [0, 1, 2, 4], ([-1, 1, 1, 2, 3, 3, 3], [-1, 1, 2, 3])),
    batch([0, 1, 2, 3], [0, 1, 2], ([-1, 0, 0, 1], [-1, 0, 1])),
    batch([0, 1, 2, 3], [0, 1, 2], ([-1, 0, 0, 0], [-1, 0, 0])),
]


def test_shares_are_those_counted_by_hand() -> None:
    """Catches starts counted by token, shares of the vocabulary in place of shares of the texts, and an error for a
    projection without bytes.
    """
    shares = TargetShares.of(BATCHES, 0, MATRIX, {"short": BATCHES[1:2]}, "gold")
    assert shares is not None
    assert shares.starts == pytest.approx((3 + 2 + 1) / (6 + 3 + 3))
    assert shares.every == pytest.approx((6 + 3 + 2) / (6 + 3 + 3))
    without_bytes = spelled_matrix([(0, 0), (3, 2)], 4, TEACHER, SPELLINGS)
    assert TargetShares.of(BATCHES, 0, without_bytes, {}, "gold").every is None
    assert shares.kinds == {"n:1": pytest.approx(3 / 6), "1:1": pytest.approx(2 / 6), "n:m": pytest.approx(1 / 6)}
    assert shares.images == {"gold": pytest.approx(3 / 7), "byte_prefix": pytest.approx(6 / 7)}
    assert shares.domains == {"short": (pytest.approx(2 / 3), pytest.approx(1.0))}


def test_a_loss_that_compares_little_is_named_with_one_that_compares_more() -> None:
    """Catches advice to use the loss that the run already uses, and a warning for a loss that compares enough."""
    few = TargetShares(0.4, 0.9, {"n:1": 1.0}, {"gold": 0.3, "byte_prefix": 1.0}, {})
    first, image = few.warnings(GoldTerm())
    assert (
        "40% of the student's aligned tokens; write loss.type=byte_prefix with loss.positions=all, which compares 90%"
        in first
    )
    assert (
        image == "gold has an image of 30% of the teacher's tokens; write loss.type=byte_prefix, which has one of 100%"
    )
    assert few.warnings(BytePrefixTerm(positions="all")) == []
    assert len(few.warnings(PKLTerm())) == 1
    many = TargetShares(0.9, 0.95, {"1:1": 1.0}, {"p_kl": 0.8, "byte_prefix": 1.0}, {})
    assert many.warnings(PKLTerm()) == []


@pytest.mark.parametrize("number", [0, 1, 7, 8, 9, 100])
def test_texts_are_taken_from_all_of_a_domain(number: int) -> None:
    """Catches a domain that is sampled from its first texts alone."""
    rows = sampled_rows(number, 8)
    assert min(number, 4) <= len(rows) <= 8
    assert not number or rows[-1] >= number * 3 // 4 or number < 8


def test_texts_without_chunks_have_no_shares() -> None:
    """Catches a division by zero if no token of a text is aligned."""
    assert TargetShares.of([batch([0, 1], [0, 1], ([-1, -1], [-1, -1]))], 0, MATRIX, {}, "p_kl") is None
