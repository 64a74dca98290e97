"""Every loss, and batches that every loss accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_opd.losses import (
    alm,
    byte_prefix,
    escd,
    gold,
    h_kl,
    p_kl,
    same_vocab,
    sampled_chunk_kl,
    sampled_kl,
    shared_prefix,
    strict,
    tcad,
    uld,
)
from nemo_opd.projection import ProjectionMatrix
from nemo_opd.projection.retokenization import byte_order
from nemo_opd.types import LossOutput

KINDS = (("forward_kl", {}), ("reverse_kl", {}), ("tvd", {}), ("jsd", {"beta": 0.3}), ("mixed", {"mixed_weight": 0.2}))
"""Divergences with their settings."""


@dataclass(frozen=True)
class Batch:
    """Sequences of two tokenizers with their logits, and the projection between the vocabularies."""

    student: Tensor
    """[B, S, ≥ V]"""
    teacher: Tensor
    """[B, T, ≥ W]"""
    student_ids: Tensor
    teacher_ids: Tensor
    student_chunk_id: Tensor
    teacher_chunk_id: Tensor
    projection: ProjectionMatrix

    def __len__(self) -> int:
        return len(self.student)

    @property
    def chunk_arguments(self) -> dict[str, Tensor]:
        """Arguments of a loss between two tokenizers."""
        names = ("student_ids", "teacher_ids", "student_chunk_id", "teacher_chunk_id")
        return {name: getattr(self, name) for name in names}

    def rows(self, index: Sequence[int] | slice) -> Batch:
        return replace(self, **{name: value[index] for name, value in vars(self).items() if name != "projection"})

    def cut(self, positions: int) -> Batch:
        """Cut to the student's first positions, and the teacher too if it has equally many."""
        same = self.student.shape[1] == self.teacher.shape[1]
        names = [name for name in vars(self) if name != "projection" and (same or name.startswith("student"))]
        return replace(self, **{name: getattr(self, name)[:, :positions] for name in names})

    def with_logits(self, student: Tensor, teacher: Tensor | None = None) -> Batch:
        return replace(self, student=student, teacher=self.teacher if teacher is None else teacher)

    def to(self, dtype: torch.dtype) -> Batch:
        return self.with_logits(self.student.to(dtype), self.teacher.to(dtype))

    def padded(self, student: int, teacher: int) -> Batch:
        """Add positions without a chunk to the right, with arbitrary ids and logits."""
        return Batch(
            F.pad(self.student, (0, 0, 0, student), value=7.0),
            F.pad(self.teacher, (0, 0, 0, teacher), value=-3.0),
            F.pad(self.student_ids, (0, student), value=1),
            F.pad(self.teacher_ids, (0, teacher), value=1),
            F.pad(self.student_chunk_id, (0, student), value=-1),
            F.pad(self.teacher_chunk_id, (0, teacher), value=-1),
            self.projection,
        )

    def widened(self, student: int, teacher: int) -> Batch:
        """Add columns beyond the vocabularies; they are the most likely ones."""
        return self.with_logits(
            F.pad(self.student, (0, student), value=30.0), F.pad(self.teacher, (0, teacher), value=40.0)
        )

    def without_chunks(self) -> Batch:
        nothing = (torch.full_like(side, -1) for side in (self.student_chunk_id, self.teacher_chunk_id))
        return replace(self, student_chunk_id=next(nothing), teacher_chunk_id=next(nothing))

    def with_student_as_teacher(self) -> Batch:
        return replace(
            self,
            teacher=self.student.detach().clone(),
            teacher_ids=self.student_ids,
            teacher_chunk_id=self.student_chunk_id,
        )


