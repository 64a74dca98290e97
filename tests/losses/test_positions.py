"""A target at every student position, against all texts of a source that can be listed."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_opd.losses import byte_prefix
from nemo_opd.losses.position_units import compared_positions
from nemo_opd.projection import ProjectionMatrix
from nemo_opd.projection.spelling import byte_order
from tests.losses.oracle_prefix import matrix
from tests.reference import positions
from tests.reference.positions import Merges, next_tokens, source, targets, tokenize, vocabulary

AB, CA, ABC, CAB = ("a", "b"), ("c", "a"), ("ab", "c"), ("ca", "b")
PAIRS: dict[str, tuple[Merges, Merges]] = {"letters": ((), (AB, ABC)), "merges": ((AB, CA), (AB, CA, CAB, ABC))}
"""Merges of the student and of the teacher. All tokens of the teacher that begin where no realised one does are ruled
out by those that are realised, so `cover` is exact.
"""
SHORTER: dict[str, tuple[Merges, Merges]] = {"ends inside": ((), (("b", "c"), AB))}
"""A teacher token that began earlier can end inside of the realised one, so `cover` is not exact."""
EMPTY = -60.0
"""log of a probability of 0, for logits that are finite."""


class Toy:
    """All texts after a token that begins them, as both sides see them."""

    def __init__(self, student: Merges, teacher: Merges) -> None:
        self.merges = student, teacher
        self.texts = source(0)
        self.q, self.p = next_tokens(self.texts, teacher), next_tokens(self.texts, student)
        self.tokens = vocabulary(student), vocabulary(teacher)
        spellings = [[self.tokens[0].index(s) for s in tokenize(t, student)] for t in self.tokens[1]]
        begin = len(self.tokens[0])
        spellings.append([begin])
        self.projection = ProjectionMatrix(
            np.full((begin + 1, 1), -1),
            np.zeros((begin + 1, 1)),
            teacher_vocab_size=len(spellings),
            teacher_byte_order=byte_order([*(t.encode() for t in self.tokens[1]), b""]),
            teacher_spellings=[s for spelling in spellings for s in spelling],
            teacher_spelling_ends=np.cumsum(list(map(len, spellings))),
        )
        self.states = {prefix: i for i, prefix in enumerate(self.p)}
        sides = [[tokenize(text, merges) for text in self.texts] for merges in self.merges]
        self.ids, self.chunks = [], []
        for side, vocab in zip(sides, self.tokens, strict=True):
            rows = [[len(vocab), *map(vocab.index, tokens)] for tokens in side]
            self.ids.append(padded(rows, 0))
        for side in sides:
            self.chunks.append(padded([[-1, *chunk_ids(own, sides, b)] for b, own in enumerate(side)], -1))
        self.state = padded([[self.states[t[:i]] for i in range(len(t))] for t in sides[0]], 0)
        rows = [[self.log_q(tokens[:j]) for j in range(len(tokens))] for tokens in sides[1]]
        width = self.ids[1].shape[1]
        blank = [0.0] * (len(self.tokens[1]) + 1)
        self.teacher = torch.tensor([[*row, *[blank] * (width - len(row))] for row in rows], dtype=torch.float64)
        self.weights = torch.tensor(list(self.texts.values()), dtype=torch.float64)

    def log_q(self, prefix: tuple[str, ...]) -> list[float]:
        q = self.q[prefix]
        return [math.log(q[t]) if t in q else EMPTY for t in self.tokens[1]] + [EMPTY]

    def exact(self) -> Tensor:
        """log p of the student's states."""
        rows = [[math.log(p[t]) if t in p else EMPTY for t in self.tokens[0]] + [EMPTY] for p in self.p.values()]
        return torch.tensor(rows, dtype=torch.float64)

    def loss(self, of_states: Tensor, **settings) -> Tensor:
        """Σ P(text) · loss."""
        logits = torch.nn.functional.pad(of_states[self.state], (0, 0, 0, self.ids[0].shape[1] - self.state.shape[1]))
        return byte_prefix(
            logits,
            self.teacher,
            projection=self.projection,
            student_ids=self.ids[0],
            teacher_ids=self.ids[1],
            student_chunk_id=self.chunks[0],
            teacher_chunk_id=self.chunks[1],
            sequence_weights=self.weights,
            normalizer=1.0,
            pieces="spelling",
            **settings,
        ).loss


def padded(rows: list[list[int]], fill: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])


