"""Texts and logits that the losses are measured on."""

import json
from pathlib import Path

import numpy as np
import torch
from losses_cases import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nemo_opd.alignment import TokenAligner
from nemo_opd.models.load import load_tokenizer
from nemo_opd.projection import ProjectionMatrix, cached_projection

DEMO_PAIR = ("demo:student", "demo:teacher_cross")
SPREAD = 3.0
"""Standard deviation of the logits, about that of a trained model's."""
EXCERPT_CHARS = 160
"""Of every record of the corpus in turn, so that a short text has all its domains."""


def real_text(student: str, teacher: str, corpus: Path | None, positions: int) -> Text:
    """`positions` student tokens of one sequence; tokenizers by folder or `demo:` name, corpus a JSON lines file."""
    tokenizers = load_tokenizer(student, key="--pair"), load_tokenizer(teacher, key="--pair")
    projection, _ = cached_projection(*tokenizers)
    return text_of(*tokenizers, projection, _document(corpus), positions)


def text_of(
    student: PreTrainedTokenizerBase,
    teacher: PreTrainedTokenizerBase,
    projection: ProjectionMatrix,
    document: str,
    positions: int,
) -> Text:
    """The beginning of a document that has so many student tokens, with the teacher tokens of the same text."""
    student_ids = student.encode(document, add_special_tokens=False)[:positions]
    teacher_ids = teacher.encode(student.decode(student_ids), add_special_tokens=False)
    alignment = TokenAligner(student, teacher).align(student_ids, teacher_ids)
    used = [
        np.where((chunk >= 0) & ~np.append(alignment.inexact, False)[chunk], chunk, -1)
        for chunk in (alignment.student_chunk_id, alignment.teacher_chunk_id)
    ]
    return Text(
        torch.tensor([student_ids]),
        torch.tensor([teacher_ids]),
        torch.from_numpy(used[0]).int().unsqueeze(0),
        torch.from_numpy(used[1]).int().unsqueeze(0),
        projection,
    )


def logits(positions: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[1, positions, width], made on the CPU so that every device has the same."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.empty(1, positions, width, dtype=dtype)
    for row in made[0]:
        row.copy_(torch.randn(width, generator=generator) * SPREAD)
    return made


def _document(corpus: Path | None) -> str:
    """Excerpts of all records of a JSON lines file, or the source of this benchmark, in turns and repeated."""
    if corpus is None:
        files = sorted(Path(__file__).parent.glob("*.py"))
        return "".join(file.read_text(encoding="utf-8") for file in files)
    records = [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines()]
    starts = range(0, max(map(len, records)), EXCERPT_CHARS)
    return "\n".join(record[at : at + EXCERPT_CHARS] for at in starts for record in records if at < len(record))