@dataclass(frozen=True)
class Case:
    """A loss with options, and the identities of methods.md §5.12 that hold for it."""

    name: str
    loss: Callable[..., LossOutput]
    options: Mapping[str, Any] = field(default_factory=dict)
    needs_projection: bool = True
    takes_divergence: bool = True
    takes_temperature: bool = True
    """If False, `run` drops a temperature."""
    is_zero_for_equal_sides: bool = True
    """If False, equal sides are a minimum above zero, or still have a gradient."""
    pulls_at_equal_sides: bool = False
    kd_is_the_loss: bool = True
    """The metric `kd` is the mean of the loss over units."""
    needs_every_token: bool = False
    """For equal sides it is zero only if the projection maps all tokens."""
    needs_one_to_one: bool = False
    """For equal sides it is zero only in chunks with one token a side."""
    same_vocab_options: Mapping[str, Any] | None = None
    """Options that make same_vocab equal to it for a single tokenizer, or None."""
    chooses_per_call: bool = False
    """It chooses something over all units of a call, so microbatches differ."""

    def __str__(self) -> str:
        return self.name

    def run(self, batch: Batch, **options: Any) -> LossOutput:
        settings = {**self.options, **options}
        if not self.takes_temperature:
            settings.pop("temperature", None)
        return self.loss(batch.student, batch.teacher, **self.arguments(batch), **settings)

    @property
    def is_of_one_vocabulary(self) -> bool:
        return self.loss in (same_vocab, tcad, sampled_kl)

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """Return the loss's arguments besides logits and options."""
        if self.is_of_one_vocabulary:
            ids = {"ids": batch.student_ids} if self.loss is sampled_kl else {}
            return {"mask": batch.student_chunk_id >= 0, **ids}
        return batch.chunk_arguments | ({"projection": batch.projection} if self.needs_projection else {})

    def value_and_gradient(self, batch: Batch, **options: Any) -> tuple[Tensor, Tensor]:
        student = batch.student.detach().requires_grad_()
        loss = self.run(batch.with_logits(student), **options).loss
        return loss.detach(), torch.autograd.grad(loss, student)[0]

    def batch(self, seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 3.0) -> Batch:
        """Make a batch of two tokenizers, or a single one if the loss needs that."""
        make = one_tokenizer if self.is_of_one_vocabulary else two_tokenizers
        return make(seed, scale).to(dtype)

    def divergences(self) -> list[Case]:
        if not self.takes_divergence:
            return [self]
        return [
            replace(self, name=f"{self.name}-{kind}", options={**self.options, "divergence": kind, **weights})
            for kind, weights in KINDS
        ]


def same_vocab_case(name: str, **options: Any) -> Case:
    return Case(f"same_vocab-{name}" if name else "same_vocab", same_vocab, options, needs_projection=False)


def tcad_case(name: str, **options: Any) -> Case:
    covered = options.get("coverage_coef", 1) == 0
    return Case(
        f"tcad-{name}" if name else "tcad",
        tcad,
        options,
        needs_projection=False,
        is_zero_for_equal_sides=covered,
        pulls_at_equal_sides=not covered,
        kd_is_the_loss=False,
    )


def sampled_kl_case(estimator: str, loss: Callable[..., LossOutput] = sampled_kl) -> Case:
    """Make the form that is differentiated; a policy gradient is not the gradient of its value."""
    return Case(
        f"{loss.__name__}-{estimator}",
        loss,
        {"estimator": estimator, "update": "direct"},
        needs_projection=False,
        takes_divergence=False,
        takes_temperature=False,
        kd_is_the_loss=estimator == "k3",
    )


LOSSES = [
    same_vocab_case(""),
    same_vocab_case("teacher_topk", support="teacher_topk", top_k=3, normalization="support"),
    same_vocab_case("student_topk", support="student_topk", top_k=3, normalization="rest"),
    same_vocab_case("union", support="union", top_k=2, normalization="rest"),
    tcad_case("", support_size=3),
    tcad_case("renormalised", support_size=3, coverage_coef=0),
    tcad_case("union", support_size=2, coverage_coef=0, support="union"),
    tcad_case("all", support_size=99, coverage_coef=0),
    sampled_kl_case("k2"),
    sampled_kl_case("k3"),
    sampled_kl_case("k2", sampled_chunk_kl),
    sampled_kl_case("k3", sampled_chunk_kl),
    Case("p_kl", p_kl, needs_every_token=True, same_vocab_options={}),
    Case(
        "p_kl-vocab_topk",
        p_kl,
        {"vocab_topk": 3, "coverage_coef": 0.3},
        needs_every_token=True,
        chooses_per_call=True,
    ),
    Case("p_kl-mean", p_kl, {"merge": "mean"}, needs_every_token=True, needs_one_to_one=True, same_vocab_options={}),
    Case("gold", gold, same_vocab_options={}),
    Case("gold-tails", gold, {"common_weight": 0.3, "uncommon_weight": 1.7, "uncommon_topk": 3}),
    Case("gold-mean", gold, {"merge": "mean"}, same_vocab_options={}),
    Case("h_kl", h_kl, same_vocab_options={}),
    Case("h_kl-mean", h_kl, {"merge": "mean"}, same_vocab_options={}),
    Case("strict", strict, same_vocab_options={}),
    Case("strict-rest", strict, {"normalization": "rest"}, same_vocab_options={}),
    Case(
        "strict-topk",
        strict,
        {"top_k": 2},
        same_vocab_options={"support": "student_topk", "top_k": 2, "normalization": "support"},
    ),
    Case(
        "strict-topk-rest",
        strict,
        {"top_k": 2, "normalization": "rest"},
        same_vocab_options={"support": "student_topk", "top_k": 2, "normalization": "rest"},
    ),
    Case("byte_prefix", byte_prefix, same_vocab_options={}),
    Case("byte_prefix-spelling", byte_prefix, {"pieces": "spelling"}, same_vocab_options={}),
    *(
        Case(
            f"byte_prefix-{ends}",
            byte_prefix,
            {"positions": "all", "ends": ends, "pieces": "spelling"},
            takes_divergence=ends != "drop",
            needs_every_token=True,
            same_vocab_options={},
        )
        for ends in ("drop", "cover", "rest")
    ),
    Case("shared_prefix", shared_prefix, same_vocab_options={}),
    Case("escd", escd, same_vocab_options={}),
    Case("alm", alm, needs_projection=False, takes_divergence=False, is_zero_for_equal_sides=False),
    Case("uld", uld, needs_projection=False, takes_divergence=False),
]
CONTINUED = [
    Case(
        f"{loss.__name__}-continuation",
        loss,
        {"continuation_weight": 0.5},
        is_zero_for_equal_sides=False,
        needs_every_token=loss is p_kl,
        same_vocab_options={},
    )
    for loss in (p_kl, gold, h_kl, strict, byte_prefix, shared_prefix)
]
"""Losses plus the likelihoods of longer chunks; their minimum is not zero."""
ALL_LOSSES = [*LOSSES, *CONTINUED]
OF_EVERY_DIVERGENCE = ("p_kl", "gold")
"""They compare logits and log-probabilities, and use different forms of the divergences."""
DIVERGENCES = [
    case for loss in ALL_LOSSES for case in (loss.divergences() if loss.name in OF_EVERY_DIVERGENCE else [loss])
]
"""Every loss with its default divergence, and every divergence with two losses."""

