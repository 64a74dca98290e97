"""Logits as losses read them: row by row, from wherever they are (METHODS §8, §9)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nemo_opd.distributed.vocab_parallel import VocabularyShards
from nemo_opd.errors import ConfigError


class LogitRows(ABC):
    """Logits [B, S, X], unshifted, of which a loss reads rows of the flattened [B·S, X]."""

    shape: tuple[int, int, int]
    device: torch.device
    dtype: torch.dtype
    """In which rows are read."""
    share: tuple[int, int] = (0, 1)
    """Which of how many processes this is, where several compute one loss together, each some of its parts."""

    @abstractmethod
    def read(self, rows: Tensor, width: int) -> Tensor:
        """The leading `width` columns of rows [R] → [R, width], without a graph; maybe a view, not to be written to.

        With a `share`, every process calls it equally often, each for rows of its own.
        """

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """What the processes of a `share` have found, made one, in place."""
        return tensor


class TrainableRows(LogitRows):
    """Logits that pass a gradient on."""

    leaves: tuple[Tensor, ...]
    """What the gradient is for."""

    @property
    def needs_gradient(self) -> bool:
        return any(leaf.requires_grad for leaf in self.leaves)

    @abstractmethod
    def gradients(self) -> Gradients:
        """Zero, to be added to."""


class Gradients(ABC):
    """The gradients of a source's leaves, while they are summed up."""

    @abstractmethod
    def add(self, rows: Tensor, gradient: Tensor, *, onto: bool) -> None:
        """Of distinct rows [R], with respect to what `pull_back` leads to: [R, width].

        onto: some of them may have been added to before.
        """

    @abstractmethod
    def pull_back(self, logits: Tensor, gradient: Tensor) -> Tensor:
        """From the gradient with respect to logits [R, width] to that with respect to what they were made from."""

    @abstractmethod
    def sums(self) -> tuple[Tensor | None, ...]:
        """One a leaf, in its dtype; None where it takes no gradient."""


def logit_rows(logits: Tensor | LogitRows) -> LogitRows:
    """A tensor [B, S, X] or what is made like one, as rows."""
    return TensorLogits(logits) if isinstance(logits, Tensor) else logits


def trainable_rows(logits: Tensor | LogitRows) -> TrainableRows:
    """The same for the side that learns. Raises ConfigError for logits that pass no gradient on."""
    rows = logit_rows(logits)
    if not isinstance(rows, TrainableRows):
        raise ConfigError(
            f"student_logits are {type(rows).__name__}, which pass no gradient on; give them as teacher's"
        )
    return rows


def check_shares(student: LogitRows, teacher: LogitRows) -> None:
    """Raises ConfigError for a teacher that several processes read together while the student is computed alone."""
    if teacher.share not in ((0, 1), student.share):
        raise ConfigError(
            f"the teacher's columns lie on {teacher.share[1]} ranks, the student's on {student.share[1]}; give both "
            "over one group, or the teacher whole"
        )


class TensorLogits(TrainableRows):
    """Logits that are there: [B, S, X]."""

    def __init__(self, logits: Tensor) -> None:
        self.leaves = (logits,)
        self.shape = (logits.shape[0], logits.shape[1], logits.shape[2])
        self.device, self.dtype = logits.device, logits.dtype

    def read(self, rows: Tensor, width: int) -> Tensor:
        columns = self.leaves[0].detach().flatten(0, 1).narrow(1, 0, width)
        # Elsewhere than on a CPU it would wait for the device to know.
        if len(rows) and rows.device.type == "cpu" and bool((rows.diff() == 1).all()):
            return columns.narrow(0, int(rows[0]), len(rows))
        return columns.index_select(0, rows)

    def gradients(self) -> Gradients:
        return _TensorGradients(self.leaves[0])

    def cut_off(self) -> TensorLogits:
        """The same as a new leaf, on which gradients gather before they go back through a model."""
        return TensorLogits(_new_leaf(self.leaves[0]))


