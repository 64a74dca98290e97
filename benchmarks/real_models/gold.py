"""TRL's GOLD trainer on the pair of the real-model benchmark: the same texts, rows and number of steps."""

import json
import os
import random
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.demo import commit, hardware
from benchmarks.real_models.bits import bits_per_byte
from benchmarks.real_models.outcomes import Outcome
from benchmarks.real_models.place import Place
from benchmarks.real_models.settings import Setting
from benchmarks.real_models.texts import fitting
from benchmarks.step_gold import checkpointing, prompt_end

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
OWN = "trl_own"
_SPARE = 4
"""Tokens left free in a window: the one that ends a completion, and those that the cut after the prompt adds."""


class _Watch(TrainerCallback):
    """CPU time of each step, and the losses that are logged."""

    def __init__(self) -> None:
        self.cpu_s: list[float] = []
        self.losses: list[list[float]] = []
        self._began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.cpu_s.append(time.process_time() - self._began)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            self.losses.append([state.global_step, logs["loss"]])


def run_gold(setting: Setting, seed: int, steps: int, config: dict[str, Any], place: Place) -> Outcome:
    """Train with GOLD and measure before and after; it begins anew where it broke off."""
    from trl.experimental.gold import GOLDTrainer

    began = time.perf_counter()
    student = Path(config["student"]["model"])
    tokenizer = AutoTokenizer.from_pretrained(student)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    given = arguments(setting, seed, steps, config, place)
    watch = _Watch()
    trainer = GOLDTrainer(
        model=AutoModelForCausalLM.from_pretrained(student, dtype="float32"),
        teacher_model=AutoModelForCausalLM.from_pretrained(place.original, dtype="bfloat16"),
        args=_arguments_of_trl(given),
        train_dataset=_dataset(place.train, tokenizer, place, config["train"]["max_length"], seed),
        processing_class=tokenizer,
        callbacks=[watch],
    )
    trainer.train()
    final = Path(given["output_dir"]) / "final"
    trainer.save_model(str(final))
    tokenizer.save_pretrained(final)
    return Outcome(
        setting.experiment,
        setting.name,
        seed,
        steps,
        given,
        start=bits_per_byte(student, place.validation),
        end=bits_per_byte(final, place.validation),
        teacher=bits_per_byte(place.original, place.validation),
        curves={"train/loss": watch.losses},
        cpu_s_per_step=median(watch.cpu_s),
        cpu_s=sum(watch.cpu_s),
        wall_s=time.perf_counter() - began,
        load=os.getloadavg()[0],
        hardware=hardware(),
        commit=commit(),
        date=date.today().isoformat(),
    )


def arguments(setting: Setting, seed: int, steps: int, config: dict[str, Any], place: Place) -> dict[str, Any]:
    """Return GOLD's settings that are not its defaults; in `trl_ours` also the optimizer and the loss's weights."""
    rows = config["train"]["global_batch_size"]
    given: dict[str, Any] = {
        "output_dir": config["run"]["output_dir"],
        "seed": seed,
        "max_steps": steps,
        "per_device_train_batch_size": rows,
        "max_length": config["train"]["max_length"],
        "max_completion_length": 1,
        "lmbda": 0.0,
        "use_uld_loss": True,
        "teacher_tokenizer_name_or_path": str(place.original),
        "bf16": config["student"]["dtype"] == "bfloat16",
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        **checkpointing(False),
    }
    if setting.name == OWN:
        return given
    return given | {
        "uld_use_hybrid_loss": True,
        "uld_crossentropy_weight": 1.0,
        "learning_rate": config["student"]["optimizer"]["lr"],
        "adam_beta2": 0.95,
        "weight_decay": 0.001,
        "lr_scheduler_type": "cosine",
        "warmup_steps": config["student"]["scheduler"]["warmup_steps"],
    }


def _arguments_of_trl(given: dict[str, Any]) -> Any:
    from trl.experimental.gold import GOLDConfig

    return GOLDConfig(**given)


def _dataset(train: Path, tokenizer: Any, place: Place, max_length: int, seed: int) -> Any:
    """Return windows of the training texts that fit both models, as prompts of a few characters and completions."""
    from datasets import Dataset

    tokenizers = [tokenizer, AutoTokenizer.from_pretrained(place.original)]
    texts = [
        window
        for line in train.read_text(encoding="utf-8").splitlines()
        for window in _windows(json.loads(line)["text"], tokenizers, max_length - _SPARE)
    ]
    random.Random(seed).shuffle(texts)
    ends = [prompt_end(text, tokenizer) for text in texts]
    rows = [{"prompt": text[:end], "completion": text[end:]} for text, end in zip(texts, ends, strict=True)]
    return Dataset.from_list(rows)


def _windows(text: str, tokenizers: list[Any], max_length: int) -> Iterator[str]:
    while len(text) > 100:
        window = fitting(text, tokenizers, max_length)
        yield window
        text = text[len(window) :]