STUDENT = [b"a", b"b", b"c", b"ab", b"abc", b"cab", b"bb", None, b"cc"]
TEACHER = [b"ab", b"b", b"c", b"a", b"ca", b"bc", b"cb", None, b"cab", b"bca", b"b"]
"""Each side has a token without bytes, and two teacher tokens have equal bytes."""
ROWS: list[dict[int, float]] = [{3: 1}, {1: 1}, {2: 1}, {0: 1}, {9: 0.7, 0: 0.3}, {8: 1}, {5: 0.5, 1: 0.5}, {}, {2: 1}]
"""Rows of the projection: five exact rows, a relaxed pair, a row without a pair, an empty row and a lost claim."""
EXACT = [True] * 4 + [False, True] + [False] * 3
PHI = [3, 1, 2, 0, 2, 1, 2, -1, 5, 1, 1]
SPELLINGS = [[3], [1], [2], [0], [2, 0], [1, 2], [2, 1], [], [5], [1, 2, 0], [1]]
"""The student spells the teacher's ab and cab with a single token, and bca as b, c, a."""
STUDENT_CELLS = [0, 1, 2, 3, 3, 4, 1, -1, 2]
TEACHER_CELLS = [3, 1, 2, 0, 2, 1, 2, -1, 4, 1, 1]
CHUNKS = (
    [[-1, 0, 1, 2, 3, 3, 4, 5, 6], [-1, 0, 1, 2, 3, 4, -1, -1, -1]],
    [[-1, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 6], [-1, 0, 0, 0, 1, 1, 2, 2, 3, -1, 4, 4, -1]],
)
IDS = (
    [[0, 0, 4, 5, 0, 6, 4, 2, 3], [0, 5, 3, 6, 2, 8, 0, 0, 0]],
    [[0, 3, 0, 2, 4, 1, 0, 1, 3, 1, 2, 2, 0], [0, 2, 3, 1, 3, 10, 1, 1, 2, 0, 2, 2, 0]],
)
"""Row 0: a, abc = ab·c, cab = ca·b, a·bb = ab·b, abc = a·b·c, c, ab.
Row 1: cab = c·a·b, ab = a·b, bb = b·b, c, cc = c·c."""


def random_logits(rows: int, positions: int, width: int, seed: int, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, positions, width, generator=generator, dtype=torch.float64)


