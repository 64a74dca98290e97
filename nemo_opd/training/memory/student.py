"""Memory of the student's process."""

from __future__ import annotations

from nemo_opd.config.run import RunConfig
from nemo_opd.losses import surprise
from nemo_opd.models.load import compute_dtype
from nemo_opd.training.memory.activations import layer_bytes, saved_activations, working_bytes
from nemo_opd.training.memory.optimizer import state_bytes, temporary_bytes
from nemo_opd.training.memory.parts import STUDENT_PHASES, Part, Phase, Process, part
from nemo_opd.training.memory.sampling import rollout_parts
from nemo_opd.training.memory.situation import Situation
from nemo_opd.training.memory.size import FP32, cut_numel
from nemo_opd.training.memory.teacher import copied_heads, reading_phases, window_bytes

_OWNER = "student"
_AFTER_LOADING = (Phase.ROLLOUT, Phase.TEACHERS, *STUDENT_PHASES)
_FP64 = 8
_COPIES = 12
"""fp32 tensors of a chunk's logits alive at once in the distillation loss that needs most."""


def student_process(config: RunConfig, situation: Situation) -> Process:
    """Return the parts of the student's process."""
    c = compute_dtype(config.student.dtype, situation.machine.device).itemsize
    setup, offload = situation.student, config.student.offload is True
    trained, parameters = setup.trained, setup.student_bytes(c)
    settings, size, layout = config.student.optimizer, setup.size, setup.layout
    optimizer = state_bytes(settings, size, layout)
    temporaries = temporary_bytes(settings, size, layout, situation.machine.device)
    # Before the first step the optimizer has no state.
    here = STUDENT_PHASES if offload else _AFTER_LOADING
    at_first = (Phase.LOADING,) if offload else (Phase.LOADING, Phase.ANSWERS)
    away = {Phase.ANSWERS: parameters, Phase.ROLLOUT: optimizer, Phase.TEACHERS: parameters + optimizer}
    if situation.machine.device == "cuda":  # where the host's copy stays
        away |= dict.fromkeys(_AFTER_LOADING, parameters + optimizer)
    device = (
        part(_OWNER, "parameters", parameters, *at_first, Phase.ROLLOUT, *here),
        part(_OWNER, "optimizer", optimizer, *here),
        part(_OWNER, "temporaries of the optimizer", temporaries, Phase.OPTIMIZER),
        *_pass_parts(config, situation, c, FP32 * trained),
        *_loss_parts(config, situation, c),
        part(_OWNER, "teachers' output put together", window_bytes(config, situation), Phase.LOSS, Phase.BACKWARD),
        part(_OWNER, "teachers' heads, copied", copied_heads(config, situation), *reading_phases(config)),
        part(_OWNER, "output of teachers on other nodes", situation.arriving, *reading_phases(config)),
        *rollout_parts(config, setup, c),
        *_learned_projections(situation.num_learned),
    )
    saved = _saved_in_background(config, FP32 * trained, optimizer)
    host = (
        part(_OWNER, "largest tensor, read from the file", FP32 * setup.largest_tensor, Phase.LOADING),
        Part(_OWNER, "parameters, optimizer", away if offload else {}),
        part(_OWNER, "copy of the checkpoint being written", saved, *_AFTER_LOADING),
    )
    return Process(device, host)


def _saved_in_background(config: RunConfig, weights: int, optimizer: int) -> int:
    """Return the bytes that are copied to be written while training goes on: weights, optimizer and averages."""
    if not config.train.async_save:
        return 0
    averages = sum(teacher.weights == "ema" for teacher in config.active_teachers)
    return (1 + averages) * weights + optimizer


def _learned_projections(number: int) -> tuple[Part, ...]:
    """Return log R₀ in fp64, Δ, its moments and its gradient; and log R, its gradient and one temporary in fp64."""
    return (
        part(_OWNER, "learned projections", (_FP64 + FP32) * number, *Phase),
        part(_OWNER, "optimizer of learned projections", 2 * FP32 * number, *_AFTER_LOADING),
        part(_OWNER, "gradients of learned projections", FP32 * number, *STUDENT_PHASES),
        part(_OWNER, "weights of learned projections", 3 * _FP64 * number, Phase.LOSS),
    )


