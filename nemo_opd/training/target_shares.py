"""Shares of the student's tokens and of the teacher's tokens that losses across tokenizers can compare in a few texts.

Measured before a run: a loss teaches nothing about the rest, whatever the vocabularies have in common.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_opd.config.loss import BytePrefixTerm, LossTerm
from nemo_opd.losses.position_units import count_positions
from nemo_opd.losses.reduction import chunk_units
from nemo_opd.losses.teacher_images import teacher_images
from nemo_opd.projection import ProjectionMatrix
from nemo_opd.types import Batch

_GOOD_SHARE = 0.5
"""Share below which a loss is called unfit."""
_FIRST_POSITION_LOSSES = ("p_kl", "gold", "h_kl", "strict", "byte_prefix", "shared_prefix", "uld")
"""Compare the first token of each chunk. `alm` and `sampled_kl` compare all tokens of a chunk together."""


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
            *_positions(batches, teacher, projection),
            {kind: number / num_chunks for kind, number in kinds.most_common()},
            {name: float(image[realised].mean()) for name, image in images.items() if image is not None},
            {name: _positions(some, teacher, projection) for name, some in domains.items()},
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
        rows = {"aligned tokens with a target": _shares(self.starts, self.every), "chunks": ", ".join(parts)}
        for name, shares in self.domains.items():
            rows[f"aligned tokens with a target, {name}"] = _shares(*shares)
        return rows


def _shares(starts: float, every: float | None) -> str:
    return f"{starts:.0%} at starts of chunks" + ("" if every is None else f", {every:.0%} with positions=all")


def _kind(m: int, n: int) -> str:
    """Return the kind of a chunk of m student and n teacher tokens."""
    if m > 1 and n > 1:
        return "n:m"
    return "n:1" if m > 1 else "1:n" if n > 1 else "1:1"


def _positions(batches: Sequence[Batch], teacher: int, projection: ProjectionMatrix) -> tuple[float, float | None]:
    """Return `starts` and `every` of texts."""
    has_pieces = projection.teacher_spellings is not None
    aligned = starts = every = 0
    for batch in batches:
        rows = batch.teachers[teacher]
        assert rows.chunks is not None
        units = chunk_units(rows.chunks.student, rows.chunks.teacher)
        starts += len(units)
        aligned += int(units.student_lengths.sum())
        if has_pieces:
            ids, chunks = (batch.student.ids, rows.tokens.ids), (rows.chunks.student, rows.chunks.teacher)
            every += int(count_positions(*ids, *chunks, projection, "spelling").sum())
    aligned = max(1, aligned)
    return starts / aligned, every / aligned if has_pieces else None
