"""An oracle for training: one process, one sequence at a time, no padding, no sharding, no handoff, no FSDP."""

import math

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_opd.losses import p_kl
from nemo_opd.preflight.plan import Plan
from nemo_opd.types import Batch


def load(path: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def plain_training(plan: Plan, batches: list[Batch]) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Return curve and final weights of forward KL from a cross- and a same-tokenizer teacher, in this order."""
    config = plan.config
    student = load(config.student.model).train()
    teachers = [load(teacher.model).eval() for teacher in config.teachers]
    settings = config.student.optimizer
    optimizer = torch.optim.AdamW(
        student.parameters(),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        foreach=False,
    )
    floor = config.student.scheduler.min_lr_ratio
    curve = []
    for step, batch in enumerate(batches):
        rate = settings.lr * (floor + (1 - floor) * (1 + math.cos(math.pi * step / plan.total_steps)) / 2)
        optimizer.param_groups[0]["lr"] = rate
        ce, cross, same, of_chunks = terms(plan, student, teachers, batch)
        weights = [teacher.weight for teacher in config.teachers]
        kd = weights[0] * cross + weights[1] * same
        loss = config.loss.ce_weight * ce + config.loss.kd_weight * kd
        loss.backward()
        gradients = [parameter.grad for parameter in student.parameters() if parameter.grad is not None]
        norm = math.sqrt(sum(float(gradient.double().pow(2).sum()) for gradient in gradients))
        assert config.train.gradient_clip is not None
        for gradient in gradients:
            gradient *= min(1.0, config.train.gradient_clip / norm)
        optimizer.step()
        optimizer.zero_grad()
        tokens = sum(len(ids) for ids in sequences(batch.student.ids, batch.student.lengths))
        curve.append(
            {
                "ce": float(ce.detach()),
                "kd/cross": of_chunks,
                "kd/same": float(same.detach()),
                "grad_norm": norm,
                "lr": rate,
                "student_tokens": tokens,
            }
        )
    return curve, {name: value.detach() for name, value in student.state_dict().items()}


def terms(
    plan: Plan, student: PreTrainedModel, teachers: list[PreTrainedModel], batch: Batch
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return CE, p_kl and same_vocab of a global batch, divided by tokens, and the mean of p_kl over chunks."""
    cross_rows, _ = batch.teachers
    assert cross_rows.chunks is not None
    projection, size = plan.teachers[0].projection, plan.student_vocab_size
    assert projection is not None
    sums = [torch.zeros(()) for _ in range(3)]
    labels = compared = chunks = 0
    ours = sequences(batch.student.ids, batch.student.lengths)
    theirs = sequences(cross_rows.tokens.ids, cross_rows.tokens.lengths)
    for row, (ids, teacher_ids) in enumerate(zip(ours, theirs, strict=True)):
        student_chunks = cross_rows.chunks.student[row, : len(ids)]
        teacher_chunks = cross_rows.chunks.teacher[row, : len(teacher_ids)]
        logits = student(input_ids=ids[None]).logits
        with torch.no_grad():
            cross = teachers[0](input_ids=teacher_ids[None]).logits[..., : plan.teachers[0].vocab_size]
            same = teachers[1](input_ids=ids[None]).logits[0, :-1, :size]
        log_p = logits[0, :-1, :size].log_softmax(-1)
        log_q = same.log_softmax(-1)
        sums[0] = sums[0] - log_p.gather(1, ids[1:, None]).sum()
        sums[2] = sums[2] + (log_q.exp() * (log_q - log_p)).sum()
        sums[1] = (
            sums[1]
            + p_kl(
                logits,
                cross,
                projection=projection,
                student_ids=ids[None],
                teacher_ids=teacher_ids[None],
                student_chunk_id=student_chunks[None],
                teacher_chunk_id=teacher_chunks[None],
                normalizer=1.0,
                student_vocab_size=size,
            ).loss
        )
        labels += len(ids) - 1
        first = {int(student_chunks[0]), int(teacher_chunks[0]), -1} if len(teacher_ids) else {-1}
        of_text = len((set(student_chunks.tolist()) & set(teacher_chunks.tolist())) - first)
        chunks += of_text
        compared += (len(ids) - 1) * (of_text > 0)
    return sums[0] / labels, sums[1] / compared, sums[2] / labels, float(sums[1].detach()) / chunks


def sequences(ids: Tensor, lengths: Tensor) -> list[Tensor]:
    return [row[:length] for row, length in zip(ids, lengths.tolist(), strict=True)]
