"""The student's process."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_opd.config.run import RunConfig
from nemo_opd.training.memory.activations import Work, layer_bytes, saved_activations, working_bytes
from nemo_opd.training.memory.parts import STUDENT_PHASES, Part, Phase, Process, part
from nemo_opd.training.memory.sampling import rollout_parts
from nemo_opd.training.memory.situation import ModelSetup, Situation
from nemo_opd.training.memory.size import FP32, shard_numel
from nemo_opd.training.memory.teacher import reading_phases, window_bytes
from nemo_opd.workers.student import compute_dtype

OWNER = "student"
MOMENTS = 2 * FP32
"""Bytes per trained parameter of AdamW's state."""
COPIES_OF_CE, COPIES_OF_KD = 4, 12
"""fp32 tensors of a chunk's logits alive at once in cross entropy and in the distillation loss that needs most."""


def student_process(config: RunConfig, situation: Situation) -> Process:
    job = _Job(config, situation)
    setup, offload = job.setup, config.student.offload is True
    optimizer, parameters = MOMENTS * setup.trained, job.parameter_bytes
    # Before the first step the optimizer has no state.
    here = STUDENT_PHASES if offload else (Phase.ROLLOUT, Phase.TEACHERS, *STUDENT_PHASES)
    at_first = (Phase.LOADING,) if offload else (Phase.LOADING, Phase.ANSWERS)
    device = (
        part(OWNER, "parameters", parameters, *at_first, Phase.ROLLOUT, *here),
        part(OWNER, "optimizer", optimizer, *here),
        part(OWNER, "temporaries of the optimizer", job.step_bytes, Phase.OPTIMIZER),
        *_pass_parts(job),
        *(_hidden_parts(job) if config.handoff.type == "hidden_states" else _logits_parts(job)),
        part(OWNER, "chunk of a loss", job.chunk_bytes, Phase.LOSS),
        part(OWNER, "teachers' output put together", window_bytes(config, situation), Phase.LOSS, Phase.BACKWARD),
        part(OWNER, "output of teachers on other nodes", situation.arriving, *reading_phases(config)),
        *rollout_parts(config, setup, job.compute_bytes),
    )
    host = [part(OWNER, "largest tensor, read from the file", FP32 * setup.largest_tensor, Phase.LOADING)]
    if offload:
        away = {Phase.ANSWERS: parameters, Phase.ROLLOUT: optimizer, Phase.TEACHERS: parameters + optimizer}
        host.append(Part(OWNER, "parameters, optimizer", away))
    return Process(device, tuple(host))


@dataclass(frozen=True, slots=True)
class _Job:
    config: RunConfig
    situation: Situation

    @property
    def setup(self) -> ModelSetup:
        return self.situation.student

    @property
    def compute_bytes(self) -> int:
        return compute_dtype(self.config.student.dtype, self.situation.machine.device).itemsize

    @property
    def work(self) -> Work:
        train = self.config.train
        return self.setup.work(self.config.student, train.micro_batch_size, train.max_length, self.compute_bytes)

    @property
    def positions(self) -> int:
        """Positions of a microbatch, over all context-parallel ranks."""
        return self.config.train.micro_batch_size * self.config.train.max_length

    @property
    def parameter_bytes(self) -> int:
        """Parameters in fp32; next to adapters, which are in fp32, frozen ones in the compute precision."""
        if not self.setup.size.adapters:
            return FP32 * self.setup.shard
        return self.compute_bytes * self.setup.shard + FP32 * self.setup.trained

    @property
    def step_bytes(self) -> int:
        """The root of AdamW's second moment: of all parameters at once on a GPU, of one at a time on a CPU."""
        if self.situation.machine.device == "cuda":
            return FP32 * self.setup.trained
        return FP32 * max(shard_numel((shape,), self.setup.layout) for shape in self.setup.size.trained_shapes)

    @property
    def widest_vocabulary(self) -> int:
        return max(setup.vocab_size for setup in (self.setup, *self.situation.teachers))

    @property
    def block_bytes(self) -> int:
        """Blocks of logits, one per head, that share a budget, and the gradient of the student's; in fp32."""
        num_teachers = len(self.situation.teachers)
        most = self.situation.machine.block_bytes // (1 + num_teachers)
        own, widest = (min(most, self.positions * v * FP32) for v in (self.setup.vocab_size, self.widest_vocabulary))
        return 2 * own + num_teachers * widest

    @property
    def chunk_bytes(self) -> int:
        """Temporaries of a loss: the budget, or all rows where they need less."""
        ce = COPIES_OF_CE * self.setup.vocab_size if self.config.loss.ce_weight > 0 else 0
        kd = COPIES_OF_KD * self.widest_vocabulary if self.situation.teachers else 0
        return min(self.situation.machine.block_bytes, self.positions * max(ce, kd) * FP32)


