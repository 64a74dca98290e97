"""What each loss compares at one chunk of a sentence, by the demo's models: cells, with the mass of either side.

The cells are made here from the definitions of docs/losses.md; the value of each loss is the library's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from projection import shown
from transformers import AutoModelForCausalLM

from nemo_opd import losses
from nemo_opd.alignment import TokenAligner, pieces_of
from nemo_opd.losses.piece_tree import first_pieces
from nemo_opd.models.adapter_folder import resolve
from nemo_opd.models.load import load_tokenizer
from nemo_opd.projection import ProjectionMatrix, build_projection
from nemo_opd.types import Alignment

TEXT = "A line is at most 100 characters long"
CHUNK, PAIR = b"100", b" is"
"""A chunk of one student token and several teacher tokens, and an exact pair."""
SUPPORT = 12
"""Tokens that `tcad` compares here; 256 by default."""
Masses = NDArray[np.float64]


@dataclass(frozen=True)
class Cell:
    """Mass of either side, and how much of it is that of other tokens than the one the cell is named after."""

    label: str
    student: float
    teacher: float
    student_moved: float = 0.0
    teacher_moved: float = 0.0


@dataclass(frozen=True)
class Rank:
    """The tokens of one rank and their probabilities."""

    student_label: str
    teacher_label: str
    student: float
    teacher: float


@dataclass(frozen=True)
class Comparison:
    loss: str
    how: str
    value: float | None
    """By the library, in nats; None where it says nothing about two models."""
    cells: Sequence[Cell] = ()
    ranks: Sequence[Rank] = ()
    coverage: float = 1.0
    """The student's mass on the cells before it was renormalised there."""
    note: str = ""


@dataclass(frozen=True)
class Side:
    """A model at TEXT."""

    name: str
    tokens: Any = field(init=False)
    ids: list[int] = field(init=False)
    logits: torch.Tensor = field(init=False)
    """float64 [1, S, vocabulary], unshifted."""
    _labels: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokens = load_tokenizer(f"demo:{self.name}", key=self.name)
        ids = tokens(TEXT, add_special_tokens=False)["input_ids"]
        model = AutoModelForCausalLM.from_pretrained(resolve(f"demo:{self.name}")).double().eval()
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[..., : len(tokens)]
        for name, value in (("tokens", tokens), ("ids", ids), ("logits", logits)):
            object.__setattr__(self, name, value)

    def masses(self, position: int) -> Masses:
        """The distribution of the token at a position."""
        return self.logits[0, position - 1].softmax(-1).numpy()

    def label(self, token: int) -> str:
        if token not in self._labels:
            self._labels[token] = shown(self.tokens, int(token))
        return self._labels[token]


class Place:
    """One chunk of the sentence, seen by the student, a teacher of another tokenizer and one of the same."""

    def __init__(self) -> None:
        self.student, self.teacher, self.twin = (Side(name) for name in ("student", "teacher_cross", "teacher_same"))
        self.matrix: ProjectionMatrix = build_projection(self.student.tokens, self.teacher.tokens)
        self.alignment: Alignment = TokenAligner(self.student.tokens, self.teacher.tokens).align(
            self.student.ids, self.teacher.ids
        )

    def bounds(self, text: bytes) -> tuple[int, int, int, int]:
        pieces = pieces_of(self.student.tokens)
        (found,) = (
            tuple(bounds)
            for bounds in self.alignment.bounds.tolist()
            if b"".join(pieces.bytes_of(i) for i in self.student.ids[bounds[0] : bounds[1]]) == text
        )
        return found

    @cached_property
    def p(self) -> Masses:
        return self.student.masses(self.bounds(CHUNK)[0])

    @cached_property
    def q(self) -> Masses:
        return self.teacher.masses(self.bounds(CHUNK)[2])

    @cached_property
    def q_twin(self) -> Masses:
        return self.twin.masses(self.bounds(CHUNK)[0])

    @property
    def written(self) -> int:
        """The student's token of the chunk."""
        return self.student.ids[self.bounds(CHUNK)[0]]

    def across(self, loss: Callable[..., Any], chunk: bytes = CHUNK, **more: Any) -> float:
        """The value of a loss of chunks at one of them."""
        i, k, j, m = self.bounds(chunk)
        ids = [torch.full((1, len(side.ids)), -1) for side in (self.student, self.teacher)]
        ids[0][0, i:k], ids[1][0, j:m] = 0, 0
        found = loss(
            self.student.logits,
            self.teacher.logits,
            student_ids=torch.tensor([self.student.ids]),
            teacher_ids=torch.tensor([self.teacher.ids]),
            student_chunk_id=ids[0],
            teacher_chunk_id=ids[1],
            **more,
        )
        return float(found.loss)

    @property
    def token(self) -> dict[str, torch.Tensor]:
        """Arguments of losses of tokens for the chunk's token."""
        mask = torch.zeros(1, len(self.student.ids))
        mask[0, self.bounds(CHUNK)[0]] = 1
        return {"mask": mask}

    @property
    def own_ids(self) -> torch.Tensor:
        return torch.tensor([self.student.ids])


