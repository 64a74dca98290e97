"""Teacher by first pieces, and completion of the tokens that the student has begun (methods.md §5.13)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch
from torch import Tensor

from nemo_opd.distributed.transfer import compute_on_host, to_device_batched
from nemo_opd.errors import ConfigError, ProjectionError
from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.term import Term, unit_cells
from nemo_opd.losses.arguments import next_tokens, over
from nemo_opd.losses.cells import CommonCells, common_cells_term
from nemo_opd.losses.chunk_loss import (
    ChunkArguments,
    ChunkInputs,
    ChunkPositions,
    offsets_of,
    places_of_runs,
    segments_log_sum_exp,
)
from nemo_opd.losses.divergence import Divergence
from nemo_opd.losses.piece_tree import token_bytes
from nemo_opd.losses.prefixes import ADD_MAPS
from nemo_opd.losses.sparse_projection import cached_while_alive
from nemo_opd.losses.support import split

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

_COPIES_OF_STUDENT, _COPIES_OF_TEACHER, _COPIES_PER_TOKEN = 4, 3, 8
"""fp32 numbers at the memory peak of a block, per column of a row or per token of a set."""


@Loss
def escd(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    projection: ProjectionMatrix,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    mixed_weight: float = 0.5,
    completion_weight: float = 1.0,
    **shared: Unpack[ChunkArguments],
) -> PlannedLoss:
    """Compute τ² · Σ [divergence(u, p) − completion_weight · Σ_g M_g log P_g] / normalizer over chunks, and `kd`.

    u(v) = Σ q over the teacher tokens whose longest prefix among the student's tokens is v, with a rest cell if both
    sides have other tokens. g runs over groups of teacher tokens without an equal student token whose common beginning
    goes on after the chunk's first student token. M_g is the group's probability before the chunk, P_g the student's
    probability, after that token, of the tokens that complete the beginning (methods.md §5.13). Its minimum is not 0.

    Raises ConfigError for shapes, sizes or names that do not fit, ProjectionError for a projection without the map or
    the bytes of tokens.
    """
    if not completion_weight >= 0:
        raise ConfigError(f"completion_weight={completion_weight} would unlearn completions; give 0 or more")
    inputs = ChunkInputs.of(student_logits, teacher_logits, temperature=temperature, projection=projection, **shared)
    if projection.byte_prefix is None:
        raise ProjectionError(f"escd needs the map byte_prefix, {ADD_MAPS}")
    cells = CommonCells.of_prefixes(projection.byte_prefix, inputs.student_size, inputs.teacher_size, inputs.device)
    terms = [common_cells_term(inputs, cells, Divergence(divergence, beta, mixed_weight))]
    if completion_weight:
        units = CompletionUnits.of(inputs, projection, shared["student_chunk_id"])
        terms.append(_completion_term(inputs, units).times(completion_weight * temperature**2))
    return inputs.planned(terms)


def _completion_term(inputs: ChunkInputs, completions: CompletionUnits) -> Term:
    """Build −Σ M log P at the position after each chunk's first student token.

    Its units are all chunks, also those without completions, so that it shares the teacher's rows with the first term.
    """
    temperature, rows = inputs.temperature, inputs.units.student_rows
    ahead = inputs.teacher_ahead(inputs.units.teacher_rows)

    def loss_of(student: Tensor, part: slice) -> Tensor:
        teacher = over(ahead.of(part).to(inputs.dtype), temperature)
        log_q = split(teacher)[0] if inputs.is_truncated else teacher.log_softmax(1)
        return completions.surprise(over(student, temperature).log_softmax(1), log_q, part)

    cells = unit_cells(
        len(inputs.units),
        _COPIES_OF_STUDENT * inputs.student_size + _COPIES_OF_TEACHER * inputs.teacher_size,
        (completions.unit_offsets(completions.member_offsets), _COPIES_PER_TOKEN),
        (completions.unit_offsets(completions.completion_offsets), _COPIES_PER_TOKEN),
    )
    (following,) = compute_on_host(lambda rows: [rows + 1], rows)
    return replace(inputs.term(following, loss_of, cells, ahead=ahead), recorded_at=following)


@dataclass(frozen=True, slots=True)
class CompletionSets:
    """Groups of teacher tokens without an equal student token, and the student tokens that complete each group.

    A group is all such tokens that begin with the group's shortest one, its representative. Pair i is a group and a
    student token whose bytes begin the representative's; the pair's completions are the student tokens that begin with
    the remaining bytes of the representative. Pairs without completions are left out.
    """

    first_pair: Tensor
    """int64 [V]: first pair of each student token."""
    num_pairs: Tensor
    """int64 [V]: number of pairs of each student token; they are consecutive."""
    teacher_tokens: Tensor
    """int64 [X]: the tokens of all groups, group by group."""
    member_begin: Tensor
    """int64 [P]: index of the first token of a pair's group in `teacher_tokens`."""
    num_members: Tensor
    """int64 [P]"""
    student_tokens: Tensor
    """int64 [Y]: student tokens with text, in byte order."""
    completion_begin: Tensor
    """int64 [P]: index of a pair's first completion in `student_tokens`."""
    num_completions: Tensor
    """int64 [P]"""

    @staticmethod
    @cached_while_alive
    def of(
        projection: ProjectionMatrix, student_vocab_size: int, teacher_vocab_size: int, device: torch.device
    ) -> CompletionSets:
        """Find the sets within the given vocabulary sizes; cached while the projection lives.

        Raises ProjectionError for a projection without the bytes of tokens.
        """
        texts = token_bytes(projection, student_vocab_size, teacher_vocab_size)
        tensors = [torch.from_numpy(np.array(values, np.int64)) for values in _sets(*texts)]
        return CompletionSets(*to_device_batched(tensors, device))


