"""The ranks' part of a checkpoint: trained weights and their averages, optimizer, schedule and random generators.

It is written while all ranks wait, or in the background. The driver's part is `manager.Progress`.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils._pytree import tree_leaves, tree_map_only

from nemo_opd.checkpoint.manager import INSTEAD
from nemo_opd.checkpoint.shards import rank_file, read_sharded, write_rank_file, write_sharded
from nemo_opd.distributed.collectives import NotFinite, find_not_finite
from nemo_opd.errors import CheckpointError, NotFiniteError
from nemo_opd.files import require_uncompressed, storage_errors
from nemo_opd.models.folder import first_line

_Averages = Mapping[str, dict[str, torch.Tensor]]
"""Averages of the weights, keyed by any name and then by parameter, sharded as the parameters are."""


@dataclass(frozen=True)
class State:
    """The state of a rank."""

    shared: dict[str, Any]
    """Sharded tensors, which all ranks write together."""
    per_rank: dict[str, Any]
    """Schedule and random generators of this rank."""


def read_state(model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, averages: _Averages | None) -> State:
    """Return the current state, without copies. Collective.

    Raises NotFiniteError on all ranks if a weight, moment or average is NaN or infinite.
    """
    weights, optimizer_state = get_state_dict(model, optimizer)
    if (problem := not_finite_in(weights, optimizer_state, averages)) is not None:
        raise NotFiniteError(
            f"the student's training state is not finite after its last update, so it is not saved: {problem}; earlier "
            "checkpoints are unchanged. Lower student.optimizer.lr, or set train.gradient_clip"
        )
    return State(
        sharded_state(weights, optimizer_state, averages),
        {"scheduler": scheduler.state_dict(), "rng": _random_state()},
    )


def _write_state(folder: Path, state: State, *, group: dist.ProcessGroup | None = None) -> None:
    """Write this rank's shards. The state can be read with another number of ranks. Collective.

    group: process group of all ranks, by default the default group. Raises CheckpointError if the disk fails.
    """
    with storage_errors(folder, CheckpointError, needed=_num_bytes(state.shared), instead=INSTEAD):
        write_sharded(state.shared, folder, group=group)
        write_rank_file(folder, dist.get_rank(), state.per_rank)


def save_state(
    folder: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, averages: _Averages | None = None
) -> None:
    """Call `read_state` and `_write_state`, and wait for the other ranks."""
    _write_state(folder, read_state(model, optimizer, scheduler, averages))
    dist.barrier()


def load_state(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    averages: _Averages | None = None,
    *,
    tp: int = 1,
) -> None:
    """Read the state that `save_state` wrote, in place. Collective.

    tp: number of consecutive ranks that share matrices; these get the same generators, whatever layout was saved.
    Raises CheckpointError, naming the folder, if the state cannot be read or is not finite.
    """
    weights, optimizer_state = get_state_dict(model, optimizer)
    groups: Any = optimizer_state["param_groups"]
    current_fused = [group.get("fused") for group in groups]
    try:
        read_sharded(sharded_state(weights, optimizer_state, averages), folder)
        file = folder / rank_file(dist.get_rank() // tp * tp)
        if not file.exists():  # more ranks than before: additional ranks start with rank 0's schedule and generators
            file = folder / rank_file(0)
        rank_state = _read_rank_file(file)
    except Exception as error:
        raise _unreadable(folder, error) from error
    if (problem := not_finite_in(weights, optimizer_state, averages)) is not None:
        raise CheckpointError(f"{folder} is not finite: {problem}; remove this checkpoint to use the previous one")
    # Whether kernels are fused depends on this machine, and the device of AdamW's step counters on that.
    for group, fused in zip(groups, current_fused, strict=True):
        if "fused" in group:
            group["fused"] = fused
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optimizer_state)
    try:
        scheduler.load_state_dict(rank_state["scheduler"])
        _restore_random_state(rank_state["rng"])
    except Exception as error:  # torch may raise anything for invalid content
        raise _unreadable(file, error) from error
    _reschedule(scheduler)


def _reschedule(scheduler: LRScheduler) -> None:
    """Set the learning rates of the scheduler's step, as a continued run may have another number of steps."""
    if isinstance(scheduler, LambdaLR):
        scales = [scale(scheduler.last_epoch) for scale in scheduler.lr_lambdas]
        rates = [base * scale for base, scale in zip(scheduler.base_lrs, scales, strict=True)]
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler.load_state_dict({**scheduler.state_dict(), "_last_lr": rates})


def _read_rank_file(file: Path) -> dict[str, Any]:
    """Read a rank's file. Raises TypeError and ValueError for unexpected content, and the errors of torch.load."""
    require_uncompressed(file)
    rank_state = torch.load(file, weights_only=True)
    if not isinstance(rank_state, dict) or not all(
        isinstance(rank_state.get(key), dict) for key in ("scheduler", "rng")
    ):
        raise TypeError(f"{file.name} lacks scheduler or rng")
    return rank_state


def _unreadable(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read ({first_line(error)}): it is damaged, or not a run's state; remove this checkpoint to "
        "use the previous one"
    )


class BackgroundWriter:
    """Writer of one state at a time in a thread on every rank; the threads communicate over a separate group."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._written: Future[None] | None = None
        self._group: dist.ProcessGroup | None = None

    def begin(self, folder: Path, state: State) -> None:
        """Copy the state to host memory and start writing it. Collective."""
        if self._group is None:
            # Training uses the default group's collectives at the same time; gloo sends host tensors.
            self._group = dist.new_group(backend="gloo")
        folder.mkdir(parents=True, exist_ok=True)
        copied = State(tree_map_only(torch.Tensor, HostCopies(), state.shared), state.per_rank)
        self._written = self._thread.submit(_write_state, folder, copied, group=self._group)

    def is_done(self) -> bool:
        """Return whether writing has finished or failed."""
        return self._written is None or self._written.done()

    def end(self) -> None:
        """Wait until the state is written. Raises the errors of writing."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def close(self) -> None:
        """Wait for a write in progress, and end the thread."""
        if self._written is not None:
            wait([self._written])
        self._thread.shutdown()


class HostCopies:
    """Function that copies a tensor with its sharding to host memory, and a tied tensor only once."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        place = local.data_ptr(), tensor.shape
        if place not in self._by_place:
            self._by_place[place] = tensor.detach().to("cpu", copy=True)
        return self._by_place[place]


def sharded_state(weights: dict[str, Any], optimizer_state: object, averages: _Averages | None) -> dict[str, Any]:
    """Return the part of a state that all ranks write and read together."""
    state = {"model": weights, "optimizer": optimizer_state}
    return state | {"averages": dict(averages)} if averages else state


def not_finite_in(
    weights: dict[str, Any], optimizer_state: dict[str, Any], averages: _Averages | None
) -> NotFinite | None:
    """Find a non-finite value in weights, moments and averages; step counters are ignored. Collective."""
    moments = {
        f"{key} of {name}": value
        for name, entries in optimizer_state["state"].items()
        for key, value in entries.items()
        if isinstance(value, torch.Tensor) and value.dim()
    }
    means = {f"average of {name}": value for mean in (averages or {}).values() for name, value in mean.items()}
    tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)} | moments | means
    return find_not_finite(tensors, device=next(iter(tensors.values())).device)


def _num_bytes(tensors: object) -> int:
    """Return the bytes of all tensors in nested containers, with the full size of sharded tensors."""
    return sum(leaf.numel() * leaf.itemsize for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))


def _random_state() -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
