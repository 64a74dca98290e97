"""The step of `step.py` written plainly: transformers, autocast, all logits at once, losses under autograd.

uv run benchmarks/step.py --models FOLDER --student llama_1b --same-teacher llama_3b --teacher qwen_4b …
uv run benchmarks/step_plain.py FOLDER

As much is computed as with two teachers and p_kl: cross-entropy, the KL to the teacher of the same tokenizer, the KL of
the projected student to the other one on three of four positions. Token ids are random, so that values mean nothing. As
many texts at a time as fit. Prints a line of JSON after each step.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from losses_naive_divergences import forward_kl
from losses_naive_projected import Entries, p_kl
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_opd.projection import cached_projection

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
LENGTH, ROWS, STEPS = (2048, 16, 3) if HAS_GPU else (32, 4, 2)
AT_A_TIME = (4, 2, 1)


class PlainStep:
    def __init__(self, folder: Path) -> None:
        """Raises SystemExit for a folder that has not the three models."""
        folders = [next(folder.glob(f"{side}_*/config.json"), None) for side in ("student", "same", "teacher")]
        if None in folders:
            raise SystemExit(f"{folder}: it has no student, same and teacher model; write them with benchmarks/step.py")
        student, same, cross = (each.parent for each in folders if each is not None)
        tokenizers = [AutoTokenizer.from_pretrained(each) for each in (student, cross)]
        projection = cached_projection(*tokenizers)[0]
        entries = Entries.of(projection)
        names = ("student", "cell", "weight", "columns")
        self._entries = Entries(*(getattr(entries, name).to(DEVICE) for name in names))
        stored = torch.bfloat16 if HAS_GPU else torch.float32
        self._student, self._same, self._cross = (
            load(each, torch.float32 if each == student else stored) for each in (student, same, cross)
        )
        self._optimizer = torch.optim.AdamW(self._student.parameters(), lr=1e-5, fused=HAS_GPU)
        sizes = projection.student_vocab_size, projection.teacher_vocab_size
        self._ids, self._other_ids = (torch.randint(100, size - 100, (ROWS, LENGTH), device=DEVICE) for size in sizes)

    def seconds(self, at_a_time: int) -> float:
        """Time a step. Raises torch.OutOfMemoryError if so many texts at a time do not fit."""
        begin = time.perf_counter()
        for start in range(0, ROWS, at_a_time):
            rows = slice(start, start + at_a_time)
            with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=HAS_GPU):
                loss = self._loss(self._ids[rows], self._other_ids[rows])
            (loss * at_a_time / ROWS).backward()
        torch.nn.utils.clip_grad_norm_(self._student.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        loss.item()
        return time.perf_counter() - begin

    def _loss(self, ids: Tensor, other_ids: Tensor) -> Tensor:
        with torch.no_grad():
            of_same, of_cross = (
                model(input_ids=read, use_cache=False).logits[:, :-1].float()
                for model, read in ((self._same, ids), (self._cross, other_ids))
            )
        logits = self._student(input_ids=ids, use_cache=False).logits[:, :-1].float()
        log_p = logits.log_softmax(-1)
        cross_entropy = F.nll_loss(log_p.flatten(0, 1), ids[:, 1:].flatten())
        same_vocab = forward_kl(of_same.log_softmax(-1), log_p).sum(-1).mean()
        compared = slice(None, 3 * logits.shape[1] // 4)
        student, teacher = (side[:, compared].flatten(0, 1) for side in (logits, of_cross))
        return cross_entropy + same_vocab + p_kl(student, teacher, forward_kl, self._entries).mean()

    def clear(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()


def load(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(DEVICE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="--models of benchmarks/step.py")
    step = PlainStep(parser.parse_args().folder)
    for at_a_time in AT_A_TIME:
        seconds = []
        try:
            step.seconds(at_a_time)
            for _ in range(STEPS):
                seconds.append(step.seconds(at_a_time))
                median = statistics.median(seconds)
                peak = torch.cuda.max_memory_allocated() / 2**30 if HAS_GPU else None
                found = {"steps, s": seconds, "tokens/s": ROWS * LENGTH / median, "peak, GiB": peak}
                print(json.dumps({"texts at a time": at_a_time, **found}), flush=True)
            return
        except torch.OutOfMemoryError:
            print(json.dumps({"texts at a time": at_a_time, "fits": False}), flush=True)
        step.clear()
    raise SystemExit("one text at a time does not fit")


if __name__ == "__main__":
    main()
