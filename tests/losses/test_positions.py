"""A target at every student position, against all texts of a source that can be enumerated."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_opd.losses import byte_prefix
from nemo_opd.losses.position_units import compared_positions
from nemo_opd.projection import ProjectionMatrix
from nemo_opd.projection.retokenization import byte_order
from tests.losses.cases import bytes_of
from tests.losses.projections import spelled_matrix
from tests.reference import positions
from tests.reference.positions import (
    Cells,
    Merges,
    Prefix,
    next_tokens,
    resampled,
    source,
    targets,
    tokenize,
    vocabulary,
)

AB, CA, ABC, CAB = ("a", "b"), ("c", "a"), ("ab", "c"), ("ca", "b")
PAIRS: dict[str, tuple[Merges, Merges]] = {"letters": ((), (AB, ABC)), "merges": ((AB, CA), (AB, CA, CAB, ABC))}
"""Merges of the student and of the teacher. Realised tokens rule out all teacher tokens that begin elsewhere, so
`cover` is exact.
"""
SHORTER: dict[str, tuple[Merges, Merges]] = {"ends inside": ((), (("b", "c"), AB))}
"""A teacher token that began earlier can end inside of the realised one, so `cover` is not exact."""
EMPTY = -60.0
"""Finite logit that stands for a probability of 0."""


class Toy:
    """All texts after a first token, as both sides see them."""

    def __init__(self, student: Merges, teacher: Merges, *, is_sampled: bool = False) -> None:
        """is_sampled: the student's spelling of each teacher token is random."""
        self.merges = student, teacher
        self.texts, draw = source(0), random.Random(0)
        self.q, self.p = next_tokens(self.texts, teacher), next_tokens(self.texts, student)
        self.ours: dict[str, Prefix] = {
            text: resampled(text, student, teacher, draw) if is_sampled else tokenize(text, student)
            for text in self.texts
        }
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
            **bytes_of(*([*(token.encode() for token in tokens), b""] for tokens in self.tokens)),
        )
        prefixes = (tokens[:i] for tokens in self.ours.values() for i in range(len(tokens)))
        self.states = {prefix: i for i, prefix in enumerate(dict.fromkeys([*self.p, *prefixes]))}
        sides = [list(self.ours.values()), [tokenize(text, teacher) for text in self.texts]]
        self.ids, self.chunks = [], []
        for side, vocab in zip(sides, self.tokens, strict=True):
            rows = [[len(vocab), *map(vocab.index, tokens)] for tokens in side]
            self.ids.append(padded(rows, 0))
        for side in sides:
            self.chunks.append(padded([[-1, *chunk_ids(tokens, sides, b)] for b, tokens in enumerate(side)], -1))
        self.state = padded([[self.states[t[:i]] for i in range(len(t))] for t in sides[0]], 0)
        rows = [[self.log_q(tokens[:j]) for j in range(len(tokens))] for tokens in sides[1]]
        width = self.ids[1].shape[1]
        blank = [0.0] * (len(self.tokens[1]) + 1)
        self.teacher = torch.tensor([[*row, *[blank] * (width - len(row))] for row in rows], dtype=torch.float64)
        self.weights = torch.tensor(list(self.texts.values()), dtype=torch.float64)

    def log_q(self, prefix: tuple[str, ...]) -> list[float]:
        q = self.q[prefix]
        return [math.log(q[t]) if t in q else -math.inf for t in self.tokens[1]] + [EMPTY]

    def exact(self) -> Tensor:
        """Return log p of the student's states."""
        rows = [[math.log(p[t]) if t in p else EMPTY for t in self.tokens[0]] + [EMPTY] for p in self.p.values()]
        return torch.tensor(rows, dtype=torch.float64)

    def loss(self, of_states: Tensor, **settings) -> Tensor:
        """Return Σ P(text) · loss."""
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
    """Return the tokens' chunks; a chunk begins at an offset that both sides' tokens begin at."""
    common = set.intersection(*(set(positions.begins(side[b])) for side in sides))
    return [sum(o <= a for o in common) - 1 for a in positions.begins(tokens)]


@cache
def toy(name: str, *, is_sampled: bool = False) -> Toy:
    return Toy(*(PAIRS | SHORTER)[name], is_sampled=is_sampled)


@cache
def listed(name: str, ends: str, *, is_sampled: bool) -> dict[str, list[tuple[int, bool, Cells]]]:
    """Return the targets of each text's student tokens."""
    case = toy(name, is_sampled=is_sampled)
    return {text: list(targets(pieces, ends, *case.merges, case.q)) for text, pieces in case.ours.items()}


