"""The teacher's mass on tokens with an image, measured in the rows that a loss reads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.losses import byte_prefix, gold, p_kl, shared_prefix, strict
from nemo_opd.losses.logit_metrics import STRIDE, with_image_mass
from nemo_opd.types import Mean
from tests.losses.cases import Batch, identity, random_logits

POSITIONS, WIDTH = 40, 6
IMAGES = np.arange(WIDTH) % 3 == 0
FORMS = {
    "p_kl": (p_kl, {}),
    "p_kl-mean": (p_kl, {"merge": "mean"}),
    "p_kl-autograd": (p_kl, {"vocab_topk": 3}),
    "gold": (gold, {}),
    "strict": (strict, {}),
    "byte_prefix": (byte_prefix, {}),
    "byte_prefix-cover": (byte_prefix, {"positions": "all", "ends": "cover"}),
    "shared_prefix": (shared_prefix, {}),
}


def one_vocabulary() -> Batch:
    """Make two sequences with a chunk for each token, numbered like the positions."""
    ids = torch.stack([torch.arange(POSITIONS), torch.arange(POSITIONS).flip(0)]) % WIDTH
    chunks = torch.arange(POSITIONS).repeat(2, 1)
    sides = (random_logits(2, POSITIONS, WIDTH, seed) for seed in (0, 1))
    return Batch(*sides, ids, ids, chunks, chunks, identity(WIDTH))


@pytest.mark.parametrize("has_gradient", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_mass_equals_the_measured_rows(form: str, has_gradient: bool) -> None:
    """Catches other chunks than one in sixteen, a row other than the first of a chunk, a mass that depends on blocks or
    microbatches, and a loss that the measurement changes.
    """
    loss, settings = FORMS[form]
    batch, measured, values = one_vocabulary(), [], []
    for part in (batch, batch.rows([0]), batch.rows([1])):
        arguments = part.chunk_arguments | {"projection": part.projection} | settings
        student = part.student.clone().requires_grad_(has_gradient)
        plan = loss.plan(student, part.teacher, **arguments, chunk_size=7)
        result = with_image_mass(plan, IMAGES, part.student_chunk_id).compute()
        values.append((result.loss, loss(student, part.teacher, **arguments, chunk_size=7).loss))
        measured.append(result.metrics["kd_mass"])
    assert all(torch.equal(*pair) for pair in values)
    rows = [batch.teacher[b, c - 1].tolist() for b in range(2) for c in range(1, POSITIONS, STRIDE)]
    masses = [math.fsum(math.exp(z) for z in row[::3]) / math.fsum(map(math.exp, row)) for row in rows]
    assert measured[0].count == len(masses) == 6
    assert measured[0].value() == pytest.approx(math.fsum(masses) / 6, rel=1e-12)
    pooled = measured[1].merge(measured[2])
    assert pooled.value() == pytest.approx(measured[0].value(), rel=1e-12)


def test_mass_needs_no_product_with_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a metric that reads teacher rows a second time."""
    batch, rows_read = one_vocabulary(), []
    heads = [HeadLogits(side, Head(torch.eye(WIDTH, dtype=side.dtype))) for side in (batch.student, batch.teacher)]
    heads[0].leaves[0].requires_grad_()
    read = HeadLogits.read

    def counted(self: HeadLogits, rows: torch.Tensor, width: int) -> torch.Tensor:
        rows_read.append(len(rows))
        return read(self, rows, width)

    monkeypatch.setattr(HeadLogits, "read", counted)
    arguments = batch.chunk_arguments | {"projection": batch.projection}
    totals = []
    for is_measured in (False, True):
        plan = p_kl.plan(*heads, **arguments)
        metrics = (with_image_mass(plan, IMAGES, batch.student_chunk_id) if is_measured else plan).compute().metrics
        assert ("kd_mass" in metrics) == is_measured
        totals.append(sum(rows_read))
        rows_read.clear()
    assert totals[0] == totals[1] > 0


@pytest.mark.parametrize("form", FORMS)
def test_nothing_measured_is_an_empty_mean(form: str) -> None:
    """Catches a division by zero, or float indices, in a microbatch without a measured chunk."""
    batch = one_vocabulary().cut(5).without_chunks()
    loss, settings = FORMS[form]
    plan = loss.plan(batch.student, batch.teacher, projection=batch.projection, **batch.chunk_arguments, **settings)
    assert with_image_mass(plan, IMAGES, batch.student_chunk_id).compute().metrics["kd_mass"] == Mean(0, 0)
