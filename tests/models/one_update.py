"""A model cut over the ranks of this world, and one update of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nemo_opd.config.model import Parallelism, Student
from nemo_opd.distributed.collectives import gathered
from nemo_opd.distributed.layout import Layout
from nemo_opd.distributed.process_group import build_mesh, fsdp_axis
from nemo_opd.logits.head import HeadLogits
from nemo_opd.losses.cross_entropy import cross_entropy
from nemo_opd.models.causal_model import HiddenStateModel, LogitModel
from nemo_opd.models.sharded_load import load_sharded
from tests.models.families import VOCABULARY
from tests.packings import unpadded

USED = VOCABULARY - 2
"""The head is wider than the tokenizer."""
MICRO_BATCH = 3
IDS = torch.randint(0, USED, (12, 7), generator=torch.Generator().manual_seed(1))
"""An odd number of tokens in a microbatch, which sequence_parallel has to pad."""
MASKS = {1.0: torch.rand(IDS.shape, generator=torch.Generator().manual_seed(2)) < 0.7, 0.5: torch.ones_like(IDS).bool()}
"""Two losses: weight, and the tokens that are scored."""
NORMALIZER = 10


@dataclass(frozen=True)
class Trained:
    logits: Tensor
    """Of all sequences, before the update."""
    gradients: dict[str, Tensor]
    norm: float
    weights: dict[str, Tensor]


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    # With so large an ε the update is a smooth function of the gradient, and no coin toss where that is 0.
    return torch.optim.AdamW(model.parameters(), lr=0.1, eps=1.0, weight_decay=0.1)


def cut(
    folder: Path,
    parallelism: Parallelism,
    *,
    activation_checkpointing: bool = False,
    dtype: torch.dtype = torch.float64,
    fused_layers: bool = False,
) -> tuple[Any, PreTrainedModel]:
    mesh = build_mesh(Layout.of(dist.get_world_size(), parallelism), "cpu")
    settings = Student(
        model=str(folder),
        parallelism=parallelism,
        activation_checkpointing=activation_checkpointing,
        fused_layers=fused_layers,
    )
    model = load_sharded(settings, dtype, mesh, key="student.model", compute_dtype=dtype, device="cpu", trainable=True)
    return mesh, model


def accumulate(headless: HiddenStateModel, rows: slice, mesh: Any) -> None:
    """As a student does: losses go backward to a leaf one after the other, then the model's own pass runs once."""
    packing = unpadded(IDS[rows])
    made = headless(IDS[rows], packing)
    leaf = made.hidden.detach().requires_grad_()
    logits = headless.whole(HeadLogits(leaf, made.head), packing)
    for weight, mask in MASKS.items():
        loss = cross_entropy(logits, IDS[rows], mask=mask[rows], normalizer=NORMALIZER, vocab_size=USED).loss
        (weight * loss * fsdp_axis(mesh).size()).backward()
    headless.backward(made, leaf.grad, packing)


def full(tensors: Iterator[tuple[str, Any]]) -> dict[str, Tensor]:
    return {name: gathered(tensor) for name, tensor in tensors}


def train(model: PreTrainedModel, mesh: Any, parallelism: Parallelism) -> tuple[Trained, torch.optim.Optimizer]:
    headless = HiddenStateModel(model, key="student.model", mesh=mesh, parallelism=parallelism)
    optimizer = adamw(model)
    with torch.no_grad():
        rows, packing = torch.arange(IDS.numel()), unpadded(IDS)
        logits = headless.whole(headless(IDS, packing), packing).read(rows, VOCABULARY)
        of_head = LogitModel(model, mesh=mesh, parallelism=parallelism)
        of_logits = of_head.whole(of_head(IDS, packing), packing).read(rows, VOCABULARY)
        torch.testing.assert_close(of_logits, logits, rtol=1e-6, atol=1e-6)
    model.train()
    own = len(IDS) // fsdp_axis(mesh).size()
    begin = own * (dist.get_rank() // parallelism.tp)
    for start in range(begin, begin + own, MICRO_BATCH):
        accumulate(headless, slice(start, start + MICRO_BATCH), mesh)
    assert all(isinstance(parameter, DTensor) == (mesh.size() > 1) for parameter in model.parameters())
    gradients = full((name, parameter.grad) for name, parameter in model.named_parameters())
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    weights = full((name, parameter.detach()) for name, parameter in model.named_parameters())
    return Trained(logits.view(*IDS.shape, -1), gradients, gathered(norm).item(), weights), optimizer
