"""Models, cases and requests for tests of the memory that sampling takes, and its report as text."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PretrainedConfig

from nemo_opd.config import RunConfig
from nemo_opd.distributed.layout import Layout
from nemo_opd.preflight.memory import Machine, MemoryEstimate, MemoryInputs, ModelSetup
from nemo_opd.preflight.memory_choices import memory_report
from nemo_opd.preflight.model_info import model_size
from nemo_opd.rollout.requests import Request
from tests.tiny import Tiny

BATCH = ("train.global_batch_size=96", "train.max_length=100", "rollout.max_new_tokens=30", "train.micro_batch_size=1")
WITHIN = 0.15
"""Not in the estimate: masks, rotated copies, and what FSDP2 copies out while it gathers the whole model."""


def shape(width: int, **settings: Any) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "vocab_size": 480,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        **settings,
    }


LLAMA = LlamaConfig(**shape(96, num_hidden_layers=4))
WIDE_KEYS = LlamaConfig(**shape(32, num_hidden_layers=4, head_dim=64, num_key_value_heads=4, vocab_size=64))
MANY_PARAMETERS = LlamaConfig(**shape(256, num_hidden_layers=4))
MANY_LOGITS = LlamaConfig(**shape(16, num_hidden_layers=1, vocab_size=20_000))


@dataclass(frozen=True)
class Case:
    config: PretrainedConfig
    rows: int
    prompt: int
    new: int
    dominant: str
    """The largest part beside the parameters."""
    settings: tuple[str, ...] = ()


def situation(
    config: RunConfig,
    model: PretrainedConfig,
    layout: Layout,
    device: str = "cpu",
    teachers: Sequence[PretrainedConfig] = (),
) -> MemoryInputs:
    """model: of the student, and of the teachers unless they are given."""
    models = [model, *(teachers or [model] * len(config.teachers))]
    student, *teacher_setups = (
        ModelSetup(model_size(architecture), architecture.vocab_size, layout) for architecture in models
    )
    return MemoryInputs(student, tuple(teacher_setups), Machine(device, None, None, layout.size))


def saved(config: PretrainedConfig, folder: Path, tiny: Tiny) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.student).save_pretrained(folder)
    return folder


def requests(case: Case, rows: int) -> list[Request]:
    """Prompts that are not all of the same length."""
    return [Request(np.ones(case.prompt - row % 2, np.int32), case.new, seed=row) for row in range(rows)]


def with_table(config: RunConfig) -> RunConfig:
    console = config.logging.console.model_copy(update={"memory_table": True})
    return config.model_copy(update={"logging": config.logging.model_copy(update={"console": console})})


def printed(config: RunConfig, estimated: MemoryEstimate) -> str:
    """The whole report, its table included."""
    console = Console(width=120, file=io.StringIO(), record=True)
    for renderable in memory_report(estimated, with_table(config)):
        console.print(renderable)
    return console.export_text()