def gradient(name: str, **settings) -> float:
    """Return the largest gradient at the exact distribution of the student's tokens, per occurrence of a state."""
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
    """Catches tokens that begin before a boundary and continue after it, or end inside, and are lost."""
    case = toy(name)
    assert case.loss(case.exact(), positions="all", ends="cover", divergence=divergence) < 1e-9
    if divergence != "tvd":  # It has a kink at equal distributions.
        assert gradient(name, ends="cover", divergence=divergence) < 1e-6


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("settings", [{"positions": "starts"}, {"ends": "rest"}], ids=str)
def test_only_boundaries_or_a_residual_class_are_biased(name: str, settings: dict) -> None:
    """Shows that the toys distinguish the forms: the exact student has a gradient."""
    assert gradient(name, **settings) > 0.03


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("halves", [("drop", "drop"), ("drop", "cover"), ("cover", "drop")])
def test_halves_of_both_forms_do_not_mix(name: str, halves: tuple[str, str]) -> None:
    """Catches the boundaries of one form combined with the insides of the other."""
    case = toy(name)
    mean: dict[tuple[str, ...], Cells] = defaultdict(lambda: defaultdict(float))
    for text, p in case.texts.items():
        pieces = case.ours[text]
        both = zip(*(listed(name, ends, is_sampled=False)[text] for ends in halves), strict=True)
        for (i, is_boundary, boundary_cells), (_, _, inside_cells) in both:
            for c, t in (boundary_cells if is_boundary else inside_cells).items():
                mean[pieces[:i]][c] += p * t
    off = [
        abs(mass[c] / math.fsum(mass.values()) - case.p[state].get(c, 0.0))
        for state, mass in mean.items()
        for c in mass
        if c
    ]
    assert (max(off) < 1e-9) == (halves == ("drop", "drop"))


@pytest.mark.parametrize("name", [*PAIRS, *SHORTER, "merges, sampled"])
@pytest.mark.parametrize("ends", ["drop", "cover", "rest"])
def test_value_equals_the_lists(name: str, ends: str) -> None:
    """Catches a wrong position, cell or weight, for any student, and for sampled, unusual spellings."""
    name, is_sampled = name.removesuffix(", sampled"), name.endswith("sampled")
    case = toy(name, is_sampled=is_sampled)
    states = torch.randn(len(case.states), len(case.tokens[0]) + 1, generator=torch.Generator().manual_seed(0)).double()
    log_p, total = states.log_softmax(1).tolist(), 0.0
    for text, weight in case.texts.items():
        pieces = case.ours[text]
        for i, _, cells in listed(name, ends, is_sampled=is_sampled)[text]:
            log_p_of_token = dict(zip([*case.tokens[0], "begin"], log_p[case.states[pieces[:i]]], strict=True))
            rest_mass = math.fsum(math.exp(p) for token, p in log_p_of_token.items() if token not in cells)
            for c, t in cells.items():
                total += weight * t * (math.log(t) - (math.log(rest_mass) if c is None else log_p_of_token[c]))
    assert case.loss(states, positions="all", ends=ends).item() == pytest.approx(total, rel=1e-8)


TOKENS = [b"", b"a", b"b", b"c", b"d", b"bc", b"bcd", b"cd", b"ab"]


@pytest.mark.parametrize(
    ("student", "teacher", "num_compared"),
    [
        ([1, 5, 4], [b"ab", b"cd"], 1),
        ([1, 6], [b"ab", b"cd"], 2),
        ([1, 2, 3, 4], [b"ab", b"cd"], 2),
        ([1, 2, 7], [b"abc", b"d"], 3),
        ([8, 7], [b"abc", b"d"], 2),
        ([1, 2, 3, 4], [b"abc", b"d"], 3),
    ],
)
def test_a_token_that_crosses_the_teachers_is_compared_only_if_it_is_the_last(
    student: list[int], teacher: list[bytes], num_compared: int
) -> None:
    """Catches a target without mass on the realised token, which ends inside of the teacher's second token; abc is
    spelled ab·c.
    """
    pieces = {b"ab": [1, 2], b"cd": [3, 4], b"abc": [8, 3], b"d": [4]}
    spellings = [[0], *(pieces[token] for token in teacher)]
    projection = spelled_matrix([], len(TOKENS), [b"", *teacher], spellings, TOKENS)
    student = [0, *student]
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
    logits = (torch.randn(1, length, size, generator=generator) for length, size in ((len(student), 9), (3, 3)))
    loss = byte_prefix(*logits, **arguments, positions="all")
    assert loss.metrics["kd"].count == num_compared
    assert loss.loss.isfinite()
