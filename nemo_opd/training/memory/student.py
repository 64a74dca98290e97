"""What the student's process holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from nemo_opd.config.run import RunConfig
from nemo_opd.logits.blocks import BLOCK_BYTES, CPU_BLOCK_BYTES
from nemo_opd.training.memory.activations import Work, backward_bytes, saved_activations
from nemo_opd.training.memory.estimate import STUDENT_PHASES, Part, Phase, during
from nemo_opd.training.memory.process import ModelSetup, Process, after_reading, largest
from nemo_opd.training.memory.size import FP32, shard_numel

OWNER = "student"
MOMENTS = 2 * FP32
"""Bytes a parameter, of AdamW."""
COPIES_OF_CE, COPIES_OF_KD = 4, 12
"""Tensors of a chunk's logits, in fp32, that cross entropy and the hungriest distillation loss have at once."""


@dataclass(frozen=True, slots=True)
class StudentJob:
    """What the student has to do on one rank."""

    config: RunConfig
    setup: ModelSetup
    device: str
    compute_bytes: int
    headless: bool
    """Losses read hidden states and head, and logits are never there."""
    widest_vocabulary: int
    """Of the student's and the teachers' tokenizers."""
    window: int
    """Bytes of the teachers' output of a microbatch that is put together; 0 where it is read where it is."""
    arriving: int = 0
    """Bytes of what teachers on other nodes send, which stays."""

    @property
    def num_micro_batches(self) -> int:
        train = self.config.train
        return -(-train.global_batch_size // (self.setup.layout.dp * train.micro_batch_size))

    @property
    def work(self) -> Work:
        train, layout = self.config.train, self.setup.layout
        rows = train.micro_batch_size
        return Work(rows, train.max_length, layout.cp, layout.tp, self.setup.sequence_parallel, self.compute_bytes)


def student_process(job: StudentJob) -> Process:
    trained = shard_numel(job.setup.size.trained_shapes, job.setup.layout)
    offload = job.config.student.offload is True
    parts = [*state_parts(job, trained, offload), *pass_parts(job, trained)]
    host = [
        Part(OWNER, "largest tensor, read from the file", during(FP32 * largest(job.setup.size.shapes), Phase.LOADING))
    ]
    if offload:
        optimizer = MOMENTS * trained
        parameters = parameter_bytes(job)
        away = {Phase.ANSWERS: parameters, Phase.ROLLOUT: optimizer, Phase.TEACHERS: parameters + optimizer}
        host.append(Part(OWNER, "parameters, optimizer", away))
    return Process(tuple(parts), tuple(host), STUDENT_PHASES, is_offloaded=offload)


def parameter_bytes(job: StudentJob) -> int:
    """In fp32; what is frozen beside adapters, as it is computed with."""
    size, layout = job.setup.size, job.setup.layout
    own = shard_numel(size.shapes, layout)
    if not size.adapters:
        return FP32 * own
    return job.compute_bytes * own + FP32 * shard_numel(size.trained_shapes, layout)


def state_parts(job: StudentJob, trained: int, offload: bool) -> list[Part]:
    """What outlives a step; offloading takes it away while teachers work, and the optimizer in rollouts. Before the
    first step the optimizer has nothing.
    """
    here = STUDENT_PHASES if offload else (Phase.ROLLOUT, Phase.TEACHERS, *STUDENT_PHASES)
    at_first = (Phase.LOADING,) if offload else (Phase.LOADING, Phase.ANSWERS)
    return [
        Part(OWNER, "parameters", during(parameter_bytes(job), *at_first, Phase.ROLLOUT, *here)),
        Part(OWNER, "optimizer", during(MOMENTS * trained, *here)),
        Part(OWNER, "temporaries of the optimizer", during(step_bytes(job, trained), Phase.OPTIMIZER)),
    ]


def step_bytes(job: StudentJob, trained: int) -> int:
    """AdamW forms the root of the second moment: of all parameters at once on a GPU, of one at a time on a CPU."""
    if job.device == "cuda":
        return FP32 * trained
    return FP32 * max(shard_numel((shape,), job.setup.layout) for shape in job.setup.size.trained_shapes)


def pass_parts(job: StudentJob, trained: int) -> list[Part]:
    """Of a forward and a backward pass.

    The backward pass has three high points, of which the highest is told: its last layer, where all activations are
    there; its first, where the other layers' gradients are; and its end, with the gradients of embedding and head.
    FSDP2 sums gradients in fp32, from a copy of the unsharded ones.
    """
    setup, c, checkpointing = job.setup, job.compute_bytes, job.config.student.activation_checkpointing
    saved = saved_activations(setup.size, job.work, checkpointing=checkpointing)
    before, after = gradient_bytes(job, trained)
    gathered, of_layer = c * (setup.rest + setup.gathered_layers), (c + FP32) * setup.trained_layer
    of_head = 0 if job.headless else c * setup.trained_head
    working = backward_bytes(setup.size, job.work, checkpointing=checkpointing)
    loss = Pass(before, gathered, 0, saved)
    left = 0 if checkpointing else saved // len(setup.size.layers)
    of_rest = FP32 * setup.trained_rest // setup.fsdp_ranks
    last = Pass(before, gathered, of_head + of_layer, saved + working)
    first = Pass(max(before, after - of_rest), gathered, of_head + of_layer, left + working)
    end = Pass(
        after, c * setup.rest, (c + FP32) * setup.trained_rest + (of_rest if job.num_micro_batches > 1 else 0), 0
    )
    backward = max(last, first, end, key=sum)
    optimizer = Pass(after, 0, 0, 0)
    phases = dict(zip(STUDENT_PHASES, (loss, backward, optimizer), strict=True))
    return [
        *(Part(OWNER, name, {phase: of[i] for phase, of in phases.items()}) for i, name in enumerate(PASS_NAMES)),
        *(hidden_parts(job) if job.headless else logits_parts(job)),
        Part(OWNER, "chunk of a loss", during(chunk_bytes(job), Phase.LOSS)),
        Part(OWNER, "teachers' output put together", during(job.window, Phase.LOSS, Phase.BACKWARD)),
        Part(
            OWNER,
            "output of teachers on other nodes",
            during(job.arriving, Phase.TEACHERS, *after_reading(job.config)),
        ),
    ]


class Pass(NamedTuple):
    """Bytes at a moment of a step."""

    gradients: int
    gathered: int
    unsharded: int
    activations: int


PASS_NAMES = ("gradients", "gathered parameters", "unsharded gradients", "activations")


def gradient_bytes(job: StudentJob, trained: int) -> tuple[int, int]:
    """Sharded, before and after a backward pass: those of earlier microbatches are there before.

    Where the gradients of KD and CE are compared, one more set is kept.
    """
    compares = job.config.logging.gradients_every is not None
    one, after = FP32 * trained, FP32 * trained * (2 if compares else 1)
    return (after if job.num_micro_batches > 1 else after - one), after


def logits_parts(job: StudentJob) -> list[Part]:
    """Logits, and their gradient of all terms; where they are capped also the tanh, twice."""
    one = job.work.tokens * -(-job.setup.size.vocab_size // job.setup.layout.tp) * job.compute_bytes
    capped = job.setup.size.has_soft_cap
    tensors = {Phase.LOSS: 2 + capped, Phase.BACKWARD: 2 + 2 * capped}
    return [Part(OWNER, "logits and their gradients", {phase: number * one for phase, number in tensors.items()})]


def hidden_parts(job: StudentJob) -> list[Part]:
    """Gradients of hidden states, at all positions, and of the head: one for all terms, summed in fp32.

    In a lower precision a product that is added, or the sum as it is saved, is there beside it. Context-parallel ranks
    have gathered the hidden states themselves, too.
    """
    work, setup, c = job.work, job.setup, job.compute_bytes
    one = work.rows * work.length * setup.size.hidden_size * c
    gathered = one if work.cp > 1 else 0
    beside = 0 if c == FP32 else c
    head = {Phase.LOSS: (FP32 + beside) * setup.trained_head, Phase.BACKWARD: c * setup.trained_head}
    return [
        Part(OWNER, "gradients of hidden states", during(one + gathered, Phase.LOSS, Phase.BACKWARD)),
        Part(OWNER, "gradient of the head", head),
        Part(OWNER, "rows of logits and their gradient", during(block_bytes(job), Phase.LOSS)),
    ]


def block_bytes(job: StudentJob) -> int:
    """Rows that are made by one product with each head, which share a budget, and the student's gradient; in fp32."""
    num_teachers = len(job.config.active_teachers)
    most, positions = budget(job) // (1 + num_teachers), job.work.rows * job.work.length
    made = min(most, positions * job.setup.vocab_size * FP32)
    of_teachers = num_teachers * min(most, positions * job.widest_vocabulary * FP32)
    return 2 * made + of_teachers


def chunk_bytes(job: StudentJob) -> int:
    """The budget of a chunk, or all rows where they need less."""
    of_ce = COPIES_OF_CE * job.setup.vocab_size if job.config.loss.ce_weight > 0 else 0
    of_kd = COPIES_OF_KD * job.widest_vocabulary if job.config.active_teachers else 0
    return min(budget(job), job.work.rows * job.work.length * max(of_ce, of_kd) * FP32)


def budget(job: StudentJob) -> int:
    return BLOCK_BYTES if job.device == "cuda" else CPU_BLOCK_BYTES
