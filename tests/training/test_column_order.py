"""Heads of teachers that are handed over with columns in the order of the student's tokens."""

import numpy as np
import pytest

from nemo_opd.training.groups import column_order
from tests.tiny import Tiny
from tests.workers.local import plan_of

BY_ID = {
    "logits": ["handoff=logits"],
    "as configured": ["handoff.column_order=teacher"],
    "a user's function": ["loss=function", "loss.function=tests.workers.test_every_loss:difference_of_the_largest"],
    "a shard of the head": ["cluster.cpu_ranks=2", "teachers.0.parallelism.tp=2"],
    "a learned projection": ["loss=p_kl", "teachers.0.projection_lr=1e-3"],
}


def test_only_another_tokenizers_head_is_reordered(tiny: Tiny) -> None:
    """Bug: columns stay in the order of the teacher's ids, which no test of equal losses catches."""
    plan = plan_of(tiny.overrides())
    order = column_order(plan, 0)
    assert order is not None
    assert len(order) == plan.teachers[0].vocab_size
    matrix = plan.teachers[0].projection
    assert matrix is not None
    assert (np.diff(np.argsort(order)[matrix.shared_pairs[:, 1]]) > 0).all()
    assert not (np.diff(matrix.shared_pairs[:, 1]) > 0).all()
    assert column_order(plan, 1) is None


@pytest.mark.parametrize("case", BY_ID)
def test_ids_are_kept(case: str, tiny: Tiny) -> None:
    """Bug: a learned projection is saved, or a user's function called, with reordered columns instead of ids."""
    assert column_order(plan_of(tiny.overrides(*BY_ID[case])), 0) is None
