"""Layers that are recomputed in the backward pass change only the memory."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nemo_opd.logits.head import HeadLogits
from nemo_opd.logits.sources import Packing
from nemo_opd.models.causal_model import HiddenStateModel
from tests.tiny import Tiny
from tests.workers.local import Trained, Training, first_batches, in_world, plan_of, train

pytestmark = pytest.mark.world


def trained(tiny: Tiny, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[Trained, int]:
    """Make two steps, and count the bytes that the model's forward passes kept for backward."""
    plan = plan_of(tiny.overrides("train.max_steps=2", *options))
    kept = 0
    forward = HiddenStateModel.__call__

    def counted(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    def watched(headless: HiddenStateModel, ids: Tensor, packing: Packing) -> HeadLogits:
        with torch.autograd.graph.saved_tensors_hooks(counted, lambda tensor: tensor):
            return forward(headless, ids, packing)

    monkeypatch.setattr(HiddenStateModel, "__call__", watched)
    (result,) = in_world(1, train, [Training(plan, first_batches(plan, 2))], folder)
    monkeypatch.undo()
    return result, kept


def test_the_curve_is_the_same_and_less_is_kept(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, kept = trained(tiny, tmp_path / "plain", monkeypatch)
    again, kept_again = trained(tiny, tmp_path / "again", monkeypatch, "student.activation_checkpointing=true")
    assert kept_again < 0.6 * kept
    for ours, theirs in zip(plain.curve, again.curve, strict=True):
        for name in ("ce", "kd/cross", "grad_norm"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-6), name