def random_chunk_ids(rng: np.random.Generator, num_rows: int, student_len: int, teacher_len: int) -> tuple:
    """Make chunks of 1 to 3 tokens a side, some with unaligned tokens before them, and an unaligned tail; int32
    tensors.
    """
    sides: tuple[list, list] = ([], [])
    for _ in range(num_rows):
        student: list[int] = []
        teacher: list[int] = []
        chunk = 0
        while True:
            lead = (int(rng.integers(0, 2)), int(rng.integers(0, 2)))
            size = (int(rng.integers(1, 4)), int(rng.integers(1, 4)))
            if len(student) + lead[0] + size[0] > student_len or len(teacher) + lead[1] + size[1] > teacher_len:
                break
            student += [-1] * lead[0] + [chunk] * size[0]
            teacher += [-1] * lead[1] + [chunk] * size[1]
            chunk += 1
        sides[0].append(student + [-1] * (student_len - len(student)))
        sides[1].append(teacher + [-1] * (teacher_len - len(teacher)))
    return tuple(torch.tensor(side, dtype=torch.int32) for side in sides)


@cache
def pair() -> ProjectionMatrix:
    indices, weights = np.full((len(ROWS), 2), -1), np.zeros((len(ROWS), 2))
    for s, row in enumerate(ROWS):
        indices[s, : len(row)], weights[s, : len(row)] = list(row), list(row.values())
    return ProjectionMatrix(
        indices,
        weights,
        np.array(EXACT),
        teacher_vocab_size=len(TEACHER),
        student_shared_prefix=STUDENT_CELLS,
        teacher_shared_prefix=TEACHER_CELLS,
        student_shared_spelling=STUDENT_CELLS,
        teacher_shared_spelling=TEACHER_CELLS,
        byte_prefix=PHI,
        teacher_byte_order=byte_order([piece or b"" for piece in TEACHER]),
        **pieces_of(SPELLINGS),
        **bytes_of(STUDENT, TEACHER),
    )


def pieces_of(spellings: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the arrays of both kinds of pieces."""
    ids, ends = [piece for spelling in spellings for piece in spelling], np.cumsum(list(map(len, spellings)))
    return {
        "teacher_spellings": np.array(ids, np.int64),
        "teacher_spelling_ends": ends,
        "teacher_prefix_pieces": np.array(ids, np.int64),
        "teacher_prefix_ends": ends,
    }


def bytes_of(student: Sequence[bytes | None], teacher: Sequence[bytes | None]) -> dict[str, Any]:
    """Return the bytes of both sides' tokens."""
    arrays: dict[str, Any] = {}
    for side, texts in (("student", student), ("teacher", teacher)):
        arrays[f"{side}_bytes"] = np.frombuffer(b"".join(text or b"" for text in texts), np.uint8).astype(np.int32)
        arrays[f"{side}_byte_ends"] = np.cumsum([len(text or b"") for text in texts])
    return arrays


@cache
def identity(size: int, num_known: int | None = None) -> ProjectionMatrix:
    """Map a tokenizer to itself.

    Only the first `num_known` tokens are known to be equal (default: all). If some are unknown, pairs of known tokens
    share a cell of the shared prefixes.
    """
    tokens = np.arange(size)
    exact = tokens < (size if num_known is None else num_known)
    cells = np.where(exact, tokens if num_known is None else tokens // 2, -1)
    return ProjectionMatrix(
        np.where(exact, tokens, -1)[:, None],
        exact[:, None].astype(np.float32),
        exact,
        teacher_vocab_size=size,
        student_shared_prefix=cells,
        teacher_shared_prefix=cells,
        student_shared_spelling=cells,
        teacher_shared_spelling=cells,
        byte_prefix=np.where(exact, tokens, -1),
        teacher_byte_order=byte_order([bytes([i // 256, i % 256]) for i in range(size)]),
        **pieces_of([[i] if is_known else [] for i, is_known in enumerate(exact)]),
        **bytes_of(*[[bytes([i // 256, i % 256]) for i in range(size)]] * 2),
    )


def two_tokenizers(seed: int = 0, scale: float = 3.0) -> Batch:
    """B = 2, S = 9, T = 13: chunks of 1:1, 1:2, 1:3 and 2:2 tokens."""
    sides = (torch.tensor(side) for side in (*IDS, *CHUNKS))
    student, teacher = random_logits(2, 9, len(STUDENT), seed, scale), random_logits(2, 13, len(TEACHER), seed + 1)
    return Batch(student, teacher, *sides, pair())


def one_tokenizer(seed: int = 0, scale: float = 3.0, *, positions: int = 7, width: int = 8) -> Batch:
    """B = 2, one token a chunk; some tokens have no chunk."""
    student, teacher = (random_logits(2, positions, width, seed + k, scale) for k in (0, 1))
    chunks = torch.arange(positions).repeat(2, 1)
    chunks[1, 2::3] = -1
    ids = torch.stack([torch.arange(positions), torch.arange(positions).flip(0)]) % width
    return Batch(student, teacher, ids, ids, chunks, chunks, identity(width))
