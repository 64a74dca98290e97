"""Logits as losses read them: row by row, from wherever they are (methods.md §8.1, §9)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_opd.errors import ConfigError


class LogitRows(ABC):
    """Logits [B, S, X], unshifted, of which a loss reads rows of the flattened [B·S, X]."""

    shape: tuple[int, int, int]
    device: torch.device
    dtype: torch.dtype
    """Dtype in which rows are read."""
    share: tuple[int, int] = (0, 1)
    """Which of how many processes this is, where several compute one loss together, each some of its parts."""
    is_product: bool = False
    """Rows are made by a product with a head, which is worth while for many at a time."""
    block_bytes: int | None = None
    """Budget of a block, the same in all processes of a share; None: the least of the device."""
    top_k: int | None = None
    """None: all tokens are known. Else the k likeliest are, and the next one: rows are log-probabilities,
    −inf of the others, and there is a column after the vocabulary, log of the mass of the others (methods.md §9.1).
    """

    @property
    def is_truncated(self) -> bool:
        """Whether there is that further column."""
        return self.top_k is not None

    def cut(self, width: int) -> LogitRows:
        """Return logits of the leading columns of the vocabulary, where that changes what else is in a row."""
        return self

    @abstractmethod
    def read(self, rows: Tensor, width: int) -> Tensor:
        """Read the leading `width` columns of rows [R] → [R, width], without a graph; maybe a view, not to be written.

        With a `share`, every process calls it equally often, each for its own rows.
        """

    def begin(self, rows: Sequence[Tensor]) -> None:  # noqa: B027  most sources need no notice
        """Announce the rows [R] that each process of the share reads and adds to next; none: what comes is not known.

        With a `share`, processes that know them need not tell each other.
        """

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce over the processes of a `share`, in place."""
        return tensor


class TrainableRows(LogitRows):
    """Logits that pass a gradient on."""

    leaves: tuple[Tensor, ...]
    """Tensors that get the gradient."""

    @property
    def needs_gradient(self) -> bool:
        return any(leaf.requires_grad for leaf in self.leaves)

    @abstractmethod
    def gradients(self) -> Gradients:
        """Return gradients of zero, to be added to."""


class Gradients(ABC):
    """The gradients of a source's leaves, while they are put together."""

    dtype: torch.dtype
    """Dtype to which `add` may round its argument."""
    pulls_back: bool = False
    """Whether `pull_back` changes anything."""

    def columns(self, width: int) -> int:
        """Return how many columns `add` takes without a copy for a gradient of `width`; those beyond it are 0."""
        return width

    @abstractmethod
    def add(self, rows: Tensor, gradient: Tensor, *, onto: bool) -> None:
        """Add the gradient with respect to the result of `pull_back`: [R, width] of rows [R], or with `columns`.

        onto: some rows were added to before, or are twice among those that the processes of a share add at once. All
        processes have the same.
        """

    @abstractmethod
    def pull_back(self, logits: Tensor, gradient: Tensor) -> Tensor:
        """Turn the gradient with respect to logits [R, width] into that with respect to their inputs."""

    @abstractmethod
    def sums(self) -> tuple[Tensor | None, ...]:
        """Return the sum of each leaf, in its `kept_dtype`; None where it takes no gradient."""


def logit_rows(logits: Tensor | LogitRows) -> LogitRows:
    """Wrap a tensor [B, S, X] as rows; rows pass."""
    return TensorLogits(logits) if isinstance(logits, Tensor) else logits


def trainable_rows(logits: Tensor | LogitRows) -> TrainableRows:
    """Wrap the logits of the side that learns. Raises ConfigError for logits that pass no gradient on."""
    rows = logit_rows(logits)
    if not isinstance(rows, TrainableRows):
        raise ConfigError(
            f"student_logits are {type(rows).__name__}, which pass no gradient on; give them as teacher's"
        )
    return rows


def check_shares(student: LogitRows, teacher: LogitRows) -> None:
    """Raise ConfigError for a teacher that several processes read together while the student is computed alone."""
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
        """Return these logits as a new leaf, which gathers gradients before they go back through a model."""
        return TensorLogits(new_leaf(self.leaves[0]))


class _TensorGradients(Gradients):
    """Rows are zeroed only where nothing is put: on a CPU a pass over all of them is as long as some losses."""

    def __init__(self, logits: Tensor) -> None:
        self.dtype = kept_dtype(logits.dtype)
        self._sum = torch.empty(logits.shape, dtype=self.dtype, device=logits.device)
        self._rows = self._sum.flatten(0, 1)
        self._is_put = torch.zeros(len(self._rows), dtype=torch.bool, device=logits.device)

    def add(self, rows: Tensor, gradient: Tensor, *, onto: bool) -> None:
        width = gradient.shape[1]
        columns = self._rows.narrow(1, 0, width)
        if onto:
            self._zero_what_is_not_put(rows)
            columns.index_add_(0, rows, gradient.to(self._sum.dtype))
        else:
            columns.index_copy_(0, rows, gradient.to(self._sum.dtype))
            self._rows.narrow(1, width, self._rows.shape[1] - width).index_fill_(0, rows, 0)
        self._is_put.index_fill_(0, rows, True)

    def pull_back(self, logits: Tensor, gradient: Tensor) -> Tensor:
        return gradient

    def _zero_what_is_not_put(self, rows: Tensor) -> None:
        if rows.device.type == "cpu":
            self._rows.index_fill_(0, rows[~self._is_put[rows]], 0)
        else:  # Their number is in their values, for which the host would wait.
            is_missing = ~self._is_put[rows].unsqueeze(1)
            self._rows.index_copy_(0, rows, self._rows.index_select(0, rows).masked_fill_(is_missing, 0))

    def sums(self) -> tuple[Tensor, ...]:
        if self._rows.device.type == "cpu":
            self._rows.index_fill_(0, (~self._is_put).nonzero().squeeze(1), 0)
        else:
            self._rows.masked_fill_(~self._is_put.unsqueeze(1), 0)
        return (self._sum,)


def kept_dtype(leaf: torch.dtype) -> torch.dtype:
    """Return the dtype of a leaf's gradient until backward: the leaf's own, but fp32 for fp16.

    A loss scale, without which fp16 has no numbers small enough, is known only then.
    """
    return torch.float32 if leaf == torch.float16 else leaf


def new_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(torch.is_grad_enabled())
