"""A model that samples in its worker, with transformers' `generate`: the student's rollouts, a teacher's answers."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_opd.config.evaluation import Evaluation, Questions
from nemo_opd.config.on_policy import longest_prompt
from nemo_opd.config.rollout import HFRollout, RolloutBase
from nemo_opd.config.run import RunConfig
from nemo_opd.training.memory.activations import Work, working_bytes
from nemo_opd.training.memory.parts import Part, Phase, part
from nemo_opd.training.memory.situation import ModelSetup
from nemo_opd.training.memory.size import LayerSize

DRAWN, WARPED = 33, 5
"""Bytes per logit for drawing a token: logits in fp32, probabilities, their sums in fp64, a mask; warped logits."""
PART_NAMES = (
    "parameters, gathered whole",
    "key-value cache",
    "activations of sampling",
    "logits and what is drawn from them",
)


@dataclass(frozen=True, slots=True)
class Drawing:
    """The largest batch that a rank samples at a time."""

    rows: int
    """Sequences."""
    prompt: int
    """Positions of the longest prompt, to which all are padded."""
    new: int
    """Tokens of the longest continuation."""
    is_warped: bool
    """Temperature, top-k or top-p change the logits."""

    @property
    def length(self) -> int:
        """Positions in the cache at the end; the last token is never read."""
        return self.prompt + self.new - 1


def is_warped(settings: RolloutBase | Questions) -> bool:
    return (settings.temperature, settings.top_p, settings.top_k) != (1, 1, None)


def rollouts(config: RunConfig, dp: int) -> Drawing:
    """Return the largest batch of rollouts and questions. A later turn's prompt may be all but one token."""
    rollout, questions, longest = config.rollout, config.evaluation, config.train.max_length
    assert isinstance(rollout, HFRollout)
    kinds: list[HFRollout | Evaluation] = [rollout] if questions is None else [rollout, questions]
    rows = -(-config.train.global_batch_size // dp) if questions is None else rollout.batch_size
    return Drawing(
        rows=min(rollout.batch_size, rows),
        prompt=longest_prompt(config) if config.environment is None else longest - 1,
        new=min(max(each.max_new_tokens or 0 for each in kinds), longest - 1),
        is_warped=any(map(is_warped, kinds)),
    )


def sampling_parts(owner: str, phase: Phase, setup: ModelSetup, compute_bytes: int, drawing: Drawing) -> list[Part]:
    """Return the parts of the larger of two moments: prompts are read, or the longest sequences' last token is drawn.

    At the second, one layer's keys, as they grow by being copied, count as activations.
    """
    size, c, layers = setup.size, compute_bytes, setup.size.layers
    # Each rank of a context-parallel group samples whole sequences.
    work = Work(drawing.rows, drawing.prompt, 1, setup.layout.tp, sequence_parallel=False, compute_bytes=c)
    logits = drawing.rows * size.vocab_size * (DRAWN + (WARPED if drawing.is_warped else 0))
    prompts = cache_bytes(setup, c, drawing.rows, drawing.prompt, is_read=False)
    end = cache_bytes(setup, c, drawing.rows, drawing.length)
    moments = (prompts, working_bytes(size, work), 0), (end, end // (2 * len(layers)), logits)
    num_bytes = (c * setup.whole, *max(moments, key=sum))
    return [part(owner, name, each, phase) for name, each in zip(PART_NAMES, num_bytes, strict=True)]


def cache_bytes(setup: ModelSetup, compute_bytes: int, rows: int, length: int, *, is_read: bool = True) -> int:
    """Return the keys and values of all layers, exact to the byte for plain attention.

    is_read: the prompt has been read; until then layers with a sliding window keep it whole. Layers that keep less
    (linear attention, compressed keys) count like all others.
    """

    def kept(layer: LayerSize) -> int:
        return min(length, layer.window or length) if is_read else length

    numbers = sum(2 * layer.key_width * kept(layer) for layer in setup.size.layers)
    return rows * numbers * compute_bytes // setup.layout.tp


def rollout_parts(config: RunConfig, setup: ModelSetup, compute_bytes: int) -> list[Part]:
    """Return what the student's workers hold for rollouts; nothing where another engine samples."""
    if not isinstance(config.rollout, HFRollout):
        return []
    return sampling_parts("student", Phase.ROLLOUT, setup, compute_bytes, rollouts(config, setup.layout.dp))
