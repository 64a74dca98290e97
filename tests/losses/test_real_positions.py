"""Targets at every student position with real tokenizers, against dicts of their spellings."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_opd.alignment import TokenAligner
from nemo_opd.losses import byte_prefix, same_vocab
from nemo_opd.losses.chunk_loss import ChunkInputs
from nemo_opd.losses.piece_tree import first_pieces, token_bytes
from nemo_opd.losses.position_targets import Targets
from nemo_opd.projection import ProjectionMatrix
from tests.projection.conftest import real_matrix
from tests.tokenizers_fixture import corpus_texts, real_tokenizer

pytestmark = pytest.mark.tokenizers

TEXT = "Распознавание речи — задача. 言語モデルの蒸留 recognitions"
ENDS = ("drop", "cover", "rest")
Cells = dict[int | None, float]


@cache
def texts(matrix: ProjectionMatrix) -> tuple[list[bytes], list[bytes]]:
    """Return the bytes of both sides' tokens."""
    return token_bytes(matrix, matrix.student_vocab_size, matrix.teacher_vocab_size)


def spelled_unusually(ids: list[int], student_texts: list[bytes]) -> list[int]:
    """Split every second token in two if both parts are tokens, at the first possible place."""
    token_of = {text: token for token, text in reversed(list(enumerate(student_texts)))}
    spelling: list[int] = []
    for n, token in enumerate(ids):
        text = student_texts[token]
        cuts = [k for k in range(1, len(text)) if n % 2 and text[:k] in token_of and text[k:] in token_of]
        spelling += [token_of[text[: cuts[0]]], token_of[text[cuts[0] :]]] if cuts else [token]
    return spelling


def batch(student: str, teacher: str, text: str = TEXT, *, is_unusual: bool = False) -> tuple[dict, Tensor, Tensor]:
    """Return the arguments of a loss, and logits of both sides."""
    pair = real_tokenizer(student), real_tokenizer(teacher)
    ids = [tokenizer("\n" + text, add_special_tokens=False).input_ids for tokenizer in pair]
    matrix, generator = real_matrix(student, teacher), torch.Generator().manual_seed(0)
    if is_unusual:
        ids[0] = spelled_unusually(ids[0], texts(matrix)[0])
    alignment = TokenAligner(*pair).align(*ids)
    arguments = {
        "projection": matrix,
        "student_ids": torch.tensor(ids[:1]),
        "teacher_ids": torch.tensor(ids[1:]),
        "student_chunk_id": torch.tensor(alignment.student_chunk_id)[None],
        "teacher_chunk_id": torch.tensor(alignment.teacher_chunk_id)[None],
    }
    sizes = matrix.student_vocab_size, matrix.teacher_vocab_size
    logits = (2 * torch.randn(1, len(side), size, generator=generator) for side, size in zip(ids, sizes, strict=True))
    return arguments, *logits


@cache
def spelled(matrix: ProjectionMatrix) -> tuple[list[tuple[int, ...]], dict[tuple[int, ...], list[int]]]:
    """Return the pieces of each teacher token, and the tokens that begin with given pieces."""
    spellings = [tuple(s.tolist()) for s in np.split(matrix.teacher_spellings, matrix.teacher_spelling_ends[:-1])]
    below: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for t, spelling in enumerate(spellings):
        for length in range(1, len(spelling) + 1):
            below[spelling[:length]].append(t)
    return spellings, below