def _pass_parts(config: RunConfig, situation: Situation, c: int, gradients: int) -> list[Part]:
    """Return the parts of a forward and a backward pass.

    The largest of three moments of the backward pass counts: all activations are alive in the last layer, the other
    layers' gradients in the first one, and the gradients of embedding and head at the end. FSDP2 sums gradients in
    fp32, from a copy of the unsharded ones; those that are reduced once a step are all there until then. Without it
    each one is added where it is made. A comparison of the gradients of KD and CE keeps one more set.
    """
    train, setup, checkpointing = config.train, situation.student, config.student.activation_checkpointing
    size, largest = setup.size, setup.size.largest_layer
    rows = train.longest_at_a_time(setup.layout.dp)
    work = setup.work(config.student, rows, train.max_length, situation.machine.device)
    after = gradients * (1 if config.logging.gradients_every is None else 2)
    # Earlier microbatches have left gradients.
    has_several = train.global_batch_size > setup.layout.dp * max(1, train.tokens_at_a_time // train.max_length)
    is_sharded = setup.is_sharded(config.student, c)
    is_summed_whole = is_sharded and has_several and config.student.sync_each_micro_batch is False
    summed = FP32 * cut_numel(size.trained_shapes, setup.layout.tp) if is_summed_whole else 0
    before = after if has_several and not summed else after - gradients
    saved = saved_activations(size, work, checkpointing=checkpointing)
    recomputed = max(layer_bytes(layer, work) for layer in size.layers) if checkpointing else 0
    working = recomputed + working_bytes(size, work)
    head = 0 if config.handoff.type == "hidden_states" else c * setup.trained_head
    unsharded = c + FP32 if is_sharded else 0
    layer = head + unsharded * cut_numel(largest.trained_shapes, setup.layout.tp)
    rest = 0 if size.adapters else unsharded * setup.rest
    backward = max(
        (before, summed + layer, saved + working), (after, summed + layer, working), (after, summed + rest, 0), key=sum
    )
    by_phase = dict(zip(STUDENT_PHASES, ((before, summed, saved), backward, (after, 0, 0)), strict=True))
    names = ("gradients", "unsharded gradients", "activations")
    return [
        part(_OWNER, "gathered parameters", c * setup.kept(config.student, c), Phase.LOSS, Phase.BACKWARD),
        *(Part(_OWNER, name, {phase: of[i] for phase, of in by_phase.items()}) for i, name in enumerate(names)),
    ]


def _loss_parts(config: RunConfig, situation: Situation, c: int) -> list[Part]:
    """Return whole logits and their gradient, or where losses read hidden states their gradient and blocks of logits.

    A soft cap keeps the tanh of whole logits, in backward twice. Context-parallel ranks have gathered hidden states.
    The head's gradient is in fp32, and at first also in a lower compute precision. All heads share the block's budget.
    """
    setup, budget, num_teachers = situation.student, situation.block_bytes, len(situation.teachers)
    rows, length = config.train.longest_at_a_time(setup.layout.dp), config.train.max_length
    positions, tokens = rows * length, rows * -(-length // setup.layout.cp)
    widest = max(each.vocab_size for each in (setup, *situation.teachers))
    copies = _COPIES if situation.teachers else surprise.LIVE_COPIES
    chunk = part(_OWNER, "chunk of a loss", min(budget, copies * positions * widest * FP32), Phase.LOSS)
    if config.handoff.type == "logits":
        one, capped = c * setup.logits(tokens), setup.size.has_soft_cap
        logits = {Phase.LOSS: (2 + capped) * one, Phase.BACKWARD: (2 + 2 * capped) * one}
        return [Part(_OWNER, "logits and their gradients", logits), chunk]
    hidden = positions * setup.size.hidden_size * c * (1 if setup.layout.cp == 1 else 2)
    lower = 0 if c == FP32 else c
    head = {Phase.LOSS: (FP32 + lower) * setup.trained_head, Phase.BACKWARD: c * setup.trained_head}
    own, other = (min(budget // (1 + num_teachers), positions * v * FP32) for v in (setup.vocab_size, widest))
    return [
        part(_OWNER, "gradients of hidden states", hidden, Phase.LOSS, Phase.BACKWARD),
        Part(_OWNER, "gradient of the head", head),
        part(_OWNER, "rows of logits and their gradient", 2 * own + num_teachers * other, Phase.LOSS),
        chunk,
    ]
