"""An average that leaves the device; the host stands for it, as in test_residence.py."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nemo_opd.workers.average import Average
from nemo_opd.workers.offload import storages_of

pytestmark = pytest.mark.unit


def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    made[0].bias.requires_grad_(False)
    return made


def test_an_average_that_leaves_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: memory that stays on the device, values of before the last update, or the model's in place of its own."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    own = model()
    averages = [Average(own, 0.7, offload=offload) for offload in (True, False)]
    away = averages[0].tensors
    assert list(away) == ["0.weight", "1.weight", "1.bias"]
    for step in range(3):
        with torch.no_grad():
            for parameter in own.parameters():
                parameter += step + 1
        weights = [parameter.detach().clone() for parameter in own.parameters()]
        for average in averages:
            average.update()
        assert not any(storage.nbytes() for storage in storages_of(away.values()))
        inside = []
        for average in averages:
            with average.in_model():
                inside.append([parameter.detach().clone() for parameter in own.parameters()])
        torch.testing.assert_close(*inside, rtol=0, atol=0)
        assert not torch.equal(inside[0][0], weights[0])
        torch.testing.assert_close([parameter.detach() for parameter in own.parameters()], weights, rtol=0, atol=0)
    with averages[0].on_device():
        torch.testing.assert_close(away, averages[1].tensors, rtol=0, atol=0)
