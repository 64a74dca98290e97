"""Which tokens two distributions are compared on, and what becomes of the mass of the others (METHODS §3)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.losses.divergence import Divergence

SUPPORTS = ("full", "teacher_topk", "student_topk", "union")
NORMALIZATIONS = ("full", "support", "rest")


@dataclass(frozen=True, slots=True)
class Support:
    """Which columns of a vocabulary are compared, chosen unit by unit."""

    kind: str = "full"
    """One of SUPPORTS: every column, the `top_k` most likely of one side, or of either."""
    top_k: int | None = None
    """Every column where there are no more than that."""
    normalization: str = "rest"
    """One of NORMALIZATIONS, which are all the same where every column is chosen.

    rest: probabilities over the vocabulary, with one more cell for the mass that each side has elsewhere. From 0, where
    all cells agree, to the divergence over the vocabulary.
    support: probabilities renormalised on the chosen columns, for parity with systems that do so: nothing is learnt
    about the mass elsewhere.
    full: probabilities over the vocabulary, summed over the chosen columns only, likewise for parity: the sum may be
    negative, and forward and reverse KL have a gradient even where student and teacher are equal.
    """

    def __post_init__(self) -> None:
        for key, value, choices in (
            ("support", self.kind, SUPPORTS),
            ("normalization", self.normalization, NORMALIZATIONS),
        ):
            if value not in choices:
                raise ConfigError(f"{key}={value!r}: there is no such {key}; choose from {', '.join(choices)}")
        if self.kind == "full" and self.top_k is not None:
            raise ConfigError(
                f"top_k={self.top_k}: support=full takes every column; choose another support, or leave top_k out"
            )
        if self.kind != "full" and self.top_k is None:
            raise ConfigError(f"support={self.kind} needs top_k; give the number of columns to take from a side")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k}: a support has at least 1 column; give a larger number")

    def compare(self, divergence: Divergence, teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
        """Divergence of each unit, in nats: logits/τ [U, V] of teacher and student → [U] (METHODS §3).

        The choice of columns is a constant, and so is the teacher.
        """
        chosen = None if self.takes_all(student_logits.shape[-1]) else self.choose(teacher_logits, student_logits)
        if chosen is not None and self.normalization == "support":
            log_t = chosen.take(teacher_logits).log_softmax(-1)
            return divergence(log_t, chosen.take(student_logits).log_softmax(-1))
        log_t = teacher_logits.log_softmax(-1)
        log_s = student_logits.log_softmax(-1)
        del teacher_logits, student_logits  # Two of the largest tensors here, and nothing else holds them.
        if chosen is None:
            return divergence(log_t, log_s)
        cells_t, cells_s = chosen.take(log_t), chosen.take(log_s)
        if self.normalization == "full":
            return truncated(divergence, cells_t, cells_s)
        return divergence(*with_rest(cells_t, cells_s, chosen.rest(log_t), chosen.rest(log_s)))

    def takes_all(self, num_columns: int) -> bool:
        return self.top_k is None or self.top_k >= num_columns

    def num_cells(self, num_columns: int) -> int:
        """The most cells that a unit of that many columns has."""
        if self.top_k is None or self.takes_all(num_columns):
            return num_columns
        return (2 if self.kind == "union" else 1) * self.top_k + 1

    def choose(self, teacher_logits: Tensor, student_logits: Tensor) -> "Columns":
        """The columns of each unit: logits [U, V] of both sides; `top_k` is less than V."""
        assert self.top_k is not None
        if self.kind == "teacher_topk":
            return Columns(_largest(teacher_logits, self.top_k))
        if self.kind == "student_topk":
            return Columns(_largest(student_logits, self.top_k))
        return Columns.union(
            _largest(teacher_logits, self.top_k), _largest(student_logits, self.top_k), teacher_logits.shape[-1]
        )


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of each unit."""

    index: Tensor
    """int64 [U, X]"""
    repeated: Tensor | None = None
    """bool [U, X]: the column stands earlier in its row, so that this one is no cell; None: nowhere."""

    @staticmethod
    def union(first: Tensor, second: Tensor, num_columns: int) -> "Columns":
        """Of indices [U, X] and [U, Y], each without repeats in a row, into rows of `num_columns`."""
        in_first = torch.zeros(len(first), num_columns, dtype=torch.bool, device=first.device).scatter_(1, first, True)
        repeated = torch.cat([torch.zeros_like(first, dtype=torch.bool), in_first.gather(1, second)], 1)
        return Columns(torch.cat([first, second], 1), repeated)

    def take(self, rows: Tensor) -> Tensor:
        """Logits or log-probabilities [U, V] → [U, X], −inf in a repeat."""
        taken = rows.gather(-1, self.index)
        return taken if self.repeated is None else taken.masked_fill(self.repeated, -torch.inf)

    def rest(self, log_p: Tensor) -> Tensor:
        """log Σ p over the columns not taken: [U, V] → [U, 1].

        A sum over those columns, since 1 − Σ of the others has no digit left where they hold nearly all mass. In a row
        with every column taken it is the lowest finite number, whose gradient is 0 and not the NaN of −inf.
        """
        others = log_p.scatter(-1, self.index, torch.finfo(log_p.dtype).min)
        return others.logsumexp(-1, keepdim=True)


def with_rest(log_t: Tensor, log_s: Tensor, rest_t: Tensor | None, rest_s: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities of cells [U, X] and of the rest [U, 1] on either side → those of all cells (METHODS §3).

    None: a side without columns beyond the cells. Where only one side has some, a rest cell would make divergences
    infinite whatever the student does, so both sides are renormalised without it.
    """
    if rest_t is not None and rest_s is not None:
        return torch.cat([log_t, rest_t], -1), torch.cat([log_s, rest_s], -1)
    if rest_t is None and rest_s is None:
        return log_t, log_s
    return log_t.log_softmax(-1), log_s.log_softmax(-1)


def truncated(divergence: Divergence, log_t: Tensor, log_s: Tensor) -> Tensor:
    """The sum of METHODS §3 over cells [U, X] that are not all of a distribution → [U], which may be negative.

    What `Divergence` adds of s − t in each cell is nothing in sum over a whole distribution, and taken out again here.
    """
    excess = (log_s.exp() - log_t.detach().exp()).sum(-1)
    return divergence(log_t, log_s) - divergence.excess_weight * excess


def _largest(logits: Tensor, top_k: int) -> Tensor:
    return logits.detach().topk(top_k, dim=-1, sorted=False).indices
