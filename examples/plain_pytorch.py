"""Distillation from a teacher with another tokenizer in a training loop of plain PyTorch, without settings or workers.

uv run examples/plain_pytorch.py [STEPS]
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_opd.alignment import TokenAligner
from nemo_opd.demo import model_path, python_sources
from nemo_opd.losses import p_kl
from nemo_opd.projection import build_projection

BATCH_SIZE, MAX_LENGTH, CE_WEIGHT = 8, 96, 0.5


@dataclass
class Texts:
    """Texts as both models read them; the ids of chunks say which tokens stand for the same bytes."""

    student_ids: Tensor
    teacher_ids: Tensor
    student_chunks: Tensor
    teacher_chunks: Tensor
    labels: Tensor


def main(num_steps: int) -> tuple[float, float]:
    """Return the loss on held-out texts before and after."""
    torch.manual_seed(0)
    student_folder, teacher_folder = model_path("student"), model_path("teacher_cross")  # or any two folders
    student = AutoModelForCausalLM.from_pretrained(student_folder, dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(teacher_folder, dtype=torch.float32).eval()
    tokenizer, teacher_tokenizer = (AutoTokenizer.from_pretrained(each) for each in (student_folder, teacher_folder))
    projection = build_projection(tokenizer, teacher_tokenizer, top_k=4)
    aligner = TokenAligner(tokenizer, teacher_tokenizer)

    def read(texts: Sequence[str]) -> Texts:
        columns: list[list[Tensor]] = [[], [], [], []]
        for text in texts:
            # Where one side is cut before the other, what is left has no chunk.
            ours = tokenizer(text)["input_ids"][:MAX_LENGTH]
            theirs = teacher_tokenizer(text)["input_ids"][: 2 * MAX_LENGTH]
            alignment = aligner.align(ours, theirs)
            chunks = alignment.student_chunk_id, alignment.teacher_chunk_id
            for column, values in zip(columns, (ours, theirs, *chunks), strict=True):
                column.append(torch.as_tensor(values))
        # Causal models do not see what comes after a text, and −1 is no chunk.
        padded = [
            pad_sequence(column, batch_first=True, padding_value=fill)
            for column, fill in zip(columns, (0, 0, -1, -1), strict=True)
        ]
        return Texts(*padded, labels=pad_sequence(columns[0], batch_first=True, padding_value=-100))

    def loss_of(batch: Texts) -> Tensor:
        logits = student(input_ids=batch.student_ids).logits
        with torch.no_grad():
            teacher_logits = teacher(input_ids=batch.teacher_ids).logits
        kd = p_kl(
            logits,  # as the model puts them out: the loss shifts
            teacher_logits,
            projection=projection,
            student_ids=batch.student_ids,
            teacher_ids=batch.teacher_ids,
            student_chunk_id=batch.student_chunks,
            teacher_chunk_id=batch.teacher_chunks,
        ).loss
        ce = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten())
        return kd + CE_WEIGHT * ce

    def held_out_loss() -> float:
        with torch.no_grad():
            return loss_of(held_out).item()

    texts, validation = (
        Dataset.from_file(str(python_sources.arrow_file(split))).shuffle(seed=0)["text"]
        for split in ("train", "validation")
    )
    held_out = read(validation[:BATCH_SIZE])
    before = held_out_loss()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    for step in range(num_steps):
        start = step * BATCH_SIZE % (len(texts) - BATCH_SIZE)
        loss = loss_of(read(texts[start : start + BATCH_SIZE]))
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}/{num_steps}  loss {loss.item():.3f}")
    after = held_out_loss()
    print(f"on held-out texts: loss {before:.3f} before, {after:.3f} after")
    return before, after


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