def _pass_parts(job: _Job) -> list[Part]:
    """Return the parts of a forward and a backward pass.

    Of three moments of the backward pass the largest counts: in the last layer all activations are alive, in the first
    the gradients of the others, and at its end the gradients of embedding and head. FSDP2 sums gradients in fp32, from
    a copy of the unsharded ones. A comparison of the gradients of KD and CE keeps one more set.
    """
    config, setup, c = job.config, job.setup, job.compute_bytes
    train, checkpointing = config.train, config.student.activation_checkpointing
    is_first_kept = train.global_batch_size > setup.layout.dp * train.micro_batch_size
    gradients = FP32 * setup.trained
    after = gradients * (1 if config.logging.gradients_every is None else 2)
    before = after if is_first_kept else after - gradients
    saved = saved_activations(setup.size, job.work, checkpointing=checkpointing)
    working = working_bytes(setup.size, job.work)
    if checkpointing:
        working += max(layer_bytes(layer, job.work) for layer in setup.size.layers)
    head = 0 if config.handoff.type == "hidden_states" else c * setup.trained_head
    layer = head + (c + FP32) * setup.trained_layer
    rest = (c + FP32) * setup.trained_rest
    moments = (before, layer, saved + working), (after, layer, working), (after, rest, 0)
    backward = max(moments, key=sum)
    by_phase = dict(zip(STUDENT_PHASES, ((before, 0, saved), backward, (after, 0, 0)), strict=True))
    names = ("gradients", "unsharded gradients", "activations")
    return [
        part(OWNER, "gathered parameters", c * setup.gathered, Phase.LOSS, Phase.BACKWARD),
        *(Part(OWNER, name, {phase: of[i] for phase, of in by_phase.items()}) for i, name in enumerate(names)),
    ]


def _logits_parts(job: _Job) -> list[Part]:
    """Return the logits and their gradient of all terms; where they are capped also the tanh, twice."""
    one = job.setup.logits(job.work.tokens) * job.compute_bytes
    capped = job.setup.size.has_soft_cap
    by_phase = {Phase.LOSS: (2 + capped) * one, Phase.BACKWARD: (2 + 2 * capped) * one}
    return [Part(OWNER, "logits and their gradients", by_phase)]


def _hidden_parts(job: _Job) -> list[Part]:
    """Return the gradients of hidden states and head, in fp32 and once in a lower compute precision, and the logits.

    Context-parallel ranks have also gathered the hidden states themselves.
    """
    c, cp = job.compute_bytes, job.setup.layout.cp
    hidden = job.positions * job.setup.size.hidden_size * c * (1 if cp == 1 else 2)
    copy = 0 if c == FP32 else c
    head = {Phase.LOSS: (FP32 + copy) * job.setup.trained_head, Phase.BACKWARD: c * job.setup.trained_head}
    return [
        part(OWNER, "gradients of hidden states", hidden, Phase.LOSS, Phase.BACKWARD),
        Part(OWNER, "gradient of the head", head),
        part(OWNER, "rows of logits and their gradient", job.block_bytes, Phase.LOSS),
    ]
