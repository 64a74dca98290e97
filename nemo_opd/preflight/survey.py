"""Statistics of a few training texts before a run: each teacher's coverage and sequence lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

import numpy as np
import torch

from nemo_opd.aggregation import TrainingObjective, coverage_metrics
from nemo_opd.config.loss import BytePrefixTerm, LossTerm
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import CrossTokenizerTeacher
from nemo_opd.data.collate import collate
from nemo_opd.data.context import PrivilegedPrompt, prompt_text
from nemo_opd.data.row_types import Prompt, read_documents
from nemo_opd.data.samples import Sample
from nemo_opd.errors import AlignmentError, DataError
from nemo_opd.logging.metrics import merge
from nemo_opd.losses.arguments import chunk_units
from nemo_opd.losses.logit_metrics import teacher_images
from nemo_opd.losses.position_units import compared_positions
from nemo_opd.preflight.corpus import Corpus, conversation_lengths
from nemo_opd.preflight.model_info import ModelInfo
from nemo_opd.preflight.teachers import require_stored
from nemo_opd.progress import tracked
from nemo_opd.projection import ProjectionMatrix
from nemo_opd.rollout.renderer import num_tokens
from nemo_opd.types import Batch, SampledRows

if TYPE_CHECKING:
    from nemo_opd.preflight.prompts import Prompts

GOOD_COVERAGE = 0.9
"""Coverage below which a warning is given.

Llama-3.1, Qwen3 and Gemma-3 reach at least 0.95 with each other on prose, code, numbers, CJK text and runs of white
space; a teacher with truncated texts stays far below.
"""
_GOOD_SHARE = 0.5
"""Share below which a loss is called unfit."""
_FIRST_POSITION_LOSSES = ("p_kl", "gold", "h_kl", "strict", "byte_prefix", "shared_prefix", "escd", "uld")
"""Compare the first token of each chunk. `alm` and `sampled_kl` compare all tokens of a chunk together."""
_NUM_TEXTS = 64
"""Number of texts, at equal distances over the training data."""
_TEXTS_PER_DOMAIN = 8
_WINDOWS = 4
"""Windows that are looked at of a text that is packed in several."""


@dataclass(frozen=True, slots=True)
class DataStatistics:
    """Statistics of a few training texts."""

    num_texts: int
    """Number of texts; 0 if the student samples them all."""
    rows_without_label: tuple[int, ...]
    """Rows of texts without a token to learn."""
    num_full: int
    """Number of texts as long as `train.max_length`, which most likely were cut; 0 with packing, which cuts none."""
    whole_lengths: tuple[int, ...]
    """Tokens of the conversations without the cut; empty for texts, and if no conversation is cut."""
    is_complete: bool
    """Whether these are all texts."""
    coverage: tuple[float | None, ...]
    """Share of the scored tokens with KD from each active teacher; None if unknown."""
    widths: tuple[int, ...]
    """Estimated tokens of each active teacher's longest sequence."""
    targets: tuple[TargetShares | None, ...]
    """Tokens that each active teacher's loss can compare; None with the student's tokenizer or without texts."""
    tokens_per_byte: tuple[float, ...]
    """Tokens per byte of text, for the student and each active teacher; 0 if unknown."""


