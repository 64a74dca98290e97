"""Rows of logits as losses read them (methods.md §8.1, §9): the interface, tensors, and encoded likeliest tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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

    @abstractmethod
    def gradients(self) -> Gradients:
        """Return an accumulator of gradients that starts at zero."""


class Gradients(ABC):
    """Accumulator of the gradients of a source's leaves."""

    dtype: torch.dtype
    """Dtype that `add` may round its argument to."""
    pull_back: Callable[[Tensor, Tensor], Tensor] | None = None
    """Function from logits [R, width] and their gradient to the gradient before soft-cap and scale, which `add` takes;
    None if they are the same.
    """

    def columns(self, width: int) -> int:
        """Return how many columns `add` takes without a copy for a gradient of `width` columns, padded with zeros."""
        return width

    @abstractmethod
    def add(self, rows: Tensor, gradient: Tensor, *, onto: bool) -> None:
        """Add the gradient of rows [R], after `pull_back`: [R, width], or [R, columns(width)].

        onto: some of the rows were added to before, or are added by several processes of a share at once; the same in
        all processes.
        """

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


ALIGNMENT = 64
"""Row strides are multiples of this many numbers: 128 bytes in 16 bits.

If rows are not aligned to 16 bytes, as with Qwen3's 151,669 columns, cuBLAS falls back to kernels of earlier GPUs, and
Triton's kernels load one number at a time.
"""


