import numpy as np
import pytest
import torch

from nemo_opd.config.loss import PKLTerm, SameVocabTerm
from nemo_opd.errors import ConfigError
from nemo_opd.losses import p_kl, same_vocab
from nemo_opd.losses.build import build
from nemo_opd.types import ChunkRows, TeacherRows, TokenRows

from . import oracle

SETTINGS = {"divergence": "jsd", "beta": 0.2, "mixed_weight": 0.7, "temperature": 1.5}
CHUNKS = oracle.random_chunk_ids(np.random.default_rng(3), 2, 7, 6)


def rows(positions: int) -> TokenRows:
    zeros = torch.zeros(2, positions, dtype=torch.long)
    mask = torch.ones(2, positions, dtype=torch.bool)
    mask[:, [0, 3]] = False
    return TokenRows(zeros, torch.full((2,), positions), mask, zeros.int())


def logits(positions: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(2, positions, width, generator=torch.Generator().manual_seed(seed))


def test_same_vocab_term():
    """Every setting of the term reaches the loss."""
    student, teacher, tokens = logits(7, 9, 0), logits(7, 8, 1), rows(7)
    loss = build(SameVocabTerm(**SETTINGS), student_vocab_size=6)
    out = loss(student, teacher, tokens, TeacherRows(tokens, None), 4)
    direct = same_vocab(student, teacher, mask=tokens.loss_mask, normalizer=4, student_vocab_size=6, **SETTINGS)
    assert torch.equal(out.loss, direct.loss)


def test_p_kl_term():
    matrix = oracle.Matrix.random(9, 11, 3, seed=0)
    student, teacher = logits(7, 10, 0), logits(6, 11, 1)
    loss = build(PKLTerm(**SETTINGS, coverage_coef=0.4), matrix)
    out = loss(student, teacher, rows(7), TeacherRows(rows(6), ChunkRows(*CHUNKS)), 4)
    direct = p_kl(
        student,
        teacher,
        projection=matrix,
        student_ids=rows(7).ids,
        teacher_ids=rows(6).ids,
        student_chunk_id=CHUNKS[0],
        teacher_chunk_id=CHUNKS[1],
        normalizer=4,
        coverage_coef=0.4,
        **SETTINGS,
    )
    assert torch.equal(out.loss, direct.loss)


def test_p_kl_needs_a_projection_and_chunks():
    with pytest.raises(ConfigError, match="projection"):
        build(PKLTerm())
    loss = build(PKLTerm(), oracle.Matrix.identity(9))
    with pytest.raises(ConfigError, match="align"):
        loss(logits(7, 9, 0), logits(7, 9, 1), rows(7), TeacherRows(rows(7), None), None)