class _TensorGradients(Gradients):
    """Rows are zeroed only where nothing is put: on a CPU a pass over all of them is as long as some losses."""

    def __init__(self, logits: Tensor) -> None:
        self._sum = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        self._rows = self._sum.flatten(0, 1)
        self._is_put = torch.zeros(len(self._rows), dtype=torch.bool, device=logits.device)

    def add(self, rows: Tensor, gradient: Tensor, *, onto: bool) -> None:
        width = gradient.shape[1]
        if onto:
            self._zero_others()
        _put(self._rows.narrow(1, 0, width), rows, gradient.to(self._sum.dtype), onto)
        if not onto:
            self._rows.narrow(1, width, self._rows.shape[1] - width).index_fill_(0, rows, 0)
            self._is_put.index_fill_(0, rows, True)

    def _zero_others(self) -> None:
        self._rows.index_fill_(0, (~self._is_put).nonzero().squeeze(1), 0)
        self._is_put.fill_(True)

    def pull_back(self, logits: Tensor, gradient: Tensor) -> Tensor:
        return gradient

    def sums(self) -> tuple[Tensor, ...]:
        self._zero_others()
        return (self._sum,)


def _put(sums: Tensor, rows: Tensor, gradient: Tensor, onto: bool) -> None:
    if onto:
        sums.index_add_(0, rows, gradient)
    else:
        sums.index_copy_(0, rows, gradient)


@dataclass(frozen=True, eq=False, slots=True)
class Head:
    """From hidden states to logits: soft_cap · tanh(scale · (W h + bias) / soft_cap)."""

    weight: Tensor
    """[X, D]"""
    bias: Tensor | None = None
    """[X]"""
    scale: float = 1.0
    soft_cap: float | None = None
    """None: none."""

    def __post_init__(self) -> None:
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ConfigError(
                f"a head with weight {list(self.weight.shape)} has a bias {list(self.bias.shape)}; "
                f"give {list(self.weight.shape[:1])}"
            )
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ConfigError(f"soft_cap={self.soft_cap}: logits are divided by it; give a number above 0, or none")

    def after_linear(self, linear: Tensor) -> Tensor:
        """What becomes of W h + bias [..., X]; in fp32 at least, where there is something to be done."""
        if self.scale == 1 and self.soft_cap is None:
            return linear
        logits = linear.to(torch.promote_types(linear.dtype, torch.float32)) * self.scale
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)


class HeadLogits(TrainableRows):
    """Logits that a head makes from hidden states [B, S, D], a chunk at a time, so that they are never all there.

    Hidden states, weight and bias each get a gradient where they take one; the weight's is summed over chunks in fp32.
    """

    def __init__(self, hidden: Tensor, head: Head) -> None:
        """Raises ConfigError where width or dtype of hidden states and head differ."""
        if hidden.shape[-1] != head.weight.shape[1] or hidden.dtype != head.weight.dtype:
            raise ConfigError(
                f"hidden states are {list(hidden.shape)} {hidden.dtype}, the head's weight {list(head.weight.shape)} "
                f"{head.weight.dtype}; width and dtype must be equal"
            )
        self.hidden, self.head = hidden, head
        self.leaves = (hidden, head.weight) if head.bias is None else (hidden, head.weight, head.bias)
        self.shape = (hidden.shape[0], hidden.shape[1], len(head.weight))
        self.device, self.dtype = hidden.device, hidden.dtype

    @torch.no_grad()
    def read(self, rows: Tensor, width: int) -> Tensor:
        head = self.head
        bias = None if head.bias is None else head.bias[:width]
        hidden = self.hidden.flatten(0, 1).index_select(0, rows)
        return head.after_linear(F.linear(hidden, head.weight[:width], bias))

    def gradients(self) -> Gradients:
        return _HeadGradients(self.hidden, self.head)

    def cut_off(self) -> HeadLogits:
        """The same of hidden states as a new leaf, on which gradients gather before they go back through a model."""
        return HeadLogits(_new_leaf(self.hidden), self.head)


