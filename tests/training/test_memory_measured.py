"""The estimate of a run against all tensors alive in its workers, followed op by op, and against the peak of a GPU."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from nemo_opd.checkpoint.state import HostCopies, read_state
from nemo_opd.cluster.batch_grid import micro_batches
from nemo_opd.preflight.memory import TRAINING, Phase
from nemo_opd.preflight.plan import Plan
from nemo_opd.types import TokenRows
from nemo_opd.workers.step import StudentStep
from nemo_opd.workers.student_worker import StudentWorker
from nemo_opd.workers.teacher_worker import TeacherWorker
from tests.tiny import SENTENCES, Tiny
from tests.training.live_bytes import LiveBytes
from tests.workers.local import first_batches, on_ranks_of, opened, plan_of, train_step

pytestmark = pytest.mark.world

WITHIN = 0.2
"""Relative error that the estimate promises."""


def shape(width: int, num_layers: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "vocab_size": 2000,
    }


@pytest.fixture(scope="module")
def folder(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models large enough for activations to count, with the tiny tokenizers; documents longer than any sequence."""
    folder = tmp_path_factory.mktemp("mid-size")
    models = {
        "student": (LlamaForCausalLM(LlamaConfig(**shape(192, 4), tie_word_embeddings=True)), tiny.student),
        "capped": (Gemma2ForCausalLM(Gemma2Config(**shape(96, 3), pad_token_id=0)), tiny.student),
        "same": (LlamaForCausalLM(LlamaConfig(**shape(256, 4), tie_word_embeddings=False)), tiny.teacher_same),
        "cross": (LlamaForCausalLM(LlamaConfig(**shape(128, 2))), tiny.teacher_cross),
    }
    for name, (model, tokenizer) in models.items():
        model.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder / name)
    table = pa.table({"text": ["".join(SENTENCES) * 20] * 8})
    with pa.OSFile(str(folder / "long.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return folder


Configure = Callable[..., Plan]


@pytest.fixture
def plan(tiny: Tiny, folder: Path) -> Configure:
    return lambda *overrides: plan_of(
        tiny.overrides(
            f"student.model={folder / 'student'}",
            f"teachers.0.model={folder / 'cross'}",
            f"teachers.1.model={folder / 'same'}",
            f"data.train.arrow_files={folder / 'long.arrow'}",
            "train.max_length=256",
            "train.global_batch_size=2",
            "train.micro_batch_size=2",
            "data.packing=false",
            *overrides,
        )
    )


def sharded(model: Any) -> list[Tensor]:
    """Return a model's parameters after resharding: until then, the root's are the gathered ones."""
    if isinstance(model, FSDPModule):
        model.reshard()
    return list(model.parameters())


def itself(worker: Any) -> Any:
    return worker


def held(student: StudentWorker, teachers: Sequence[TeacherWorker]) -> list[Tensor]:
    """Return the tensors that outlive a step."""
    state = [value for state in student.optimizer.state.values() for value in state.values()]
    frozen = [parameter for teacher in teachers for parameter in sharded(teacher.model)]
    return [*sharded(student.model), *state, *frozen]


CASES = [
    (),
    ("student.activation_checkpointing=true",),
    ("train.micro_batch_size=1",),
    ("train.micro_batch_size=1", "student.parallelism.reshard_after_forward=false"),
    ("student.dtype=bfloat16", "loss.kd_weight=0", "train.micro_batch_size=1", "student.sync_each_micro_batch=false"),
    ("student.dtype=bfloat16", "student.activation_checkpointing=true", "loss.kd_weight=0"),
    ("handoff=logits", "teachers.0.dtype=float32"),
    ("student.model=capped", "loss.kd_weight=0"),
]


def cut(tokens: TokenRows, budget: int) -> list[list[slice]]:
    return micro_batches([tokens.packed_lengths], budget, is_packed=True)


@pytest.mark.parametrize("overrides", CASES, ids=" ".join)
def test_a_step_holds_the_estimated_bytes(plan: Configure, folder: Path, overrides: tuple[str, ...]) -> None:
    """Measures each teacher's forward pass, then the second step, which has the optimizer's state."""
    values = [value.replace("capped", str(folder / "capped")) for value in overrides]
    settled = plan(*values)
    (memory,) = settled.memory.memories
    # Separate teachers all count as working.
    (separate,) = plan(*values, "cluster.placement=separate", "cluster.prefetch=0").memory.memories
    (batch,) = first_batches(settled, 1)
    with opened(settled) as models:
        train_step(models, batch)
        student, *teachers = on_ranks_of(models.student, itself) + [
            on_ranks_of(group, itself)[0] for group in models.teachers
        ]
        turns = zip(settled.config.active_teachers, teachers, settled.teacher_tokens_at_a_time, strict=True)
        for (settings, teacher, tokens), rows in zip(turns, batch.teachers, strict=False):
            estimated = sum(part.at(Phase.TEACHERS) for part in separate.parts if part.owner == settings.name)
            with LiveBytes(*sharded(teacher.model)) as live:
                teacher.forward(rows.tokens, *cut(rows.tokens, tokens))
            assert estimated == pytest.approx(live.peak, rel=WITHIN)
        with LiveBytes(*held(student, teachers)) as live:
            train_step(models, batch)

    assert memory.peak_phase in TRAINING
    assert memory.peak == pytest.approx(live.peak, rel=WITHIN)


def test_checkpoint_copies_and_learned_projections(plan: Configure) -> None:
    """Bug: the copy of a checkpoint, or a projection's Δ with its moments, is missing from the estimate."""
    self_teacher = ["~teachers.1.model", "~teachers.1.dtype", "+teachers.1.weights=ema"]
    settled = plan(*self_teacher, "train.async_save=true", "teachers.0.projection_lr=0.1")
    (memory,) = settled.memory.memories
    by_name = {part.name: part.at(Phase.BACKWARD) for part in memory.parts}
    (batch,) = first_batches(settled, 1)
    with opened(settled) as models:
        train_step(models, batch)
        (student,) = on_ranks_of(models.student, itself)
        with student.own_teachers.state() as averages:
            state = read_state(student.model, student.optimizer, student.scheduler, averages).shared
        (learned,) = student.learned.by_teacher.values()
        copied = tree_map_only(Tensor, HostCopies(), state)

    assert by_name["copy of the checkpoint being written"] == pytest.approx(num_bytes(copied), rel=0.001)
    # Δ, its two moments and its gradient, and log R₀.
    assert by_name["learned projections"] == 4 * learned.delta.nbytes + learned.log_start.nbytes


def num_bytes(tensors: object) -> int:
    """Return the bytes of tensors; one with several names, such as a tied embedding, counts once."""
    return sum({leaf.data_ptr(): leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)}.values())


@pytest.fixture
def gpu_world() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu_world")
@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_the_peak_on_a_gpu(tiny: Tiny, tmp_path: Path, plan: Configure, checkpointing: str) -> None:
    """Compares with PyTorch's allocator in the second step of a student with a hundred million parameters."""
    config = LlamaConfig(**{**shape(1024, 8), "vocab_size": 16_000}, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny.student).save_pretrained(tmp_path)
    settled = plan(
        f"student.model={tmp_path}",
        f"student.activation_checkpointing={checkpointing}",
        "loss.kd_weight=0",
        "train.max_length=1024",
        "cluster.device=cuda",
        "cluster.gpus_per_node=1",
    )
    student = StudentWorker(
        settled.config,
        projections=[],
        total_steps=settled.total_steps,
        vocab_size=settled.student_vocab_size,
        teacher_vocab_sizes=[],
        device="cuda",
        transport=settled.transport,
        block_bytes=settled.memory.block_bytes,
    )
    (batch,) = first_batches(settled, 1)
    cuts = cut(batch.student, settled.config.train.tokens_at_a_time)
    step = StudentStep(batch, (), student.objective.normalizers(batch), tuple(cuts[0]), 1.0)
    student.train_step(step)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    metrics = student.train_step(step)
    student.close()
    parts = [part for part in settled.memory.memories[0].parts if part.name != "CUDA"]
    estimated = max(sum(part.at(phase) for part in parts) for phase in TRAINING)

    assert estimated / 2**30 == pytest.approx(metrics["peak_memory_gb"].value(), rel=WITHIN)