def row_distance(width: int, device: torch.device) -> int:
    """Return the stride of rows of `width` numbers."""
    return width if device.type == "cpu" else -(-width // ALIGNMENT) * ALIGNMENT


def empty_rows(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialised rows [R, width] with a stride of `row_distance`."""
    return torch.empty(num_rows, row_distance(width, device), dtype=dtype, device=device)[:, :width]


class SparseLogits(LogitRows):
    """Log-probabilities [B, T, W] of the tokens that rows of bytes contain, −inf for all other tokens.

    Unless the rows contain all tokens, an additional column has the log of the other tokens' mass.
    """

    dtype = torch.float32

    def __init__(self, rows: Tensor, layout: SparseLayout, places: Tensor, size: int | None = None) -> None:
        """Wrap encoded rows.

        rows: uint8 [N, handed_bytes] of packed sequences. places: int64 [B, T], from `places_in_row`. size: leading
        columns of the vocabulary to read; by default all.
        """
        self.rows, self.layout, self._places = rows, layout, places
        self.top_k = layout.top_k if layout.top_k < layout.vocab_size else None
        self._size = layout.vocab_size if size is None else size
        self.shape = (places.shape[0], places.shape[1], self._size + self.is_truncated)
        self.device = rows.device

    def cut(self, width: int) -> SparseLogits:
        return SparseLogits(self.rows, self.layout, self._places, min(width, self._size))

    def read(self, rows: Tensor, width: int) -> Tensor:
        encoded = self._encoded(rows)
        decoded, size = self.layout.decode(encoded), self._size
        # Ids without a column go to the last column, which is overwritten.
        log_p = decoded.log_p.new_full((len(rows), size + 1), -torch.inf)
        log_p.scatter_(1, decoded.ids.clamp(max=size), decoded.log_p)
        next_ids = self.layout.next_ids(encoded).clamp(max=size).unsqueeze(1)
        log_p.scatter_(1, next_ids, decoded.log_p_next.unsqueeze(1))
        log_p[:, size] = decoded.log_rest
        return log_p[:, :width]

    def known(self, rows: Tensor) -> SparseRows:
        """Decode rows [R] of the flattened [B·T]."""
        return self.layout.decode(self._encoded(rows))

    @property
    def is_answered(self) -> Tensor:
        """Whether the teacher's answer contains each token's log-probability, bool [B, T]; true for first tokens."""
        log_p_next = self.layout.decode(self.rows).log_p_next[self._places]
        return torch.nn.functional.pad(~log_p_next[:, :-1].isnan(), (1, 0), value=True)

    def next_beyond_likeliest(self, rows: Tensor) -> Tensor:
        """Return the column of each next token that is not among the k likeliest, int64 [R]; else the last column."""
        encoded = self._encoded(rows)
        following = self.layout.next_ids(encoded)
        is_likeliest = (self.layout.decode(encoded).ids == following.unsqueeze(1)).any(1)
        return following.clamp(max=self._size).masked_fill(is_likeliest, self._size)

    def _encoded(self, rows: Tensor) -> Tensor:
        return self.rows.index_select(0, self._places.flatten()[rows])


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Decoded rows."""

    ids: Tensor
    """int64 [R, k]: the likeliest tokens in descending order; ids outside the vocabulary if fewer than k are known."""
    log_p: Tensor
    """fp32 [R, k]: their log-probabilities; −inf for ids outside the vocabulary."""
    log_p_next: Tensor
    """fp32 [R]: log-probability of the next token; 0 at the end of a segment, NaN if the server did not answer here."""
    log_rest: Tensor
    """fp32 [R]: log of the mass of all tokens except `ids` and the next token; −inf if those are all tokens."""
    entropy: Tensor
    """fp32 [R]: entropy of the full distribution, in nats."""


_NUMBERS = 3
"""Number of fp32 values after the tokens of a row."""


@dataclass(frozen=True, slots=True)
class SparseLayout:
    """Layout of a row of bytes."""

    top_k: int
    vocab_size: int
    """W"""
    value_bytes: int
    """4: a log-probability in fp32. 3: rounded to its highest 24 bits, with a relative error of at most 2⁻¹⁶."""
    id_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.top_k <= self.vocab_size or self.value_bytes not in (3, 4):
            raise ConfigError(
                f"top_k={self.top_k} of {self.vocab_size} tokens in {self.value_bytes} bytes: give 1 to "
                f"{self.vocab_size} tokens, and 3 or 4 bytes"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row."""
        return self.top_k * (self.id_bytes + self.value_bytes) + 4 * _NUMBERS

    @property
    def handed_bytes(self) -> int:
        """Bytes of a row in the handoff: a stored row and the id of the next token."""
        return self.row_bytes + self.id_bytes

    def encode(self, log_p: Tensor, following: Tensor) -> Tensor:
        """Encode log-probabilities fp32 [R, W] as uint8 [R, row_bytes].

        following: int64 [R], the next tokens; −1 at the end of a segment.
        """
        likeliest = log_p.topk(self.top_k, dim=1)
        target = following.clamp(min=0).unsqueeze(1)
        has_next = (following >= 0).unsqueeze(1)
        log_p_next = log_p.gather(1, target).where(has_next, log_p.new_zeros(()))
        unknown = log_p.scatter(1, likeliest.indices, -torch.inf)
        unknown.scatter_(1, target, unknown.gather(1, target).masked_fill(has_next, -torch.inf))
        numbers = log_p_next.squeeze(1), unknown.logsumexp(1), torch.special.entr(log_p.exp()).sum(1)
        return self.pack(SparseRows(likeliest.indices, likeliest.values, *numbers))

    def pack(self, decoded: SparseRows) -> Tensor:
        """Encode rows as uint8 [R, row_bytes]; the inverse of `decode`."""
        numbers = torch.stack([decoded.log_p_next, decoded.log_rest, decoded.entropy], 1)
        parts = [
            _low_bytes(decoded.ids.int(), self.id_bytes),
            _rounded(decoded.log_p) if self.value_bytes == 3 else _low_bytes(decoded.log_p, 4),
            _low_bytes(numbers, 4),
        ]
        return torch.cat(parts, 1)

    def decode(self, rows: Tensor) -> SparseRows:
        """Decode uint8 [R, ≥ row_bytes]."""
        sizes = [self.top_k * self.id_bytes, self.top_k * self.value_bytes, 4 * _NUMBERS]
        ids, values, numbers = rows[:, : self.row_bytes].split(sizes, 1)
        log_p_next, log_rest, entropy = _as_words(numbers, 4).view(torch.float32).unbind(1)
        words = _as_words(values, self.value_bytes)
        log_p = (words << 8 if self.value_bytes == 3 else words).view(torch.float32)
        return SparseRows(_as_words(ids, self.id_bytes).long(), log_p, log_p_next, log_rest, entropy)

    def next_ids(self, rows: Tensor) -> Tensor:
        """Return the next tokens of uint8 [R, handed_bytes], int64 [R]; without one, the vocabulary's size or more."""
        return _as_words(rows[:, self.row_bytes :], self.id_bytes).long().squeeze(1)


def _low_bytes(numbers: Tensor, num_bytes: int) -> Tensor:
    """Return the lowest bytes of 32-bit numbers [R, k]: uint8 [R, k · num_bytes]."""
    return numbers.contiguous().view(torch.uint8).view(len(numbers), -1, 4)[..., :num_bytes].flatten(1)


def _rounded(values: Tensor) -> Tensor:
    """Round fp32 [R, k] to their highest three bytes: uint8 [R, k · 3]."""
    words = values.contiguous().view(torch.int32) + 0x80
    return words.view(torch.uint8).view(len(values), -1, 4)[..., 1:].flatten(1)


def _as_words(stored: Tensor, num_bytes: int) -> Tensor:
    """Return numbers of `num_bytes` as int32: uint8 [R, k · num_bytes] → [R, k]."""
    # Not −1, which reshape rejects for 0 rows.
    grouped = stored.reshape(len(stored), stored.shape[1] // num_bytes, num_bytes)
    return torch.nn.functional.pad(grouped, (0, 4 - num_bytes)).view(torch.int32).squeeze(2)