def _new_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(torch.is_grad_enabled())


class _HeadGradients(Gradients):
    def __init__(self, hidden: Tensor, head: Head) -> None:
        self._head, self._hidden = head, hidden.detach().flatten(0, 1)
        self._shape = hidden.shape
        self._of_hidden = torch.zeros_like(self._hidden) if hidden.requires_grad else None
        self._of_weight = _fp32_zeros(head.weight)
        self._of_bias = None if head.bias is None else _fp32_zeros(head.bias)

    def add(self, rows: Tensor, gradient: Tensor, *, onto: bool) -> None:
        width = gradient.shape[1]
        weight = self._head.weight.detach()[:width]
        if self._of_bias is not None:
            self._of_bias[:width] += gradient.sum(0)
        gradient = gradient.to(weight.dtype)
        if self._of_hidden is not None:
            _put(self._of_hidden, rows, gradient @ weight, onto)
        if self._of_weight is not None:
            self._of_weight[:width] += gradient.t() @ self._hidden.index_select(0, rows)

    def pull_back(self, logits: Tensor, gradient: Tensor) -> Tensor:
        if self._head.soft_cap is not None:
            gradient = gradient * (1 - (logits / self._head.soft_cap).square())
        return gradient if self._head.scale == 1 else gradient * self._head.scale

    def sums(self) -> tuple[Tensor | None, ...]:
        hidden = None if self._of_hidden is None else self._of_hidden.view(self._shape)
        weight = None if self._of_weight is None else self._of_weight.to(self._head.weight.dtype)
        if self._head.bias is None:
            return hidden, weight
        return hidden, weight, None if self._of_bias is None else self._of_bias.to(self._head.bias.dtype)


def _fp32_zeros(leaf: Tensor) -> Tensor | None:
    if not leaf.requires_grad:
        return None
    return torch.zeros(leaf.shape, dtype=torch.promote_types(leaf.dtype, torch.float32), device=leaf.device)


class VocabParallelLogits(TrainableRows):
    """Logits whose columns lie on the ranks of a group: each reads whole rows, those of its share of the parts.

    Hidden states are the same on every rank and get the whole gradient on each; a shard of logits or of a head gets
    its own.
    """

    def __init__(self, local: TensorLogits | HeadLogits, group: dist.ProcessGroup) -> None:
        """local: this rank's consecutive columns, in rank order; their number may differ. Collective."""
        self.local = local
        self.leaves = local.leaves
        self.device, self.dtype = local.device, local.dtype
        self.shards = VocabularyShards(group, local.shape[2], local.device)
        self.shape = (*local.shape[:2], sum(self.shards.num_columns))
        self.share = (self.shards.rank, self.shards.num_ranks)

    def read(self, rows: Tensor, width: int) -> Tensor:
        widths = self.shards.widths(width)
        every, counts = self.shards.gather_rows(rows)
        return self.shards.to_rows(self.local.read(every, widths[self.shards.rank]), counts, widths)

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        return self.shards.reduce(tensor, op)

    def gradients(self) -> Gradients:
        return _VocabParallelGradients(self)


class _VocabParallelGradients(Gradients):
    def __init__(self, source: VocabParallelLogits) -> None:
        self._source, self._local = source, source.local.gradients()

    def add(self, rows: Tensor, gradient: Tensor, *, onto: bool) -> None:
        shards = self._source.shards
        every, counts = shards.gather_rows(rows)
        gradient = gradient.to(self._source.dtype)
        self._local.add(every, shards.to_columns(gradient, counts, shards.widths(gradient.shape[1])), onto=onto)

    def pull_back(self, logits: Tensor, gradient: Tensor) -> Tensor:
        return self._local.pull_back(logits, gradient)

    def sums(self) -> tuple[Tensor | None, ...]:
        sums = self._local.sums()
        if isinstance(self._source.local, HeadLogits) and sums[0] is not None:
            self._source.reduce(sums[0])
        return sums