def survey(
    config: RunConfig,
    data: Corpus | Prompts,
    student: ModelInfo,
    teachers: Sequence[ModelInfo],
    objective: TrainingObjective,
    projections: Sequence[ProjectionMatrix | None],
) -> DataStatistics:
    """Survey the data. projections: one per active teacher, None for a teacher with the student's tokenizer.

    Raises DataError, with the row, for a text that cannot be used or that a cache lacks.
    """
    rows = sampled_rows(len(data.train))
    prompts = [] if isinstance(data, Corpus) else data.train.read(rows)
    texts = list(_documents(data, rows) if isinstance(data, Corpus) else _responses(data, prompts))
    read_rows: Sequence[int] = rows
    if prompts:
        read_rows = [prompt.index for prompt in prompts if prompt.response is not None]
    samples = [sample for text in texts for sample in text]
    require_stored(config, samples)
    batches = [_batch_of(sample, config) for sample in samples]
    covered = merge(
        coverage_metrics(objective, batch, config.active_names)
        for batch in tracked(batches, "looking at what the teachers cover", "texts")
    )
    validation_batches = _domain_batches(config, data) if any(matrix is not None for matrix in projections) else {}
    if samples:
        lengths = [len(sample.student) for sample in samples]
        by_teacher = [[len(sample.teachers[i].tokens) for sample in samples] for i in range(len(teachers))]
    else:
        prompt_texts = [prompt_text(prompt.content) for prompt in prompts]
        lengths, *by_teacher = (
            [num_tokens(info.tokenizer, text) for text in prompt_texts] for info in (student, *teachers)
        )
    ratios = [_token_ratio(i, samples, teacher_lengths, lengths) for i, teacher_lengths in enumerate(by_teacher)]
    if not isinstance(data, Corpus) and not samples:
        by_teacher = [
            [
                length + _added_by_context(reader, teachers[i], prompt)
                for length, prompt in zip(teacher_lengths, prompts, strict=True)
            ]
            for i, (teacher_lengths, reader) in enumerate(zip(by_teacher, data.sample_maker.teachers, strict=True))
        ]
    names = [f"kd_coverage/{name}" for name in config.active_names]
    max_length = config.train.max_length
    num_full = 0 if config.packs_documents else sum(len(sample.student) >= max_length for sample in samples)
    whole_lengths: tuple[int, ...] = ()
    if num_full and config.data.is_chat and isinstance(data, Corpus):
        whole_lengths = conversation_lengths(config, data, student, rows)
    return DataStatistics(
        num_texts=len(texts),
        rows_without_label=tuple(
            row
            for row, text in zip(read_rows, texts, strict=True)
            if not any(sample.student.loss_mask.any() for sample in text)
        ),
        num_full=num_full,
        whole_lengths=whole_lengths if any(length > max_length for length in whole_lengths) else (),
        is_complete=len(texts) == len(data.train),
        coverage=tuple(covered[name].value() if name in covered else None for name in names),
        targets=tuple(
            None if matrix is None else TargetShares.of(batches, i, matrix, validation_batches, config.term(i).type)
            for i, matrix in enumerate(projections)
        ),
        tokens_per_byte=_tokens_per_byte(samples, len(teachers)),
        widths=tuple(
            _longest_sequence(config, i, teachers[i], teacher_lengths, lengths, ratios[i])
            for i, teacher_lengths in enumerate(by_teacher)
        ),
    )


def sampled_rows(number: int, most: int = _NUM_TEXTS) -> range:
    """Return at most `most` of `number` rows, at equal distances."""
    return range(0, number, max(1, ceil(number / most)))


def _documents(data: Corpus, rows: Sequence[int]) -> Iterator[Sequence[Sample]]:
    """Yield the samples of each text: one, or the first windows of a packed document."""
    for row in tracked(rows, "aligning some of the texts", "texts"):
        document = read_documents(data.train, [row])[0]
        with _naming_row("data.train", row):
            make_windows = data.make_windows
            samples = [data.make_sample(document)] if make_windows is None else make_windows(document)[:_WINDOWS]
        yield samples


@contextmanager
def _naming_row(key: str, row: int) -> Iterator[None]:
    """Raise DataError with the row for a text that cannot be used."""
    try:
        yield
    except (AlignmentError, DataError) as error:
        raise DataError(f"{key}: row {row} (counted from 0 over all files) cannot be used: {error}") from error


def _domain_batches(config: RunConfig, data: Corpus | Prompts) -> dict[str, list[Batch]]:
    """Return batches of some validation documents by their domain."""
    if not isinstance(data, Corpus) or data.validation is None or data.domains is None:
        return {}
    batches: dict[str, list[Batch]] = {name: [] for name in data.domains.names}
    for number, name in enumerate(data.domains.names):
        rows = np.flatnonzero(data.domains.numbers.numpy() == number)
        for row in rows[list(sampled_rows(len(rows), _TEXTS_PER_DOMAIN))].tolist():
            document = read_documents(data.validation, [row])[0]
            with _naming_row("data.validation", row):
                batches[name].append(_batch_of(data.make_validation_sample(document), config))
    return batches


