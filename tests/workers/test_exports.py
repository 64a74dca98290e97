"""The student's weights for a rollout server: in a folder, and in memory that other processes read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo_opd.config.model import Lora, Student
from nemo_opd.distributed.layout import Layout
from nemo_opd.distributed.process_group import build_mesh
from nemo_opd.handoff.shared_memory import FileDescriptor
from nemo_opd.models.lora import Adapters
from nemo_opd.models.sharded_load import load_sharded
from nemo_opd.workers.student_model import Exports
from tests.tiny import Tiny
from tests.workers.local import gathered, rank_zero

pytestmark = pytest.mark.world

RANK, ALPHA, STEP = 2, 6, 0.02


@dataclass(frozen=True)
class Seen:
    """Weights that rank 1 read from rank 0's memory."""

    tensors: dict[str, Tensor]
    is_there: bool
    """Whether the file exists after its release."""


def exported(job: tuple[Student, Path]) -> Seen:
    """Export a model that has moved by STEP to a folder and to memory."""
    settings, folder = job
    adapters = None if settings.lora is None else Adapters(settings.lora, settings.model, seed=0)
    model = load_sharded(
        settings,
        torch.float32,
        build_mesh(Layout(dist.get_world_size()), "cpu"),
        key="student.model",
        compute_dtype=torch.float32,
        device="cpu",
        trainable=True,
        adapters=adapters,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(STEP)
    exports = Exports(settings, model, adapters)
    exports.write(folder, "bfloat16")
    file, no_file = gathered(exports.hold("bfloat16"))
    assert no_file is None
    read = load_file(file.path) if dist.get_rank() else {}
    dist.barrier()
    exports.release()
    exports.release()
    dist.barrier()
    seen: list[Any] = gathered(Seen(read, is_there(file)))
    return seen[1]


def is_there(file: FileDescriptor) -> bool:
    try:
        file.check()
    except FileNotFoundError:
        return False
    return True


FORMS = ("whole", "adapters", "experts")


def save_experts(folder: Path) -> Path:
    """Save a model with experts, which are one tensor in transformers and many in files."""
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        moe_intermediate_size=8,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def seen(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Seen, Path]]:
    folder = tmp_path_factory.mktemp("exports")
    student = Student(model=str(tiny.student), tokenizer=str(tiny.student))
    students = (
        student,
        student.model_copy(update={"lora": Lora(rank=RANK, alpha=ALPHA, export="adapter")}),
        student.model_copy(update={"model": str(save_experts(folder / "start"))}),
    )
    jobs = [(settings, folder / form) for form, settings in zip(FORMS, students, strict=True)]
    results = rank_zero(2, exported, jobs, folder / "world")
    return {form: (result, folder / form) for form, result in zip(FORMS, results, strict=True)}


@pytest.mark.parametrize("form", FORMS)
def test_memory_and_folder_have_the_same_weights(seen: dict[str, tuple[Seen, Path]], form: str) -> None:
    """Bugs: shards, names of a wrapped model, a tied head twice, unmerged adapters, the student's dtype."""
    seen_weights, folder = seen[form]
    written = load_file(folder / "model.safetensors")

    assert seen_weights.tensors.keys() == written.keys()
    for name, value in written.items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(seen_weights.tensors[name], value), name
    assert not seen_weights.is_there


def test_exported_weights_are_the_current_ones(seen: dict[str, tuple[Seen, Path]], tiny: Tiny) -> None:
    for name, start in load_file(tiny.student / "model.safetensors").items():
        full, merged = (seen[form][0].tensors[name] for form in FORMS[:2])
        assert torch.equal(full, (start + STEP).bfloat16()), name
        assert torch.equal(merged, start.bfloat16()) == ("_proj" not in name), name
