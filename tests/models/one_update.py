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
"""Token ids below this occur: the head is wider than the tokenizer."""
MICRO_BATCH = 3
IDS = torch.randint(0, USED, (12, 7), generator=torch.Generator().manual_seed(1))
"""A microbatch has an odd number of tokens, which sequence_parallel must pad."""
MASKS = {1.0: torch.rand(IDS.shape, generator=torch.Generator().manual_seed(2)) < 0.7, 0.5: torch.ones_like(IDS).bool()}
"""The mask of scored tokens of each of two losses, keyed by the loss's weight."""
NORMALIZER = 10


@dataclass(frozen=True)
class Trained:
    logits: Tensor
    """All sequences' logits before the update."""
    gradients: dict[str, Tensor]
    norm: float
    weights: dict[str, Tensor]


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    # With so large an ε the update is smooth in the gradient; otherwise its sign is random if the gradient is about 0.
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


def accumulate(source: HiddenStateModel, rows: slice, mesh: Any) -> None:
    """Accumulate gradients as a student does: each loss's backward pass ends at a leaf, then the model's runs once."""
    packing = unpadded(IDS[rows])
    output = source(IDS[rows], packing)
    leaf = output.hidden.detach().requires_grad_()
    logits = source.whole(HeadLogits(leaf, output.head), packing)
    for weight, mask in MASKS.items():
        loss = cross_entropy(logits, IDS[rows], mask=mask[rows], normalizer=NORMALIZER, vocab_size=USED).loss
        (weight * loss * fsdp_axis(mesh).size()).backward()
    source.backward(output, leaf.grad, packing)


def full(tensors: Iterator[tuple[str, Any]]) -> dict[str, Tensor]:
    return {name: gathered(tensor) for name, tensor in tensors}


def train(model: PreTrainedModel, mesh: Any, parallelism: Parallelism) -> tuple[Trained, torch.optim.Optimizer]:
    source = HiddenStateModel(model, key="student.model", mesh=mesh, parallelism=parallelism)
    optimizer = adamw(model)
    with torch.no_grad():
        rows, packing = torch.arange(IDS.numel()), unpadded(IDS)
        logits = source.whole(source(IDS, packing), packing).read(rows, VOCABULARY)
        logit_model = LogitModel(model, mesh=mesh, parallelism=parallelism)
        expected = logit_model.whole(logit_model(IDS, packing), packing).read(rows, VOCABULARY)
        torch.testing.assert_close(expected, logits, rtol=1e-6, atol=1e-6)
    model.train()
    per_rank = len(IDS) // fsdp_axis(mesh).size()
    begin = per_rank * (dist.get_rank() // parallelism.tp)
    for start in range(begin, begin + per_rank, MICRO_BATCH):
        accumulate(source, slice(start, start + MICRO_BATCH), mesh)
    assert all(isinstance(parameter, DTensor) == (mesh.size() > 1) for parameter in model.parameters())
    gradients = full((name, parameter.grad) for name, parameter in model.named_parameters())
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    weights = full((name, parameter.detach()) for name, parameter in model.named_parameters())
    return Trained(logits.view(*IDS.shape, -1), gradients, gathered(norm).item(), weights), optimizer