def expected(arguments: dict, student: Tensor, teacher: Tensor) -> dict[str, list[float]]:
    """Forward KL of each position keyed by `ends`, from the teacher tokens below its node."""
    spellings, below = spelled(arguments["projection"])
    both_texts = texts(arguments["projection"])
    chunks = [arguments[f"{side}_chunk_id"][0].tolist() for side in ("student", "teacher")]
    ids = [arguments[f"{side}_ids"][0].tolist() for side in ("student", "teacher")]
    p, q = (logits[0].double().log_softmax(-1) for logits in (student, teacher))
    values: dict[str, list[float]] = {ends: [] for ends in ENDS}
    number_before, last = -1, None
    for chunk in sorted(set(chunks[0]) & set(chunks[1]) - {-1}):
        ours, theirs = ([i for i, c in enumerate(side) if c == chunk] for side in chunks)
        chunk_before, last = (last if chunk == number_before + 1 else None), (ours, theirs)
        number_before = chunk
        if 0 in (ours[0], theirs[0]):
            last = None
            continue
        row, y = q[theirs[0] - 1].exp(), ids[1][theirs[0]]
        for place, i in enumerate(ours):
            pieces = tuple(ids[0][k] for k in ours[:place])
            is_unusual = place > 0 and spellings[y][:place] != pieces
            if is_unusual:
                cells = masses_by_bytes(row, pieces, *both_texts)
            else:
                cells = (
                    masses(row, pieces, below.get(pieces, []), spellings) if place else by_first_piece(row, spellings)
                )
            student_log_p, cover_cells = p[i - 1].tolist(), cells
            if chunk_before is not None and len(chunk_before[1]) == 1:
                row_before, pieces_before = (
                    q[chunk_before[1][0] - 1].exp(),
                    tuple(ids[0][k] for k in chunk_before[0]) + pieces,
                )
                r = float(row_before[ids[1][chunk_before[1][0]]])
                if is_unusual or spellings[ids[1][chunk_before[1][0]]] != pieces_before[: len(chunk_before[0])]:
                    cells_before = masses_by_bytes(row_before, pieces_before, *both_texts)
                else:
                    cells_before = masses(row_before, pieces_before, below.get(pieces_before, []), spellings)
                if not place:
                    cells_before.pop(None, None)
                cover_cells = {c: r * cells.get(c, 0) + cells_before.get(c, 0) for c in cells | cells_before}
            for ends in ENDS:
                values[ends].append(forward_kl(cover_cells if ends == "cover" else cells, student_log_p, ends))
    return values


def forward_kl(cells: Cells, student_log_p: list[float], ends: str) -> float:
    """From the cells' shares to the student's log-probabilities; with `drop`, of tokens only."""
    rest_mass = cells.get(None, 0.0)
    tokens = {c: m for c, m in cells.items() if c is not None}
    total = math.fsum(tokens.values()) + (rest_mass if ends != "drop" else 0)
    value = sum(m / total * (math.log(m / total) - student_log_p[c]) for c, m in tokens.items() if m)
    if ends != "drop" and rest_mass:
        unreached = 1 - math.fsum(math.exp(student_log_p[c]) for c in tokens)
        value += rest_mass / total * (math.log(rest_mass / total) - math.log(unreached))
    return value


def by_first_piece(q: Tensor, spellings: list[tuple[int, ...]]) -> Cells:
    first = np.array([spelling[0] if spelling else -1 for spelling in spellings])
    total = np.bincount(first + 1, q.numpy())
    cells: Cells = {c: float(total[c + 1]) for c in np.unique(first[first >= 0]).tolist()}
    return cells | {None: float(total[0])}


def masses(q: Tensor, pieces: tuple[int, ...], tokens: list[int], spellings: list[tuple[int, ...]]) -> Cells:
    cells: Cells = defaultdict(float)
    for t, p in zip(tokens, q[tokens].tolist(), strict=True):
        cells[spellings[t][len(pieces)] if len(spellings[t]) > len(pieces) else None] += p
    return cells


def masses_by_bytes(q: Tensor, pieces: tuple[int, ...], student: list[bytes], teacher: list[bytes]) -> Cells:
    """Sum the tokens that begin with the bytes of the pieces, keyed by the longest student token that follows."""
    begun = b"".join(student[piece] for piece in pieces)
    token_of = {text: token for token, text in reversed(list(enumerate(student)))}  # Each text has a single id here.
    cells: Cells = defaultdict(float)
    for t, text in enumerate(teacher):
        if begun and text.startswith(begun):
            ending = text.removeprefix(begun)
            cells[next((token_of[ending[:k]] for k in range(len(ending), 0, -1) if ending[:k] in token_of), None)] += (
                float(q[t])
            )
    return cells