def _responses(data: Prompts, prompts: Sequence[Prompt]) -> Iterator[Sequence[Sample]]:
    """Yield the samples of the dataset's responses, which stand for the student's."""
    for prompt in tracked(prompts, "aligning some of the prompts", "prompts"):
        if prompt.response is not None:
            yield [data.sample_maker(data.from_dataset(prompt))]


def _batch_of(sample: Sample, config: RunConfig) -> Batch:
    """Return a batch of one sample, marked as sampled if the run samples."""
    batch = collate([sample])
    if config.rollout is None:
        return batch
    logprobs, advantage = torch.zeros(batch.student.ids.shape), torch.zeros(1)
    is_sampled, prompt = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.long)
    return replace(batch, sampled=SampledRows(is_sampled, logprobs, logprobs, advantage, prompt))


def _added_by_context(reader: object, teacher: ModelInfo, prompt: Prompt) -> int:
    """Return the tokens of the teacher's prompt in excess of the student's."""
    if not isinstance(reader, PrivilegedPrompt):
        return 0
    contents = prompt.content, reader.context.content(prompt.content, prompt.fields)
    without, with_context = (num_tokens(teacher.tokenizer, prompt_text(content)) for content in contents)
    return with_context - without


def _tokens_per_byte(samples: Sequence[Sample], num_teachers: int) -> tuple[float, ...]:
    """Return the tokens per byte that the student and each teacher read; 0 if they read no byte."""
    sides = [[sample.student for sample in samples]]
    sides += [[sample.teachers[i].tokens for sample in samples] for i in range(num_teachers)]
    sizes = [(sum(map(len, side)), sum(int(tokens.num_bytes.sum()) for tokens in side)) for side in sides]
    return tuple(tokens / num_bytes if num_bytes else 0.0 for tokens, num_bytes in sizes)


def _token_ratio(
    i: int, samples: Sequence[Sample], teacher_lengths: Sequence[int], student_lengths: Sequence[int]
) -> float:
    """Return the teacher's tokens per token of the student; with a context, only learned tokens count."""
    sides = [(sample.teachers[i].tokens, sample.student) for sample in samples]
    if sides and samples[0].teachers[i].leakage is not None:
        teacher, student = (sum(int(tokens.loss_mask.sum()) for tokens in side) for side in zip(*sides, strict=True))
    else:
        teacher, student = sum(teacher_lengths), sum(student_lengths)
    return teacher / (student or 1) or 1.0


def _longest_sequence(
    config: RunConfig,
    i: int,
    teacher: ModelInfo,
    teacher_lengths: Sequence[int],
    student_lengths: Sequence[int],
    ratio: float,
) -> int:
    """Estimate the tokens of a teacher's longest sequence.

    Extrapolates each text to `train.max_length` by a ratio of teacher to student tokens.
    """
    settings, max_length = config.active_teachers[i], config.train.max_length
    if not isinstance(settings, CrossTokenizerTeacher):
        if settings.context is None:
            return max_length
        ratio = 1.0
    pairs = zip(teacher_lengths, student_lengths, strict=True)
    longest = max((length + (max_length - student) * ratio for length, student in pairs), default=max_length)
    return min(teacher.longest_text(settings), max(2, ceil(longest)))