def comparisons(at: Place) -> list[Comparison]:
    """One for each loss with a separate formula; `h_kl` is `gold` with more pairs, which these tokenizers lack."""
    makers = (
        cross_entropy,
        sampled_kl,
        grpo,
        same_vocab,
        tcad,
        strict,
        p_kl,
        gold,
        uld,
        byte_prefix,
        shared_prefix,
        alm,
    )
    return [make(at) for make in makers]


def cross_entropy(at: Place) -> Comparison:
    value = float(losses.cross_entropy(at.student.logits, at.own_ids, **at.token).loss)
    mass = float(at.p[at.written])
    cells = [Cell(at.student.label(at.written), mass, 1.0)]
    return Comparison("cross-entropy", "the token of the text, no teacher", value, cells)


def same_vocab(at: Place) -> Comparison:
    value = float(losses.same_vocab(at.student.logits, at.twin.logits, **at.token).loss)
    cells = [Cell(at.student.label(i), *pair) for i, pair in enumerate(zip(at.p, at.q_twin, strict=True))]
    return Comparison("same_vocab", "token by token, of one tokenizer", value, cells)


def tcad(at: Place) -> Comparison:
    value = float(losses.tcad(at.student.logits, at.twin.logits, support_size=SUPPORT, **at.token).loss)
    turns = np.stack([np.argsort(-side, kind="stable") for side in (at.q_twin, at.p)], 1).ravel().tolist()
    kept = list(dict.fromkeys(turns))[:SUPPORT]
    p, q = at.p[kept], at.q_twin[kept]
    cells = [Cell(at.student.label(i), *pair) for i, *pair in zip(kept, p / p.sum(), q / q.sum(), strict=True)]
    how = f"the {SUPPORT} tokens that either finds likely"
    return Comparison("tcad", how, value, cells, coverage=float(p.sum()), note=mass_on_cells(p.sum()))


def sampled_kl(at: Place) -> Comparison:
    value = float(losses.sampled_kl(at.student.logits, at.twin.logits, ids=at.own_ids, **at.token).loss)
    cell = Cell(at.student.label(at.written), float(at.p[at.written]), float(at.q_twin[at.written]))
    return Comparison("sampled_kl", "the sampled token (here the text's)", value, [cell])


def p_kl(at: Place) -> Comparison:
    value = at.across(losses.p_kl, projection=at.matrix)
    own, moved = np.zeros(len(at.q)), np.zeros((len(at.q), len(at.p)))
    for token, (columns, weights) in enumerate(zip(at.matrix.indices, at.matrix.weights, strict=True)):
        for column, weight in zip(columns[columns >= 0], weights[columns >= 0], strict=True):
            if at.matrix.exact[token]:
                own[column] += at.p[token] * weight
            else:
                moved[column, token] += at.p[token] * weight
    note = origin(moved, at.teacher, at.student)
    moved = moved.sum(1)
    covered = np.unique(at.matrix.indices[at.matrix.indices >= 0])
    coverage, total = float((own + moved)[covered].sum()), float(at.q[covered].sum())
    cells = [
        Cell(at.teacher.label(w), (own + moved)[w] / coverage, at.q[w] / total, moved[w] / coverage) for w in covered
    ]
    return Comparison("p_kl", "the teacher's tokens, by the projection", value, cells, coverage=coverage, note=note)