def chunk_ids(tokens: tuple[str, ...], sides: list[list[tuple[str, ...]]], b: int) -> list[int]:
    """Numbers of the chunks that begin where tokens of both sides do."""
    common = set.intersection(*(set(positions.begins(side[b])) for side in sides))
    return [sum(o <= a for o in common) - 1 for a in positions.begins(tokens)]


@cache
def toy(name: str) -> Toy:
    return Toy(*(PAIRS | SHORTER)[name])


def gradient(name: str, **settings) -> float:
    """Largest gradient at the exact distribution of the student's tokens, per occurrence of a state."""
    case = toy(name)
    states = case.exact().requires_grad_()
    (pulled,) = torch.autograd.grad(case.loss(states, positions=settings.pop("positions", "all"), **settings), states)
    weight: dict[int, float] = defaultdict(float)
    for row, text in zip(case.state.tolist(), case.texts, strict=True):
        for state in row[: len(tokenize(text, case.merges[0]))]:
            weight[state] += case.texts[text]
    return max(float(pulled[state].abs().max()) / mass for state, mass in weight.items())


@pytest.mark.parametrize("name", PAIRS)
def test_the_exact_student_is_not_pulled(name: str) -> None:
    """Catches a position without a target, a wrong condition, and a student that is renormalised on the cells."""
    assert gradient(name, ends="drop") < 1e-9


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd", "tvd"])
def test_with_cover_each_position_is_exact(name: str, divergence: str) -> None:
    """Catches tokens that begin before a boundary and go on, or end inside, and are forgotten."""
    case = toy(name)
    assert case.loss(case.exact(), positions="all", ends="cover", divergence=divergence) < 1e-9
    if divergence != "tvd":  # It has a kink there.
        assert gradient(name, ends="cover", divergence=divergence) < 1e-6


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("settings", [{"positions": "starts"}, {"ends": "rest"}], ids=str)
def test_boundaries_alone_and_a_residual_class_are_biased(name: str, settings: dict) -> None:
    """Shows that the toys tell the forms apart: the exact student is pulled away from itself."""
    assert gradient(name, **settings) > 0.03


@pytest.mark.parametrize("name", PAIRS | SHORTER)
@pytest.mark.parametrize("ends", ["drop", "cover", "rest"])
def test_value_equals_the_lists(name: str, ends: str) -> None:
    """Catches a wrong position, cell or weight, with any student."""
    case, (student, teacher) = toy(name), toy(name).merges
    states = torch.randn(len(case.states), len(case.tokens[0]) + 1, generator=torch.Generator().manual_seed(0)).double()
    log_p, total = states.log_softmax(1).tolist(), 0.0
    for text, weight in case.texts.items():
        pieces = tokenize(text, student)
        for i, _, cells in targets(text, ends, student, teacher, case.q):
            of_state = dict(zip([*case.tokens[0], "begin"], log_p[case.states[pieces[:i]]], strict=True))
            rest = math.fsum(math.exp(p) for token, p in of_state.items() if token not in cells)
            for c, t in cells.items():
                total += weight * t * (math.log(t) - (math.log(rest) if c is None else of_state[c]))
    assert case.loss(states, positions="all", ends=ends).item() == pytest.approx(total, rel=1e-8)


@pytest.mark.parametrize(("student", "num_compared"), [([0, 1, 5, 4], 1), ([0, 1, 6], 2), ([0, 1, 2, 3, 4], 2)])
def test_a_token_that_crosses_the_teachers_is_compared_only_if_it_is_the_last(
    student: list[int], num_compared: int
) -> None:
    """Catches a target without mass on the realised token, which ends inside of the teacher's second token: after
    `begin`, ab·cd of the teacher is a·bc·d, a·bcd or a·b·c·d of the student.
    """
    pieces = [b"", b"ab", b"cd"]
    projection = matrix([], 7, 3, byte_prefix=[0, 1, 3], teacher=pieces, spellings=[[0], [1, 2], [3, 4]])
    chunks = [-1, *[0] * (len(student) - 1)]
    generator = torch.Generator().manual_seed(0)
    arguments = {
        "student_ids": torch.tensor([student]),
        "teacher_ids": torch.tensor([[0, 1, 2]]),
        "student_chunk_id": torch.tensor([chunks]),
        "teacher_chunk_id": torch.tensor([[-1, 0, 0]]),
        "projection": projection,
    }
    assert compared_positions(**arguments, pieces="spelling").sum(1).tolist() == [num_compared]
    logits = (torch.randn(1, length, size, generator=generator) for length, size in ((len(student), 7), (3, 3)))
    loss = byte_prefix(*logits, **arguments, positions="all")
    assert loss.metrics["kd"].count == num_compared
    assert loss.loss.isfinite()
