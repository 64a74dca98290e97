import pytest
import torch

from nemo_opd.aggregation import weighted_sum, weighted_value
from nemo_opd.errors import ConfigError
from nemo_opd.types import LossOutput, Mean

WEIGHTS = (0.8, 0.2)


def test_shares_add_up_to_the_weighted_sum_of_means():
    """Two teachers with different unit counts over three microbatches, one of them without units for a teacher."""
    totals = torch.tensor([[3.0, 1.0], [2.0, 0.0], [4.0, 5.0]], dtype=torch.float64, requires_grad=True)
    counts = [[2, 7], [1, 0], [3, 2]]
    normalizers = [sum(column) for column in zip(*counts, strict=True)]
    loss = torch.zeros((), dtype=torch.float64)
    merged = [Mean(0.0, 0), Mean(0.0, 0)]
    for microbatch, count in zip(totals, counts, strict=True):
        outputs = [
            LossOutput(microbatch[i] / normalizers[i], {"kd": Mean(microbatch[i].detach(), count[i])}) for i in range(2)
        ]
        loss = loss + weighted_sum(outputs, WEIGHTS).loss
        merged = [old.merge(output.metrics["kd"]) for old, output in zip(merged, outputs, strict=True)]
    expected = 0.8 * 9 / 6 + 0.2 * 6 / 9
    assert loss.item() == pytest.approx(expected, rel=1e-14)
    assert weighted_value(merged, WEIGHTS) == pytest.approx(expected, rel=1e-14)
    (gradient,) = torch.autograd.grad(loss, totals)
    torch.testing.assert_close(gradient, torch.tensor([[0.8 / 6, 0.2 / 9]] * 3, dtype=torch.float64))


def test_one_weight_per_teacher():
    output = LossOutput(torch.zeros(()), {})
    with pytest.raises(ConfigError, match="2 weights for 1 teachers"):
        weighted_sum([output], WEIGHTS)
    with pytest.raises(ConfigError, match="0 weights for 0 teachers"):
        weighted_value([], [])
