"""An oracle for several teachers: one sequence at a time, then sums of Python numbers; float64 from the logits on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nemo_opd.losses import p_kl
from nemo_opd.preflight.plan import Plan
from nemo_opd.types import Batch
from tests.workers.plain_trainer import load, sequences

KINDS = ("bits_per_byte", "entropy", "max_probability")


@dataclass(frozen=True)
class Text:
    """One sequence, with sums over tokens or chunks."""

    ce: Tensor
    labels: int
    kd: list[Tensor]
    """KD by teacher."""
    units: list[int]
    bits: list[dict[str, float]]
    """Scores by teacher and kind."""
    num_bytes: list[int]


@dataclass(frozen=True)
class Expected:
    ce: Tensor
    kd: Tensor
    raw: list[float]
    """Mean KD over each teacher's units."""
    says: list[float]
    """Mean weight of a sequence, or share of the sequences, by teacher."""


def texts(plan: Plan, student: PreTrainedModel, batch: Batch) -> list[Text]:
    teachers = [load(settings.model).eval() for settings in plan.config.teachers]
    return [text(plan, student, teachers, batch, row) for row in range(len(batch))]


def text(plan: Plan, student: PreTrainedModel, teachers: list[PreTrainedModel], batch: Batch, row: int) -> Text:
    ids = sequences(batch.student.ids, batch.student.lengths)[row]
    logits = student(input_ids=ids[None]).logits.double()[..., : plan.student_vocab_size]
    log_p = logits[0, :-1].log_softmax(-1)
    kd, units, bits, num_bytes = [], [], [], []
    for i, teacher in enumerate(teachers):
        rows = batch.teachers[i]
        own = sequences(rows.tokens.ids, rows.tokens.lengths)[row]
        with torch.no_grad():
            handed_over = teacher(input_ids=own[None]).logits[0, :, : plan.teachers[i].vocab_size].double()
        if rows.chunks is None:
            backwards = plan.config.term(i).model_dump().get("divergence") == "reverse_kl"
            kd.append(kl(handed_over[:-1].log_softmax(-1), log_p, backwards=backwards))
            units.append(len(ids) - 1)
        else:
            chunks = [rows.chunks.student[row, : len(ids)], rows.chunks.teacher[row, : len(own)]]
            kd.append(
                p_kl(
                    logits,
                    handed_over[None],
                    projection=plan.teachers[i].projection,
                    student_ids=ids[None],
                    teacher_ids=own[None],
                    student_chunk_id=chunks[0][None],
                    teacher_chunk_id=chunks[1][None],
                    normalizer=1.0,
                ).loss
            )
            first = {int(chunks[0][0]), int(chunks[1][0]), -1} if len(own) else {-1}
            units.append(len((set(chunks[0].tolist()) & set(chunks[1].tolist())) - first))
        bits.append(scored(handed_over, own.tolist(), rows.tokens.num_bytes[row].tolist()))
        num_bytes.append(sum(rows.tokens.num_bytes[row, 1 : len(own)].tolist()))
    return Text(-log_p.gather(1, ids[1:, None]).sum(), len(ids) - 1, kd, units, bits, num_bytes)


def kl(log_q: Tensor, log_p: Tensor, *, backwards: bool) -> Tensor:
    left, right = (log_p, log_q) if backwards else (log_q, log_p)
    return (left.exp() * (left - right)).sum()


def scored(logits: Tensor, ids: list[int], num_bytes: list[int]) -> dict[str, float]:
    """Return bits of the tokens with text except the first, by loops over Python numbers."""
    totals = dict.fromkeys(KINDS, 0.0)
    for i in range(1, len(ids)):
        if not num_bytes[i]:
            continue
        row = logits[i - 1].tolist()
        top = max(row)
        log_sum = top + math.log(math.fsum(math.exp(value - top) for value in row))
        totals["bits_per_byte"] += (log_sum - row[ids[i]]) / math.log(2)
        totals["max_probability"] += (log_sum - top) / math.log(2)
        entropy = math.fsum(-math.exp(value - log_sum) * (value - log_sum) for value in row)
        totals["entropy"] += entropy / math.log(2)
    return totals


def expected(plan: Plan, batch: list[Text], routes: Sequence[int]) -> Expected:
    """Return the values of methods.md §6 for these texts."""
    aggregation = plan.config.aggregation
    numbers = range(len(plan.config.teachers))
    ce = sum(one.ce for one in batch) / sum(one.labels for one in batch)
    if aggregation.type == "weighted_sum":
        weights = [[weight(plan, one, i) for i in numbers] for one in batch]
        means = [
            sum(w[i] * one.kd[i] for w, one in zip(weights, batch, strict=True))
            / sum(tokens_of(one, i) for one in batch)
            for i in numbers
        ]
        raw = [float(sum(one.kd[i].detach() for one in batch)) / units_of(batch, i) for i in numbers]
        return Expected(ce, sum(means), raw, [sum(w[i] for w in weights) / len(batch) for i in numbers])
    choices = list(routes) if aggregation.type == "routed" else [best([one]) for one in batch]
    if aggregation.type == "select_teacher" and aggregation.per == "batch":
        choices = [best(batch)] * len(batch)
    total = sum(one.kd[i] for one, i in zip(batch, choices, strict=True))
    kd = total / sum(tokens_of(one, i) for one, i in zip(batch, choices, strict=True))
    own = [[one for one, choice in zip(batch, choices, strict=True) if choice == i] for i in numbers]
    raw = [
        float(sum(one.kd[i].detach() for one in mine)) / units_of(mine, i) if mine else math.nan
        for i, mine in enumerate(own)
    ]
    return Expected(ce, kd, raw, [len(mine) / len(batch) for mine in own])


def tokens_of(one: Text, i: int) -> int:
    """Return the student's tokens if teacher i is compared with any."""
    return one.labels if one.units[i] else 0


def units_of(batch: list[Text], i: int) -> int:
    return sum(one.units[i] for one in batch)


def best(batch: list[Text]) -> int:
    def bits_per_byte(i: int) -> float:
        num_bytes = sum(one.num_bytes[i] for one in batch)
        return sum(one.bits[i]["bits_per_byte"] for one in batch) / num_bytes if num_bytes else math.inf

    return min(range(len(batch[0].kd)), key=bits_per_byte)


def weight(plan: Plan, one: Text, i: int) -> float:
    aggregation, own = plan.config.aggregation, [teacher.weight for teacher in plan.config.teachers]
    factor = 1.0
    if aggregation.vocabulary_scaling:
        sizes = [teacher.vocab_size for teacher in plan.teachers]
        factor = math.log(sizes[i]) / math.log(min(sizes))
    if aggregation.weights == "static":
        return factor * own[i]
    scores = []
    for bits, num_bytes in zip(one.bits, one.num_bytes, strict=True):
        per_byte = bits[aggregation.weights] / num_bytes if num_bytes else math.inf
        scores.append(2**-per_byte if aggregation.weights == "max_probability" else -per_byte)
    if not any(one.num_bytes):
        return factor * own[i] / sum(own)
    powers = [
        w * math.exp(aggregation.alpha * s) if n else 0.0 for w, s, n in zip(own, scores, one.num_bytes, strict=True)
    ]
    return factor * powers[i] / sum(powers)


def gradient_of(model: PreTrainedModel, loss: Tensor) -> Tensor:
    """Return the whole gradient as one float64 vector."""
    gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return torch.cat([gradient.double().flatten() for gradient in gradients])
