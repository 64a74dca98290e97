"""The sharded training state of the student: master weights, optimizer, schedule, random generators."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nemo_opd.distributed.finite import NotFinite, find_not_finite
from nemo_opd.errors import CheckpointError, NotFiniteError


def save_state(folder: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler) -> None:
    """Each rank writes its own shards; a checkpoint can be read with another number of ranks.

    Raises NotFiniteError on all ranks, before anything is written, where a weight or a moment is NaN or infinite.
    """
    weights, optimizer_state = get_state_dict(model, optimizer)
    if (found := not_finite_in(weights, optimizer_state)) is not None:
        raise NotFiniteError(
            f"the student's training state is not finite after its last update, so it is not saved: {found}; what was "
            "saved before is as it was. Lower student.optimizer.lr, or set train.gradient_clip"
        )
    dcp.save({"model": weights, "optimizer": optimizer_state}, checkpoint_id=folder)
    torch.save({"scheduler": scheduler.state_dict(), "rng": random_state()}, folder / f"rank_{dist.get_rank():05d}.pt")
    dist.barrier()


def load_state(folder: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler) -> None:
    """Read in place what `save_state` wrote.

    Raises CheckpointError, naming the folder, where it cannot be read or holds what is not finite.
    """
    weights, optimizer_state = get_state_dict(model, optimizer)
    try:
        dcp.load({"model": weights, "optimizer": optimizer_state}, checkpoint_id=folder)
        own = folder / f"rank_{dist.get_rank():05d}.pt"
        # With more ranks than before, the additional ones start from rank 0's schedule and generators.
        rest = torch.load(own if own.exists() else folder / "rank_00000.pt", weights_only=True)
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        raise CheckpointError(
            f"{folder} cannot be read ({error}); remove this checkpoint to use the one before"
        ) from error
    if (found := not_finite_in(weights, optimizer_state)) is not None:
        raise CheckpointError(f"{folder} is not finite: {found}; remove this checkpoint to use the one before")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optimizer_state)
    scheduler.load_state_dict(rest["scheduler"])
    restore_random_state(rest["rng"])


def not_finite_in(weights: dict[str, Any], optimizer_state: dict[str, Any]) -> NotFinite | None:
    """Among weights and moments; the step counters of AdamW, which count in host memory, are left out."""
    moments = {
        f"{key} of {name}": value
        for name, entries in optimizer_state["state"].items()
        for key, value in entries.items()
        if value.dim()
    }
    tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)} | moments
    return find_not_finite(tensors, device=next(iter(tensors.values())).device)


def random_state() -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
