"""The interface of losses to rows of logits, and its implementation for tensors (methods.md §8.1, §9)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_opd.errors import ConfigError


class LogitRows(ABC):
    """Unshifted logits [B, S, X]; a loss reads rows of the flattened [B·S, X]."""

    shape: tuple[int, int, int]
    device: torch.device
    dtype: torch.dtype
    """Dtype of the rows that are read."""
    share: tuple[int, int] = (0, 1)
    """Index of this process and number of processes that compute one loss together, each some of its units."""
    is_product: bool = False
    """Rows are computed by a product with a head, which is inefficient for few rows."""
    block_bytes: int | None = None
    """Budget of a block, the same in all processes of a share; by default the device's minimum."""
    top_k: int | None = None
    """Number of likeliest tokens that are known, in addition to the next token; None if all tokens are known.

    With a number, rows are log-probabilities, −inf for unknown tokens, and an extra column after the vocabulary has
    the log of the unknown tokens' mass (methods.md §9.1).
    """

    @property
    def is_truncated(self) -> bool:
        """Whether only the likeliest tokens are known."""
        return self.top_k is not None

    def cut(self, width: int) -> LogitRows:
        """Return logits cut to the leading columns of the vocabulary; sources without an extra column return self."""
        return self

    @abstractmethod
    def read(self, rows: Tensor, width: int) -> Tensor:
        """Read the leading `width` columns of rows [R] → [R, width], without a graph.

        The result may be a view: the caller must not write to it. With a `share`, every process must call this equally
        often, each with its own rows.
        """

    def begin(self, rows: Sequence[Tensor]) -> None:  # noqa: B027  most sources need no notice
        """Announce the rows [R] that each process of the share reads and adds to next; an empty sequence resets this.

        Processes that know each other's rows need not exchange them.
        """

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce over the processes of a `share`, in place."""
        return tensor


class TrainableRows(LogitRows):
    """Logits with a gradient."""

    leaves: tuple[Tensor, ...]
    """Tensors that get the gradient."""

    @property
    def needs_gradient(self) -> bool:
        return any(leaf.requires_grad for leaf in self.leaves)

    @abstractmethod
    def gradients(self) -> Gradients:
        """Return an accumulator of gradients that starts at zero."""


class Gradients(ABC):
    """Accumulator of the gradients of a source's leaves."""

    dtype: torch.dtype
    """Dtype that `add` may round its argument to."""
    pulls_back: bool = False
    """Whether `pull_back` changes anything."""

    def columns(self, width: int) -> int:
        """Return how many columns `add` takes without a copy for a gradient of `width` columns, padded with zeros."""
        return width

    @abstractmethod
    def add(self, rows: Tensor, gradient: Tensor, *, onto: bool) -> None:
        """Add the gradient of rows [R] with respect to the result of `pull_back`: [R, width], or [R, columns(width)].

        onto: some of the rows were added to before, or are added by several processes of a share at once; the same in
        all processes.
        """

    @abstractmethod
    def pull_back(self, logits: Tensor, gradient: Tensor) -> Tensor:
        """Convert the gradient of logits [R, width] to the gradient before soft-cap and scale, which `add` takes."""

    @abstractmethod
    def sums(self) -> tuple[Tensor | None, ...]:
        """Return the gradient of each leaf in its `kept_dtype`, or None if it requires none."""


def logit_rows(logits: Tensor | LogitRows) -> LogitRows:
    """Wrap a tensor [B, S, X]; return `LogitRows` unchanged."""
    return TensorLogits(logits) if isinstance(logits, Tensor) else logits


def trainable_rows(logits: Tensor | LogitRows) -> TrainableRows:
    """Wrap the student's logits. Raises ConfigError for logits without a gradient."""
    rows = logit_rows(logits)
    if not isinstance(rows, TrainableRows):
        raise ConfigError(
            f"student_logits are {type(rows).__name__}, which pass no gradient on; pass them as a teacher's logits"
        )
    return rows


def check_shares(student: LogitRows, teacher: LogitRows) -> None:
    """Raise ConfigError for a teacher spread over ranks unless the student has the same share."""
    if teacher.share not in ((0, 1), student.share):
        raise ConfigError(
            f"the teacher's columns are spread over {teacher.share[1]} ranks, the student's over {student.share[1]}; "
            "spread both over one group, or give the teacher whole"
        )


class TensorLogits(TrainableRows):
    """Logits in a tensor [B, S, X]."""

    def __init__(self, logits: Tensor) -> None:
        self.leaves = (logits,)
        self.shape = (logits.shape[0], logits.shape[1], logits.shape[2])
        self.device, self.dtype = logits.device, logits.dtype

    def read(self, rows: Tensor, width: int) -> Tensor:
        columns = self.leaves[0].detach().flatten(0, 1).narrow(1, 0, width)
        # Only on a CPU: on other devices the host would have to wait.
        if len(rows) and rows.device.type == "cpu" and bool((rows.diff() == 1).all()):
            return columns.narrow(0, int(rows[0]), len(rows))
        return columns.index_select(0, rows)

    def gradients(self) -> Gradients:
        return _TensorGradients(self.leaves[0])

    def cut_off(self) -> TensorLogits:
        """Return these logits as a new leaf, which accumulates gradients before they go back through a model."""
        return TensorLogits(new_leaf(self.leaves[0]))


class _TensorGradients(Gradients):
    """Gradient of a tensor of logits.

    Only rows that were never written are zeroed: on a CPU a pass over all rows takes as long as some losses.
    """

    def __init__(self, logits: Tensor) -> None:
        self.dtype = kept_dtype(logits.dtype)
        self._sum = torch.empty(logits.shape, dtype=self.dtype, device=logits.device)
        self._rows = self._sum.flatten(0, 1)
        self._is_written = torch.zeros(len(self._rows), dtype=torch.bool, device=logits.device)

    def add(self, rows: Tensor, gradient: Tensor, *, onto: bool) -> None:
        width = gradient.shape[1]
        columns = self._rows.narrow(1, 0, width)
        if onto:
            self._zero_unwritten(rows)
            columns.index_add_(0, rows, gradient.to(self._sum.dtype))
        else:
            columns.index_copy_(0, rows, gradient.to(self._sum.dtype))
            self._rows.narrow(1, width, self._rows.shape[1] - width).index_fill_(0, rows, 0)
        self._is_written.index_fill_(0, rows, True)

    def pull_back(self, logits: Tensor, gradient: Tensor) -> Tensor:
        return gradient

    def _zero_unwritten(self, rows: Tensor) -> None:
        if rows.device.type == "cpu":
            self._rows.index_fill_(0, rows[~self._is_written[rows]], 0)
        else:  # Boolean indexing would make the host wait for the number of rows.
            is_unwritten = ~self._is_written[rows].unsqueeze(1)
            self._rows.index_copy_(0, rows, self._rows.index_select(0, rows).masked_fill_(is_unwritten, 0))

    def sums(self) -> tuple[Tensor, ...]:
        if self._rows.device.type == "cpu":
            self._rows.index_fill_(0, (~self._is_written).nonzero().squeeze(1), 0)
        else:
            self._rows.masked_fill_(~self._is_written.unsqueeze(1), 0)
        return (self._sum,)


def kept_dtype(leaf: torch.dtype) -> torch.dtype:
    """Return the dtype of a leaf's gradient until backward: the leaf's dtype, but fp32 for fp16.

    fp16 underflows without the loss scale, which is known only in backward.
    """
    return torch.float32 if leaf == torch.float16 else leaf


def new_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(torch.is_grad_enabled())
