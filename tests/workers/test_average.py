"""An average that is offloaded. The host stands for the device, as in test_residence.py."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nemo_opd.workers.average import Average
from nemo_opd.workers.offload import storages_of

pytestmark = pytest.mark.unit


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    layers[0].bias.requires_grad_(False)
    return layers


def test_an_offloaded_average_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: memory stays on the device; the average misses the last update or is the model's weights."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    student = model()
    averages = [Average(student, 0.7, offload=offload) for offload in (True, False)]
    away = averages[0].tensors
    assert list(away) == ["0.weight", "1.weight", "1.bias"]
    for step in range(3):
        with torch.no_grad():
            for parameter in student.parameters():
                parameter += step + 1
        weights = [parameter.detach().clone() for parameter in student.parameters()]
        for average in averages:
            average.update()
        assert not any(storage.nbytes() for storage in storages_of(away.values()))
        inside = []
        for average in averages:
            with average.in_model():
                inside.append([parameter.detach().clone() for parameter in student.parameters()])
        torch.testing.assert_close(*inside, rtol=0, atol=0)
        assert not torch.equal(inside[0][0], weights[0])
        torch.testing.assert_close([parameter.detach() for parameter in student.parameters()], weights, rtol=0, atol=0)
    with averages[0].on_device():
        torch.testing.assert_close(away, averages[1].tensors, rtol=0, atol=0)