class ContextParallelLogits(TrainableRows):
    """Logits that every rank of a group has: each computes a share of the units, and has its share of the gradient."""

    def __init__(self, every: TrainableRows, group: dist.ProcessGroup) -> None:
        """every: of all positions; it may have a share of its own, among ranks with the same place in `group`."""
        self.every, self.group = every, group
        self.leaves, self.shape = every.leaves, every.shape
        self.device, self.dtype = every.device, every.dtype
        index, processes = every.share
        self.share = (dist.get_rank(group) * processes + index, dist.get_world_size(group) * processes)

    def read(self, rows: Tensor, width: int) -> Tensor:
        return self.every.read(rows, width)

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        tensor = self.every.reduce(tensor, op)
        dist.all_reduce(tensor, op, group=self.group)
        return tensor

    def gradients(self) -> Gradients:
        return self.every.gradients()


class SideBySideLogits(LogitRows):
    """Logits whose columns several sources have, one after another: shards of a head or of logits, maybe uneven."""

    def __init__(self, sources: Sequence[LogitRows]) -> None:
        """Raises ConfigError unless all are of the same positions, in one dtype, and each is read by this process."""
        shapes = [source.shape for source in sources]
        kinds = {(source.shape[:2], source.dtype, source.share) for source in sources}
        if len(kinds) != 1 or sources[0].share != (0, 1):
            raise ConfigError(
                f"columns to be read side by side are of logits {shapes} in {sorted({str(s.dtype) for s in sources})}; "
                "sequences, positions and dtype must be the same, and none may lie on the ranks of a group"
            )
        self.sources = list(sources)
        self.shape = (*shapes[0][:2], sum(shape[2] for shape in shapes))
        self.device, self.dtype = sources[0].device, sources[0].dtype

    def read(self, rows: Tensor, width: int) -> Tensor:
        begins = accumulate((source.shape[2] for source in self.sources), initial=0)
        widths = (
            min(max(0, width - begin), source.shape[2]) for begin, source in zip(begins, self.sources, strict=False)
        )
        return torch.cat([source.read(rows, own) for source, own in zip(self.sources, widths, strict=True)], 1)


class AveragedLogits(LogitRows):
    """Σ weights[i] · z_i / Σ weights of several teachers with one vocabulary (METHODS §6)."""

    def __init__(self, sources: Sequence[Tensor | LogitRows], weights: Sequence[float]) -> None:
        """Raises ConfigError unless there is one weight ≥ 0 a source, not all 0, and all cover the same positions."""
        if len(sources) != len(weights) or min(weights, default=-1.0) < 0 or not sum(weights):
            raise ConfigError(
                f"{len(sources)} logits with weights {list(weights)}: "
                "a mean takes one weight each, 0 or more and not all 0"
            )
        self.sources = [logit_rows(source) for source in sources]
        self.weights = [weight / sum(weights) for weight in weights]
        shapes = [source.shape for source in self.sources]
        if len({shape[:2] for shape in shapes}) > 1:
            raise ConfigError(f"logits to be averaged are {shapes}; sequences and positions must be the same")
        self.shape = (*shapes[0][:2], min(shape[2] for shape in shapes))
        self.device, self.share = self.sources[0].device, self.sources[0].share
        self.dtype = torch.promote_types(self.sources[0].dtype, torch.float32)

    def read(self, rows: Tensor, width: int) -> Tensor:
        mean = torch.zeros((), dtype=self.dtype, device=self.device)
        for source, weight in zip(self.sources, self.weights, strict=True):
            mean = mean + weight * source.read(rows, width)
        return mean

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        return self.sources[0].reduce(tensor, op)
