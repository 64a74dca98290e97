"""Losses do not depend on the order of a teacher's columns if ids and projection have the same order."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_opd.projection.matrix import order_by_student, with_columns

from .cases import ALL_LOSSES, TEACHER, Case, pair

ACROSS = [case for case in ALL_LOSSES if not case.is_of_one_vocabulary]
ORDERS = {
    "by student": order_by_student(pair(), len(TEACHER)),
    "random": np.random.default_rng(0).permutation(len(TEACHER)),
    "some": np.array([2, 0, 1]),
}
RTOL = 1e-13
"""Sums of a dozen float64 numbers in another order."""


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("case", ACROSS, ids=str)
def test_value_and_gradient(case: Case, name: str) -> None:
    """Catches a map of teacher tokens that keeps their ids, or a target that does."""
    batch = case.batch()
    order = np.append(ORDERS[name], np.arange(len(ORDERS[name]), len(TEACHER)))
    tokens = torch.from_numpy(order)
    reordered = replace(
        batch,
        teacher=batch.teacher[..., tokens],
        teacher_ids=tokens.argsort()[batch.teacher_ids],
        projection=with_columns(batch.projection, ORDERS[name]),
    )
    value, gradient = case.value_and_gradient(batch)
    reordered_value, reordered_gradient = case.value_and_gradient(reordered)
    torch.testing.assert_close(reordered_value, value, rtol=RTOL, atol=0)
    torch.testing.assert_close(reordered_gradient, gradient, rtol=RTOL, atol=1e-15)
