"""What a process holds while its model samples in it, with transformers' `generate`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from nemo_opd.config.evaluation import Questions
from nemo_opd.config.rollout import RolloutBase
from nemo_opd.training.memory.activations import Work, attention_share, forward_temporaries, widest
from nemo_opd.training.memory.estimate import Part, Phase, during
from nemo_opd.training.memory.process import ModelSetup, Process
from nemo_opd.training.memory.size import FP32, LayerSize

INT64 = FP64 = 8
DRAWN, WARPED = 21, 5
"""Bytes a logit that drawing a token needs beside its copy in fp32: probabilities in fp32, their sums in fp64 with and
without those that are 0, and a mask; more where temperature, top-k or top-p make other logits of it.
"""


@dataclass(frozen=True, slots=True)
class Drawing:
    """What a rank samples at a time."""

    rows: int
    """Sequences."""
    prompt: int
    """Positions of the longest, to which all are padded."""
    new: int
    """Tokens of the longest continuation."""
    is_warped: bool
    """By temperature, top-k or top-p."""

    @property
    def length(self) -> int:
        """Positions in the cache at the end; the last token is never read."""
        return self.prompt + self.new - 1


@dataclass(frozen=True, slots=True)
class SamplingJob:
    """A model that samples on one rank."""

    owner: str
    phase: Phase
    setup: ModelSetup
    compute_bytes: int
    """Of one number."""
    drawing: Drawing

    def work(self, length: int) -> Work:
        """Each rank of a context-parallel group has whole sequences."""
        tp, c = self.setup.layout.tp, self.compute_bytes
        return Work(self.drawing.rows, length, 1, tp, sequence_parallel=False, compute_bytes=c)

    def in_window(self, layer: LayerSize) -> Work:
        """Of what a layer's cache keeps at the end."""
        length = self.drawing.length
        return self.work(min(length, layer.window or length))


def is_warped(settings: RolloutBase | Questions) -> bool:
    return (settings.temperature, settings.top_p, settings.top_k) != (1, 1, None)


class Moment(NamedTuple):
    """Bytes at a moment of sampling."""

    gathered: int
    cache: int = 0
    activations: int = 0
    logits: int = 0


PART_NAMES = (
    "parameters, gathered whole",
    "key-value cache",
    "activations of sampling",
    "logits and what is drawn from them",
    "ids and random numbers",
)


def with_sampling(process: Process, job: SamplingJob) -> Process:
    """The process with what sampling needs in it."""
    parts = (*process.device, *sampling_parts(job))
    return replace(process, device=parts, works_in=(job.phase, *process.works_in))


def sampling_parts(job: SamplingJob) -> list[Part]:
    """Of the highest of the moments: parameters are gathered, prompts are read, a first token is drawn, the longest
    sequences are read on by a token, or their last is drawn.
    """
    c, setup, rows = job.compute_bytes, job.setup, job.drawing.rows
    whole = c * setup.whole
    on_arrival = c * max(setup.rest, setup.layer) if setup.fsdp_ranks > 1 else 0
    read, full = prompt_cache(job), full_cache(job)
    logits, left = logits_bytes(job), 2 * FP32 * rows * setup.size.vocab_size
    highest = max(
        Moment(whole + on_arrival),
        Moment(whole, read, prompt_temporaries(job)),
        Moment(whole, read, logits=logits),
        Moment(whole, full, step_temporaries(job), left),
        Moment(whole, full, logits=logits),
        key=sum,
    )
    parts = zip(PART_NAMES, (*highest, id_bytes(job.drawing)), strict=True)
    return [Part(job.owner, name, during(num_bytes, job.phase)) for name, num_bytes in parts]


def keys_bytes(layer: LayerSize, of: Work) -> int:
    """Of a layer's keys at these positions, or of its values."""
    return of.tokens * layer.key_width * of.compute_bytes // attention_share(layer, of)


def prompt_cache(job: SamplingJob) -> int:
    """Sliding windows too keep a prompt whole until the next token: what they keep is a view of it."""
    of = job.work(job.drawing.prompt)
    return sum(2 * keys_bytes(layer, of) for layer in job.setup.size.layers)


def full_cache(job: SamplingJob) -> int:
    """When the longest sequences end. Layers that keep less (linear attention, compressed keys) count as all others."""
    return sum(2 * keys_bytes(layer, job.in_window(layer)) for layer in job.setup.size.layers)


def prompt_temporaries(job: SamplingJob) -> int:
    """Of a layer that reads the prompts, with hidden states as they entered the model, the layer, its second half and
    its MLP; and masks of all scores, for each kind of window one.
    """
    size, of = job.setup.size, job.work(job.drawing.prompt)
    c, masks = of.compute_bytes, len({layer.window for layer in size.layers})
    widths = (max(widest(layer, of), reading_bytes(layer, of)) for layer in size.layers)
    of_mask = masks * of.length * (c if size.layers[0].has_scores else 1)
    return of.tokens * (4 * size.hidden_size * c + max(widths) + of_mask + 2 * size.head_width * c)


def reading_bytes(layer: LayerSize, of: Work) -> int:
    """A token's in attention that reads a prompt, beside keys and values as the cache will have them: queries and then
    keys, and three of either while they are rotated; or queries, output, and keys and values repeated for each query,
    with the mask as numbers that are added.
    """
    c, queries, keys = of.compute_bytes, layer.query_width, layer.key_width
    rotating = max(4 * queries, 2 * queries + 3 * keys) * c
    attending = (4 if keys < queries else 2) * queries * c
    added = 0 if layer.has_scores else of.length * c
    return max(rotating // attention_share(layer, of), attending // attention_share(layer, of) + added)


def step_temporaries(job: SamplingJob) -> int:
    """Of a layer that reads one more token: the cache grows by being copied, keys and then values, with a window both
    at once; eager attention repeats them for each query.
    """
    size = job.setup.size
    return forward_temporaries(size, job.work(1)) + max(growing(layer, job.in_window(layer)) for layer in size.layers)


def growing(layer: LayerSize, of: Work) -> int:
    copied = keys_bytes(layer, of) * (1 if layer.window is None else 2)
    if not layer.has_scores:
        return copied
    scores = 2 * FP32 * layer.num_heads * of.tokens
    repeated = (2 * layer.query_width * of.tokens * of.compute_bytes + scores) // attention_share(layer, of)
    return max(copied, repeated)


def logits_bytes(job: SamplingJob) -> int:
    """Of one position of each sequence, all columns on every rank of a tensor-parallel group; beside them is what was
    made of those before.
    """
    each = 3 * FP32 + DRAWN + (WARPED if job.drawing.is_warped else 0)
    return job.drawing.rows * job.setup.size.vocab_size * each


def id_bytes(drawing: Drawing) -> int:
    """Ids and attention mask, each of which grows by being copied, positions; a uniform number and a log-probability a
    token.
    """
    return drawing.rows * (5 * INT64 * drawing.length + (FP64 + FP32) * drawing.new)
