"""What a few of the texts show before a run: how much of them each teacher reads, and in how many tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch

from nemo_opd.aggregation import Parts, coverage_metrics
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import CrossTokenizerTeacher
from nemo_opd.data.collate import collate
from nemo_opd.data.documents import read_documents
from nemo_opd.data.record import Prompt
from nemo_opd.data.samples import Sample
from nemo_opd.errors import AlignmentError, DataError
from nemo_opd.logging.metrics import merge
from nemo_opd.progress import tracked
from nemo_opd.rollout.renderer import num_tokens
from nemo_opd.training.corpus import Corpus
from nemo_opd.training.prompts import Prompts
from nemo_opd.training.side import Side
from nemo_opd.training.sides import longest
from nemo_opd.types import Batch, SampledRows

NUM_TEXTS = 64
"""At equal distances over the training data."""
GOOD_COVERAGE = 0.9
"""Llama-3.1, Qwen3 and Gemma-3 reach 0.95 with each other on the worst of prose, code, numbers, CJK text and runs of
white space, and 0.99 on most; a teacher that is cut stays far below.
"""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of one text, on the student's side and on a teacher's."""

    student: int
    teacher: int


@dataclass(frozen=True, slots=True)
class Survey:
    num_texts: int
    """That were read; 0 where there is nothing to learn from yet, as the student is to sample it."""
    num_without_label: int
    """Of those, without any token to be learned."""
    is_complete: bool
    """The texts are all there are."""
    coverage: tuple[float | None, ...]
    """By active teacher: the share of the scored tokens that its KD says something about; None: not known."""
    widths: tuple[int, ...]
    """By active teacher: tokens of its longest sequence, as an estimate."""


def survey(config: RunConfig, data: Corpus | Prompts, student: Side, teachers: Sequence[Side], parts: Parts) -> Survey:
    """Raises DataError, with the row, for a text that cannot be used."""
    texts = spread(len(data.train))
    prompts = data.train.read(texts) if isinstance(data, Prompts) else []
    samples = list(responses(data, prompts) if isinstance(data, Prompts) else documents(data, texts))
    covered = merge(
        coverage_metrics(parts, batch_of(sample, config), config.active_names)
        for sample in tracked(samples, "looking at what the teachers cover", "texts")
    )
    names = [f"kd_coverage/{name}" for name in config.active_names]
    return Survey(
        num_texts=len(samples),
        num_without_label=sum(not sample.student.loss_mask.any() for sample in samples),
        is_complete=len(samples) == len(data.train),
        coverage=tuple(covered[name].value() if name in covered else None for name in names),
        widths=tuple(
            width(config, i, side, lengths_of(i, samples) if samples else lengths_of_prompts(prompts, student, side))
            for i, side in enumerate(teachers)
        ),
    )


def spread(number: int) -> list[int]:
    return list(range(0, number, ceil(number / NUM_TEXTS)))


def documents(data: Corpus, rows: Sequence[int]) -> Iterator[Sample]:
    for row in tracked(rows, "aligning some of the texts", "texts"):
        try:
            yield data.make_sample(read_documents(data.train, [row])[0])
        except (AlignmentError, DataError) as error:
            raise DataError(f"data.train: row {row} (counted from 0 over all files) cannot be used: {error}") from error


def responses(data: Prompts, prompts: Sequence[Prompt]) -> Iterator[Sample]:
    """The dataset's own, in place of what the student will sample."""
    for prompt in tracked(prompts, "aligning some of the prompts", "prompts"):
        if prompt.response is not None:
            yield data.sample_maker(data.from_dataset(prompt))


def batch_of(sample: Sample, config: RunConfig) -> Batch:
    """As if the student had sampled it, where it will."""
    batch = collate([sample])
    if config.rollout is None:
        return batch
    nothing = torch.zeros(batch.student.ids.shape)
    everything, first = torch.ones(1, dtype=torch.bool), torch.zeros(1)
    return replace(batch, sampled=SampledRows(everything, nothing, nothing, first, first.long()))


def lengths_of(teacher: int, samples: Sequence[Sample]) -> list[Lengths]:
    return [Lengths(len(sample.student), len(sample.teachers[teacher].tokens)) for sample in samples]


def lengths_of_prompts(prompts: Sequence[Prompt], student: Side, teacher: Side) -> list[Lengths]:
    """Of their texts, without what a template adds."""
    texts = (
        prompt.content if isinstance(prompt.content, str) else "\n".join(each["content"] for each in prompt.content)
        for prompt in prompts
    )
    return [Lengths(*(num_tokens(side.tokenizer, text) for side in (student, teacher))) for text in texts]


def width(config: RunConfig, i: int, side: Side, lengths: Sequence[Lengths]) -> int:
    """Extrapolate each text to `train.max_length` by the mean ratio of teacher to student tokens."""
    settings, whole = config.active_teachers[i], config.train.max_length
    if not isinstance(settings, CrossTokenizerTeacher):
        return whole
    rate = sum(each.teacher for each in lengths) / (sum(each.student for each in lengths) or 1) or 1.0
    widest = max((each.teacher + (whole - each.student) * rate for each in lengths), default=whole)
    return min(longest(settings, side), max(2, ceil(widest)))
