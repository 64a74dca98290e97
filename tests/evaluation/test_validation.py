"""Validation pools over batches, and bits per byte equals a float oracle's for each tokenizer."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_opd.data.loader import validation_batches
from nemo_opd.evaluation.validation import validate, validate_teachers
from nemo_opd.logging.metrics import values
from nemo_opd.preflight.plan import Plan
from nemo_opd.types import Batch, Max, Mean, Metric, TeacherRows, TokenRows
from tests.tiny import Tiny
from tests.workers.local import in_world, opened, plan_of

pytestmark = pytest.mark.world


class Counted:
    """Models with known metrics: one bit per student token, two bits per teacher token."""

    def evaluate(self, batch: Batch) -> dict[str, Metric]:
        tokens = int(batch.student.lengths.sum())
        return {"ce": Mean(float(tokens), tokens), "rows": Max(len(batch))}

    def evaluate_teachers(self, batch: Batch) -> dict[str, Metric]:
        lengths = (int(rows.tokens.lengths.sum()) for rows in batch.teachers)
        return {f"bits_per_byte/{i}": Mean(2.0 * length, len(batch)) for i, length in enumerate(lengths)}


def rows_of(*lengths: int) -> TokenRows:
    width = max(lengths)
    ids = torch.ones(len(lengths), width, dtype=torch.int64)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    return TokenRows(ids, torch.tensor(lengths), mask, mask.int())


def test_batches_of_different_sizes_are_pooled_not_averaged() -> None:
    batches = [
        Batch(rows_of(3, 5), (TeacherRows(rows_of(4, 4), None), TeacherRows(rows_of(3, 5), None))),
        Batch(rows_of(10), (TeacherRows(rows_of(1), None), TeacherRows(rows_of(10), None))),
    ]
    metrics = validate(Counted(), batches)
    assert metrics == {"ce": Mean(18.0, 18), "rows": Max(2.0)}
    assert values(validate_teachers(Counted(), batches)) == {
        "bits_per_byte/0": 2 * 9 / 3,
        "bits_per_byte/1": 2 * 18 / 3,
    }


def test_no_batches_have_no_metrics() -> None:
    assert validate(Counted(), []) == {}
    assert validate_teachers(Counted(), []) == {}


def oracle_of_student(folder: Path, texts: list[str], max_length: int) -> tuple[float, int]:
    """Return bits per byte of all tokens except each text's first, and their bytes, in Python floats."""
    read = Read(folder, max_length)
    scored = [token for text in texts for token in read(text) if token[2] is not None]
    num_bytes = sum(end - start for start, end, _ in scored)
    # The end of a sequence has no bytes: its bits do not count.
    return math.fsum(bits for start, end, bits in scored if end > start and bits is not None) / num_bytes, num_bytes


def oracle_bits_per_byte(model_folders: Sequence[Path], texts: list[str], max_lengths: Sequence[int]) -> list[float]:
    """Return each model's −log2 probabilities over bytes, in Python floats.

    Only stretches between two cuts that all models share count, and only if every model predicts all its tokens there.
    """
    bits, num_bytes = [0.0] * len(model_folders), 0
    read = [Read(*arguments) for arguments in zip(model_folders, max_lengths, strict=True)]
    for text in texts:
        tokens_by_model = [model(text) for model in read]
        common = sorted(set.intersection(*({0, *(end for _, end, _ in tokens)} for tokens in tokens_by_model)))
        for start, stop in pairwise(common):
            inside = [[token for token in tokens if start < token[1] <= stop] for tokens in tokens_by_model]
            if any(surprise is None for tokens in inside for _, _, surprise in tokens):
                continue
            num_bytes += stop - start
            for model, tokens in enumerate(inside):
                bits[model] += math.fsum(surprise for _, _, surprise in tokens if surprise is not None)
    return [of_model / num_bytes for of_model in bits]


class Read:
    """A model that reads texts token by token."""

    def __init__(self, folder: Path, max_length: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.max_length = max_length

    def __call__(self, text: str) -> list[tuple[int, int, float | None]]:
        """Return each token's start, end and bits; the first token is not predicted and has no bits."""
        ids = list(self.tokenizer(text).input_ids)[: self.max_length]
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0].tolist()
        tokens: list[tuple[int, int, float | None]] = []
        end = 0
        for i, token in enumerate(ids):
            start, end = end, end + len(bytes_of(self.tokenizer, token))
            tokens.append((start, end, self.bits(logits[i - 1], token) if i else None))
        return tokens

    def bits(self, logits: list[float], token: int) -> float:
        row = logits[: len(self.tokenizer)]
        top = max(row)
        return (top + math.log(math.fsum(math.exp(value - top) for value in row)) - row[token]) / math.log(2)


def bytes_of(tokenizer, token: int) -> list[str]:
    """Byte-level BPE writes one letter per byte."""
    return list(tokenizer.convert_ids_to_tokens(token))


def measured(plan: Plan) -> tuple[dict[str, float], list[float]]:
    texts = plan.data.validation
    assert texts is not None

    def batches() -> list[Batch]:
        return list(validation_batches(texts, plan.data.make_sample, plan.config.train.global_batch_size))

    with opened(plan) as models:
        teachers = values(validate_teachers(models, batches()))
        student = values(validate(models, batches()))
        return student, [teachers[f"shared_bits_per_byte/{name}"] for name in plan.config.active_names]


def test_bits_per_byte_of_texts_that_are_cut(tiny: Tiny, tmp_path: Path) -> None:
    plan = plan_of(tiny.overrides("train.max_length=12", "data.validation.max_samples=5"))
    ((student, teachers),) = in_world(1, measured, [plan], tmp_path)
    documents = plan.data.validation
    assert documents is not None
    folders = (tiny.student, tiny.teacher_cross, tiny.teacher_same)
    # The teacher with another tokenizer reads as far as the student does, in as many tokens as that takes.
    texts = list(documents[:]["text"])
    expected = oracle_bits_per_byte(folders, texts, (12, 1000, 12))
    assert [student["shared_bits_per_byte"], *teachers] == pytest.approx(expected, rel=1e-5)
    bits, num_bytes = oracle_of_student(tiny.student, texts, 12)
    assert (student["bits_per_byte"], student["bytes"]) == (pytest.approx(bits, rel=1e-5), num_bytes)


def test_the_students_figures_do_not_depend_on_teachers(tiny: Tiny, tmp_path: Path) -> None:
    """Bugs: bytes that only count if the teachers share the cuts; token classes that depend on the teachers' cuts."""
    plans = [plan_of(tiny.overrides("train.max_length=1000", f"loss.kd_weight={weight}")) for weight in (0, 1)]
    assert [len(plan.config.active_teachers) for plan in plans] == [0, 2]
    (alone, _), (taught, _) = in_world(1, measured, plans, tmp_path)
    assert {"bits_per_byte", "bytes", "ce", "accuracy", "class/word/bits_per_byte", "class/numeral/share"} <= {*alone}
    assert "shared_bits_per_byte" not in alone
    assert {name: taught[name] for name in alone} == pytest.approx(alone, rel=1e-6)