def _sets(student: Sequence[bytes], teacher: Sequence[bytes]) -> list[Sequence[int]]:
    """Return the fields of `CompletionSets` from the bytes of tokens, empty for tokens without text."""
    ordered = sorted((text, token) for token, text in enumerate(student) if text)
    texts = [text for text, _ in ordered]
    members = sorted((text, token) for token, text in enumerate(teacher) if text)
    known = set(texts)
    members = [(text, token) for text, token in members if text not in known]
    beyond = b"\xff" * (1 + max(map(len, texts), default=0))
    pairs_of: dict[bytes, list[tuple[int, int, int, int]]] = {}
    for representative, begin, end in _groups([text for text, _ in members]):
        for length in range(1, len(representative)):
            begun, rest = representative[:length], representative[length:]
            if begun in known:
                first, stop = bisect_left(texts, rest), bisect_left(texts, rest + beyond)
                if first < stop:
                    pairs_of.setdefault(begun, []).append((begin, end - begin, first, stop - first))
    pairs = [pair for of_text in pairs_of.values() for pair in of_text]
    numbers = [len(of_text) for of_text in pairs_of.values()]
    firsts = dict(zip(pairs_of, accumulate(numbers, initial=0), strict=False))
    first_pair = [firsts.get(text, 0) for text in student]
    num_pairs = [len(pairs_of.get(text, ())) for text in student]
    member_begin, num_members, completion_begin, num_completions = zip(*pairs, strict=True) if pairs else ((),) * 4
    teacher_tokens, student_tokens = ([token for _, token in side] for side in (members, ordered))
    groups = (teacher_tokens, member_begin, num_members)
    return [first_pair, num_pairs, *groups, student_tokens, completion_begin, num_completions]


def _groups(texts: Sequence[bytes]) -> Iterator[tuple[bytes, int, int]]:
    """Yield the first text of each group of sorted texts that begin with it, and the group's begin and end."""
    begin = 0
    for end in range(1, len(texts) + 1):
        if end == len(texts) or not texts[end].startswith(texts[begin]):
            yield texts[begin], begin, end
            begin = end


@dataclass(frozen=True, slots=True)
class CompletionUnits:
    """The pairs that each chunk's first student token has with groups of teacher tokens."""

    sets: CompletionSets
    pairs: ChunkPositions
    """[R], grouped by chunk; `rows` are pairs of the sets."""
    member_offsets: Sequence[int]
    """[R + 1]: each pair's first teacher token among the teacher tokens of all pairs; on the host."""
    completion_offsets: Sequence[int]
    """[R + 1]: the same for student tokens."""

    @staticmethod
    def of(inputs: ChunkInputs, projection: ProjectionMatrix, student_chunk_id: Tensor) -> CompletionUnits:
        """Find the pairs. Chunks whose second position predicts no token in a chunk have none."""
        width, sizes = inputs.student_ids.shape[1], (inputs.student_size, inputs.teacher_size)

        def pairs(rows: Tensor, ids: Tensor, chunk_id: Tensor) -> list[Tensor]:
            sets = CompletionSets.of(projection, *sizes, rows.device)
            token, following = next_tokens(ids, rows).long(), (rows + 2).clamp(max=ids.numel() - 1)
            has_next = ((rows + 2) % width > 0) & (chunk_id.flatten()[following] >= 0)
            units = ChunkPositions.of(sets.first_pair[token], sets.num_pairs[token] * has_next)
            return [*units.tensors, sets.num_members[units.rows], sets.num_completions[units.rows]]

        tensors = compute_on_host(pairs, inputs.units.student_rows, inputs.student_ids, student_chunk_id)
        sets = CompletionSets.of(projection, *sizes, inputs.device)
        return CompletionUnits(sets, ChunkPositions.sent(*tensors[:3]), *map(offsets_of, tensors[3:]))

    def unit_offsets(self, token_offsets: Sequence[int]) -> list[int]:
        """Return each chunk's first token among the tokens of all pairs, [U + 1]."""
        return [token_offsets[begin] for begin in self.pairs.offsets]

    def surprise(self, log_p: Tensor, log_q: Tensor, part: slice) -> Tensor:
        """Compute −Σ M log P over the pairs of each of a part's chunks: log-probabilities [u, V] and [u, W] → [u].

        M is the teacher's mass of the group, P the student's mass of the completions.
        """
        span = self.pairs.span(part)
        pair, sets = self.pairs.rows[span], self.sets
        unit = self.pairs.repeated(torch.arange(part.stop - part.start, device=log_p.device), part)
        groups = sets.teacher_tokens, sets.member_begin[pair], sets.num_members[pair]
        completions = sets.student_tokens, sets.completion_begin[pair], sets.num_completions[pair]
        num_members, num_completions = (
            offsets[span.stop] - offsets[span.start] for offsets in (self.member_offsets, self.completion_offsets)
        )
        mass = _log_masses(log_q, unit, *groups, num_members).exp()
        log_completed = _log_masses(log_p, unit, *completions, num_completions)
        return -self.pairs.sum(mass * log_completed, part)


def _log_masses(log_p: Tensor, unit: Tensor, tokens: Tensor, begin: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
    """Sum the probabilities of r runs of consecutive `tokens` [X], each in its unit's row: [u, V] → logs [r].

    unit, begin, lengths: int64 [r]. num_tokens: the sum of the lengths.
    """
    run, place = places_of_runs(begin, lengths, num_tokens)
    return segments_log_sum_exp(log_p[unit[run], tokens[place]].unsqueeze(1), lengths).squeeze(1)