def gold(at: Place) -> Comparison:
    value = at.across(losses.gold, projection=at.matrix)
    students, teachers = at.matrix.shared_pairs.T
    pairs = [Cell(at.student.label(v), at.p[v], at.q[w]) for v, w in zip(students, teachers, strict=True)]
    rest = Cell("unpaired", 1 - at.p[students].sum(), 1 - at.q[teachers].sum())
    without = [np.setdiff1d(np.arange(len(x)), y) for x, y in ((at.p, students), (at.q, teachers))]
    ranks = by_rank(at, *without)
    return Comparison("gold, h_kl", "pairs one by one, others by rank", value, [*pairs, rest], ranks)


def strict(at: Place) -> Comparison:
    value = at.across(losses.strict, PAIR, projection=at.matrix)
    i, _, j, _ = at.bounds(PAIR)
    students, teachers = at.matrix.shared_pairs.T
    p, q = at.student.masses(i)[students], at.teacher.masses(j)[teachers]
    cells = [Cell(at.student.label(v), *pair) for v, *pair in zip(students, p / p.sum(), q / q.sum(), strict=True)]
    return Comparison("strict", f"pairs, where a chunk is one: {at.student.label(at.student.ids[i])}", value, cells)


def byte_prefix(at: Place) -> Comparison:
    value, first = at.across(losses.byte_prefix, projection=at.matrix), first_pieces(at.matrix, "spelling")
    own, moved = np.zeros(len(at.p)), np.zeros((len(at.p), len(at.q)))
    for token, (target, mass) in enumerate(zip(first, at.q, strict=True)):
        if at.teacher.label(token) == at.student.label(target):
            own[target] += mass
        else:
            moved[target, token] += mass
    note = origin(moved, at.student, at.teacher)
    moved = moved.sum(1)
    chain(at, own, moved)
    reached = np.union1d(first, [at.written])
    rest = np.setdiff1d(np.arange(len(at.p)), reached)
    cells = [Cell(at.student.label(v), at.p[v], (own + moved)[v], 0.0, moved[v]) for v in reached]
    return Comparison(
        "byte_prefix", "the student's tokens, by what begins", value, renormalised(cells, rest, at), note=note
    )


def chain(at: Place, own: Masses, moved: Masses) -> None:
    """Move what the teacher gives to the tokens of the chunk, one after the other, to the student's token."""
    _, _, j, m = at.bounds(CHUNK)
    pieces, last = pieces_of(at.teacher.tokens), at.teacher.ids[m - 1]
    begins = [w for w in range(len(at.q)) if pieces.bytes_of(w).startswith(pieces.bytes_of(last))]
    factors = [at.teacher.masses(n)[at.teacher.ids[n]] for n in range(j, m - 1)]
    share, first = float(np.prod(factors) * at.teacher.masses(m - 1)[begins].sum()), at.teacher.ids[j]
    own[first_pieces(at.matrix, "spelling")[first]] -= share
    moved[at.written] += share


def origin(moved: Masses, to: Side, by: Side) -> str:
    """Name the cell that gets most from elsewhere, and its tokens; moved: mass by cell and token."""
    cell = int(moved.sum(1).argmax())
    names = ", ".join(by.label(token) for token in np.argsort(-moved[cell])[:3])
    return f"{to.label(cell)} gets {names} … as well"


def mass_on_cells(coverage: float) -> str:
    return f"the student has {coverage:.2f} there, and is to have more"