@pytest.mark.parametrize("is_unusual", [False, True], ids=["spelled as usual", "spelled unusually"])
def test_targets_fit_the_spellings(is_unusual: bool) -> None:
    """Catches a wrong node or boundary of real tokens, and blocks that change a target."""
    arguments, student, teacher = batch("llama3_1", "qwen3", is_unusual=is_unusual)
    # The oracle has no chains: skip chunks of one student token and several teacher tokens.
    for chunk in set(arguments["teacher_chunk_id"][0].tolist()):
        if (arguments["teacher_chunk_id"] == chunk).sum() > 1:
            arguments["student_chunk_id"][arguments["student_chunk_id"] == chunk] = -1
    student, teacher = student.double(), teacher.double()
    for ends, position_losses in expected(arguments, student, teacher).items():
        settings = {"positions": "all", "ends": ends, "pieces": "spelling"}
        uncut = byte_prefix(student, teacher, **arguments, **settings)
        assert uncut.metrics["kd"].count == len(position_losses) > len(set(arguments["student_chunk_id"][0].tolist()))
        assert uncut.loss.item() == pytest.approx(math.fsum(position_losses) / len(position_losses), rel=1e-9)
        in_blocks = byte_prefix(student, teacher, **arguments, **settings, chunk_size=3)
        assert in_blocks.loss.item() == pytest.approx(uncut.loss.item(), rel=1e-9)


@st.composite
def excerpts(draw: st.DrawFn) -> str:
    """Sixty characters of some document: prose of several languages, code, numbers."""
    document = draw(st.sampled_from(corpus_texts()))
    start = draw(st.integers(0, max(0, len(document) - 60)))
    return document[start : start + 60]


@pytest.mark.parametrize("ends", ENDS)
@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_cells_and_rest_hold_all_mass_in_any_text(ends: str, data: st.DataObject) -> None:
    """Catches mass that is lost or counted twice at a boundary, and blocks that change a target.

    At the starts of chunks that no earlier token reaches, cells and rest cell hold all of the teacher's mass: 1, or
    with `drop` 1 minus the tokens without pieces.
    """
    arguments, student, teacher = batch("llama3_1", "qwen3", data.draw(excerpts()))
    teacher = teacher.log_softmax(-1)
    matrix = arguments["projection"]
    inputs = ChunkInputs.of(student, teacher, temperature=1.0, **arguments)
    targets = Targets.of(inputs, matrix, ends, "spelling")
    if not len(inputs.units):
        return
    log_t, log_rest = targets.of_part(slice(0, len(inputs.units)))
    parts = [targets.of_part(slice(i, i + 1)) for i in range(len(inputs.units))]
    torch.testing.assert_close(log_t, torch.cat([part[0] for part in parts]), rtol=1e-5, atol=1e-5)
    is_start = targets.positions.student.place == 0
    is_reached = torch.zeros(len(log_t), dtype=torch.bool)
    is_reached[targets.positions.before.units.rows] = True
    scaled_by = torch.zeros(len(inputs.units), dtype=torch.bool)
    scaled_by[targets.positions.rows_before.lengths > 0] = True
    alone = is_start & ~is_reached & ~targets.positions.student.per_position(scaled_by)
    has_pieces = torch.from_numpy(first_pieces(matrix, "spelling") >= 0)
    missing = teacher.reshape(-1, teacher.shape[2])[inputs.units.teacher_rows].exp()[:, ~has_pieces].sum(1)
    total = torch.cat([log_t, log_rest], 1)[alone].logsumexp(1).exp()
    expected = 1 - missing[targets.positions.student.per_position(torch.arange(len(inputs.units)))[alone]] * (
        ends == "drop"
    )
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)


@given(data=st.data())
@settings(max_examples=4, deadline=None)
def test_equal_tokenizers_are_same_vocab_in_any_text(data: st.DataObject) -> None:
    """Catches a token whose text the tokenizer spells differently, and one that seems to continue in the next chunk."""
    arguments, student, teacher = batch("qwen3", "qwen3", data.draw(excerpts()))
    student.requires_grad_()
    expected = same_vocab(student, teacher, mask=arguments["student_chunk_id"] >= 0).loss
    (expected_gradient,) = torch.autograd.grad(expected, student)
    for ends in ENDS:
        ours = byte_prefix(student, teacher, **arguments, positions="all", ends=ends, pieces="spelling").loss
        assert ours.item() == pytest.approx(expected.item(), rel=1e-6)
        torch.testing.assert_close(torch.autograd.grad(ours, student)[0], expected_gradient, rtol=1e-5, atol=1e-9)
