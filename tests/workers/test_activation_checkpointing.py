"""Recomputing layers in the backward pass changes only the memory."""

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
    """Make two steps and count the bytes that the model's forward passes save for backward."""
    plan = plan_of(tiny.overrides("train.max_steps=2", *options))
    saved_bytes = 0
    forward = HiddenStateModel.__call__

    def counted(tensor: Tensor) -> Tensor:
        nonlocal saved_bytes
        saved_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def watched(headless: HiddenStateModel, ids: Tensor, packing: Packing) -> HeadLogits:
        with torch.autograd.graph.saved_tensors_hooks(counted, lambda tensor: tensor):
            return forward(headless, ids, packing)

    monkeypatch.setattr(HiddenStateModel, "__call__", watched)
    (result,) = in_world(1, train, [Training(plan, first_batches(plan, 2))], folder)
    monkeypatch.undo()
    return result, saved_bytes


def test_the_curve_is_the_same_and_less_is_saved(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, saved_bytes = trained(tiny, tmp_path / "plain", monkeypatch)
    recomputed, recomputed_saved_bytes = trained(
        tiny, tmp_path / "again", monkeypatch, "student.activation_checkpointing=true"
    )
    assert recomputed_saved_bytes < 0.6 * saved_bytes
    for ours, theirs in zip(plain.curve, recomputed.curve, strict=True):
        for name in ("ce", "kd/cross", "grad_norm"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-6), name