@dataclass(frozen=True, slots=True)
class TargetShares:
    """Shares for one teacher with another tokenizer."""

    starts: float
    """Share of the student's aligned tokens that begin a chunk."""
    every: float | None
    """Share that `byte_prefix` compares with positions=all; None for a projection without pieces."""
    kinds: Mapping[str, float]
    """Share of the chunks by their numbers of student and teacher tokens: 1:1, 1:n, n:1, n:m."""
    images: Mapping[str, float]
    """Share of the teacher's tokens in these texts that have an image, under the loss and `byte_prefix`."""
    domains: Mapping[str, tuple[float, float | None]]
    """`starts` and `every` of the validation texts of a domain."""

    @staticmethod
    def of(
        batches: Sequence[Batch],
        teacher: int,
        projection: ProjectionMatrix,
        domains: Mapping[str, Sequence[Batch]],
        loss: str,
    ) -> TargetShares | None:
        """Measure them; None for texts without aligned chunks. domains: batches of validation texts; loss: its type."""
        kinds: Counter[str] = Counter()
        ids = []
        for batch in batches:
            rows = batch.teachers[teacher]
            assert rows.chunks is not None
            units = chunk_units(rows.chunks.student, rows.chunks.teacher)
            kinds.update(map(_kind, units.student_lengths.tolist(), units.teacher_lengths.tolist()))
            ids.append(rows.tokens.ids[rows.chunks.teacher >= 0].numpy())
        num_chunks = kinds.total()
        if not num_chunks:
            return None
        realised = np.concatenate(ids)
        images = {name: teacher_images(name, projection) for name in (loss, "byte_prefix")}
        return TargetShares(
            *_position_shares(batches, teacher, projection),
            {kind: number / num_chunks for kind, number in kinds.most_common()},
            {name: float(image[realised].mean()) for name, image in images.items() if image is not None},
            {name: _position_shares(some, teacher, projection) for name, some in domains.items()},
        )

    def warnings(self, term: LossTerm) -> list[str]:
        """Say why the loss of a term compares too little, with one that compares more."""
        has_all = isinstance(term, BytePrefixTerm) and term.positions == "all"
        other = f"; write loss.type=byte_prefix with loss.positions=all, which compares {self.every or 0:.0%}"
        sentences = []
        if term.type in _FIRST_POSITION_LOSSES and not has_all and self.starts < _GOOD_SHARE:
            sentences.append(
                f"{term.type} compares the first token of each chunk, {self.starts:.0%} of the student's aligned tokens"
                + other * (self.every is not None and self.every > self.starts)
            )
        image, best = self.images.get(term.type, 1.0), self.images.get("byte_prefix", 0.0)
        if image < _GOOD_SHARE:
            sentences.append(
                f"{term.type} has an image of {image:.0%} of the teacher's tokens"
                + f"; write loss.type=byte_prefix, which has one of {best:.0%}" * (best > image)
            )
        return sentences

    def lines(self) -> dict[str, str]:
        """Return rows of a table: label and value."""
        parts = [f"{kind} {share:.0%}" for kind, share in self.kinds.items()]
        rows = {"aligned tokens with a target": _share_text(self.starts, self.every), "chunks": ", ".join(parts)}
        for name, shares in self.domains.items():
            rows[f"aligned tokens with a target, {name}"] = _share_text(*shares)
        return rows


def _share_text(starts: float, every: float | None) -> str:
    return f"{starts:.0%} at starts of chunks" + ("" if every is None else f", {every:.0%} with positions=all")


def _kind(m: int, n: int) -> str:
    """Return the kind of a chunk of m student and n teacher tokens."""
    if m > 1 and n > 1:
        return "n:m"
    return "n:1" if m > 1 else "1:n" if n > 1 else "1:1"


def _position_shares(
    batches: Sequence[Batch], teacher: int, projection: ProjectionMatrix
) -> tuple[float, float | None]:
    """Return `starts` and `every` of texts."""
    has_pieces = projection.teacher_spellings is not None and projection.teacher_bytes is not None
    aligned = starts = every = 0
    for batch in batches:
        rows = batch.teachers[teacher]
        assert rows.chunks is not None
        units = chunk_units(rows.chunks.student, rows.chunks.teacher)
        starts += len(units)
        aligned += int(units.student_lengths.sum())
        if has_pieces:
            ids, chunks = (batch.student.ids, rows.tokens.ids), (rows.chunks.student, rows.chunks.teacher)
            every += int(compared_positions(*ids, *chunks, projection, "spelling").sum())
    aligned = max(1, aligned)
    return starts / aligned, every / aligned if has_pieces else None
