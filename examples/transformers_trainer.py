"""Distillation from two teachers, one with another tokenizer, in `transformers.Trainer`.

uv run examples/transformers_trainer.py [STEPS [FOLDER]]
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from nemo_opd.demo import model_path, python_sources
from nemo_opd.integrations.distillation import Distillation
from nemo_opd.integrations.hf import DistillationMixin


class DistillationTrainer(DistillationMixin, Trainer):
    """`transformers.Trainer` whose loss is that of the distillation."""


def main(num_steps: int, folder: Path) -> DistillationTrainer:
    """Return the trainer when it is done."""
    distillation = Distillation(
        {
            "student": {"model": "demo:student"},  # where its tokenizer is
            "teachers": [
                {"name": "cross", "type": "cross_tokenizer", "model": "demo:teacher_cross", "weight": 0.5},
                {
                    "name": "same",
                    "type": "same_tokenizer",
                    "model": "demo:teacher_same",
                    "weight": 0.5,
                    "loss": {"type": "same_vocab"},
                },
            ],
            "loss": {"type": "p_kl", "ce_weight": 0.5},
            "train": {"max_length": 96},
        }
    )
    trainer = DistillationTrainer(
        AutoModelForCausalLM.from_pretrained(model_path("student"), dtype=torch.float32),
        TrainingArguments(
            str(folder),
            max_steps=num_steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=5e-3,
            logging_steps=2,
            eval_strategy="steps",
            eval_steps=20,
            report_to="none",
        ),
        distillation=distillation,
        train_dataset=Dataset.from_file(str(python_sources.arrow_file("train"))),
        eval_dataset=Dataset.from_file(str(python_sources.arrow_file("validation"))).select(range(16)),
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40, Path(sys.argv[2] if len(sys.argv) > 2 else "outputs/trainer"))