def renormalised(cells: list[Cell], rest: NDArray[np.int64], at: Place) -> list[Cell]:
    """Without the student's mass in a rest that the teacher cannot fill."""
    kept = 1 - float(at.p[rest].sum())
    return [Cell(c.label, c.student / kept, c.teacher, c.student_moved / kept, c.teacher_moved) for c in cells]


def shared_prefix(at: Place) -> Comparison:
    value = at.across(losses.shared_prefix, projection=at.matrix)
    maps = at.matrix.student_shared_prefix, at.matrix.teacher_shared_prefix
    students, teachers = at.matrix.shared_pairs.T
    masses = []
    for side, tokens, to in zip((at.p, at.q), (students, teachers), maps, strict=True):
        assert to is not None
        total = np.zeros(len(students) + 1)
        np.add.at(total, to, side)  # −1, no shared token, is the last
        masses += [total, total - np.append(side[tokens], 0)]
    has_rest = all((to == -1).any() for to in maps)
    of = slice(None) if has_rest else slice(-1)
    p, p_moved, q, q_moved = (mass[of] for mass in masses)
    labels = [*(at.student.label(v) for v in students), "no prefix"][of]
    rows = zip(labels, p / p.sum(), q / q.sum(), p_moved / p.sum(), q_moved / q.sum(), strict=True)
    return Comparison("shared_prefix", "the shared tokens, by what begins", value, [Cell(*row) for row in rows])


def alm(at: Place) -> Comparison:
    value = at.across(losses.alm, temperature=1.0)  # its coin, before the root
    i, k, j, m = at.bounds(CHUNK)
    b = np.prod([at.student.masses(x)[at.student.ids[x]] for x in range(i, k)])
    factors = [at.teacher.masses(x)[at.teacher.ids[x]] for x in range(j, m)]
    a, note = np.prod(factors), f"the teacher's: {' × '.join(f'{factor:.2f}' for factor in factors)}"
    cells = [Cell(CHUNK.decode(), float(b), float(a)), Cell("others", float(1 - b), float(1 - a))]
    return Comparison("alm", "the text of the whole chunk", value, cells, note=note)


def uld(at: Place) -> Comparison:
    ranks = by_rank(at, np.arange(len(at.p)), np.arange(len(at.q)))
    return Comparison("uld", "by rank, whatever the tokens", at.across(losses.uld), ranks=ranks)


def grpo(at: Place) -> Comparison:
    cell = Cell(at.student.label(at.written), float(at.p[at.written]), 0.0)
    return Comparison("grpo", "the sampled token, no teacher", None, [cell])


def by_rank(at: Place, students: NDArray[np.int64], teachers: NDArray[np.int64]) -> list[Rank]:
    """The tokens of both sides in order of probability, the shorter list continued with nothing."""
    students = students[np.argsort(-at.p[students], kind="stable")]
    teachers = teachers[np.argsort(-at.q[teachers], kind="stable")]
    ranks = []
    for r in range(max(len(students), len(teachers))):
        left = (at.student.label(students[r]), float(at.p[students[r]])) if r < len(students) else ("", 0.0)
        right = (at.teacher.label(teachers[r]), float(at.q[teachers[r]])) if r < len(teachers) else ("", 0.0)
        ranks.append(Rank(left[0], right[0], left[1], right[1]))
    return ranks


def value_of(found: Comparison) -> float:
    """What the cells and ranks give by the definitions, in nats; forward KL where a divergence is chosen."""
    if found.loss == "cross-entropy":
        return float(-np.log(found.cells[0].student))
    if found.loss == "sampled_kl":
        return float(np.log(found.cells[0].student / found.cells[0].teacher))
    if found.loss == "alm":
        return float(-sum(cell.teacher * np.log(cell.student) for cell in found.cells))
    divergence = sum(cell.teacher * np.log(cell.teacher / cell.student) for cell in found.cells if cell.teacher > 0)
    tail = sum(abs(rank.student - rank.teacher) for rank in found.ranks)
    return float(divergence + tail - np.log(found.coverage))
