"""Kinds of the student's positions, against offsets in the bytes of both sides."""

from __future__ import annotations

import itertools

import pytest
import torch

from nemo_opd.losses.position_targets import POSITION_KINDS, position_kinds
from nemo_opd.types import ChunkRows, TokenRows

TEXTS = {
    "one teacher token": (["re", "cog", "n"], ["recogn"]),
    "crosses the end": (["a", "bc", "d"], ["ab", "cd"]),
    "inside both": (["a", "b", "c", "de", "f"], ["abcd", "ef"]),
    "equal": (["ab", "c"], ["ab", "c"]),
}


def expected(student: list[str], teacher: list[str]) -> list[str]:
    """Count the teacher tokens that begin inside of the chunk before a student token does."""
    starts, boundaries = ([0, *itertools.accumulate(map(len, side))] for side in (student, teacher))
    kinds = []
    for a in starts[:-1]:
        chunk = max(o for o in boundaries if o <= a and o in starts)
        num_begun = sum(chunk < o <= a for o in boundaries)
        kinds.append("start" if a == chunk else "later" if num_begun else "inside")
    return kinds


def rows(tokens: list[str], width: int) -> TokenRows:
    fill = [0] * (width - len(tokens))
    ids = torch.tensor([[*range(len(tokens)), *fill]])
    lengths = torch.tensor([len(tokens)])
    num_bytes = torch.tensor([[*map(len, tokens), *fill]], dtype=torch.int32)
    return TokenRows(ids, lengths, torch.arange(width)[None] < lengths[:, None], num_bytes)


def chunk_ids(tokens: list[str], common: list[int], width: int) -> list[int]:
    begins = [0, *itertools.accumulate(map(len, tokens))][:-1]
    ids = [sum(o <= a for o in common) - 1 for a in begins]
    return [*ids, *[-1] * (width - len(ids))]


@pytest.mark.parametrize("text", TEXTS)
def test_kinds_fit_the_bytes(text: str) -> None:
    """Catches a token that begins in the second teacher token and is counted as inside of the first."""
    student, teacher = (["#", *side] for side in TEXTS[text])
    sides = [{0, *itertools.accumulate(map(len, side))} for side in (student, teacher)]
    common = sorted(sides[0] & sides[1])[:-1]
    width = 8
    chunks = ChunkRows(*(torch.tensor([chunk_ids(side, common, width)]) for side in (student, teacher)))
    kinds = position_kinds(chunks, rows(student, width), rows(teacher, width))[0].tolist()
    names = [POSITION_KINDS[kind] for kind in kinds]
    assert names[1 : len(student)] == expected(*TEXTS[text])
    assert set(names[len(student) :]) | {names[0]} == {"unaligned"}, "token 0 has no prediction"
