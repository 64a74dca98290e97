"""Alignment of student and teacher ids that stand for one text, and comparison of what both sides have read before
(methods.md §1).
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, AnyStr

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nemo_opd.alignment.pieces import META_SPACE, Pieces, pieces_of
from nemo_opd.alignment.roles import pair_special_tokens
from nemo_opd.alignment.spelling import TEXT, PieceTable, Spelling
from nemo_opd.alignment.token_roles import RoleOverrides
from nemo_opd.errors import AlignmentError
from nemo_opd.types import HISTORY_CHANGED, HISTORY_REWRITTEN, HISTORY_SAME, Alignment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VERSION = 3
"""Increment when the same ids are aligned differently."""


class TokenAligner:
    """An aligner for one pair of tokenizers. Holds only arrays: cheap to pickle, safe to share between threads."""

    def __init__(
        self,
        student_tokenizer: PreTrainedTokenizerBase,
        teacher_tokenizer: PreTrainedTokenizerBase,
        *,
        roles: RoleOverrides | None = None,
    ) -> None:
        """Prepare two tokenizers. roles: content → role or roles, added to or replacing roles of special tokens.

        Raises AlignmentError for a tokenizer whose pieces cannot be exact.
        """
        self.student_pieces = pieces_of(student_tokenizer)
        self.teacher_pieces = pieces_of(teacher_tokenizer)
        self._special = pair_special_tokens(
            student_tokenizer, teacher_tokenizer, self.student_pieces, self.teacher_pieces, roles
        )
        self._make_tables()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines an alignment: both tokenizers, the roles, the version of the method."""
        digest = hashlib.sha256(
            f"{_VERSION} {self.student_pieces.fingerprint} {self.teacher_pieces.fingerprint}".encode()
        )
        for array in (self._special.student_class, self._special.teacher_class, self._special.matches):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def align(
        self, student_ids: Sequence[int] | NDArray[np.integer], teacher_ids: Sequence[int] | NDArray[np.integer]
    ) -> Alignment:
        """Align two 1-D id sequences without padding, canonical or not. O(S + T).

        Raises AlignmentError for ids that are not a 1-D sequence of integers inside the vocabulary.
        """
        from nemo_opd.alignment.merge import merge  # imports Numba, which takes half a second
        from nemo_opd.alignment.resync import equal_runs

        student, teacher = self.student_spelling(student_ids), self.teacher_spelling(teacher_ids)
        runs = equal_runs(student.data, teacher.data)
        chunks = merge(student, teacher, runs, self._matches)
        histories = _run_histories(
            _read_text(student_ids, student, self.student_pieces, chunks.student_chunk_id),
            _read_text(teacher_ids, teacher, self.teacher_pieces, chunks.teacher_chunk_id),
            runs,
        )
        history = _chunk_histories(chunks.bounds, (student.edges, teacher.edges), runs, histories)
        return Alignment(**chunks._asdict(), history=history)

    def student_spelling(self, ids: Sequence[int] | NDArray[np.integer]) -> Spelling:
        """Return the bytes of student ids. Raises AlignmentError as `align` does."""
        return _spell(_valid_ids(ids, "student", self.student_pieces), self._student_table)

    def teacher_spelling(self, ids: Sequence[int] | NDArray[np.integer]) -> Spelling:
        """Return the bytes of teacher ids. Raises AlignmentError as `align` does."""
        return _spell(_valid_ids(ids, "teacher", self.teacher_pieces), self._teacher_table)

    def _make_tables(self) -> None:
        special = self._special
        self._student_table = _table(special.student_class, self.student_pieces)
        self._teacher_table = _table(special.teacher_class, self.teacher_pieces)
        self._matches = _for_kernel(special.matches)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("student_pieces", "teacher_pieces", "_special")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_tables()


def _spell(ids: NDArray[np.int64], table: PieceTable) -> Spelling:
    from nemo_opd.alignment.merge import spell  # imports Numba

    spelling: Spelling = spell(ids, table)
    return spelling


def _table(classes: NDArray[np.int32], pieces: Pieces) -> PieceTable:
    return PieceTable(_for_kernel(classes), _for_kernel(pieces.offsets), _for_kernel(pieces.buffer))


def _for_kernel(array: NDArray[Any]) -> NDArray[Any]:
    """Return a writable array: Numba recompiles for read-only ones, from Ray's store or a mapped file."""
    return np.require(array, requirements=["C", "W"])


def _valid_ids(ids: ArrayLike, side: str, pieces: Pieces) -> NDArray[np.int64]:
    """Check ids and return them writable and contiguous, as the kernels are compiled for."""
    array = np.asarray(ids)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise AlignmentError(
            f"{side}_ids must be a 1-D sequence of integers, not {array.dtype} of shape {array.shape}; "
            "align one sequence at a time, without padding"
        )
    if array.size and (array.min() < 0 or array.max() >= pieces.vocab_size):
        position = int(np.flatnonzero((array < 0) | (array >= pieces.vocab_size))[0])
        raise AlignmentError(
            f"{side}_ids[{position}] is {array[position]}, outside the vocabulary of size {pieces.vocab_size}; "
            f"were these ids made by the {side}'s tokenizer?"
        )
    return np.require(array, np.int64, ["C", "W"])


def _read_text(ids: ArrayLike, spelling: Spelling, pieces: Pieces, chunk_id: NDArray[np.int32]) -> _ReadText:
    special = np.flatnonzero(spelling.classes != TEXT)
    contents = [pieces.content_of(token) for token in np.asarray(ids)[special].tolist()]
    is_outside = (chunk_id[special] >= 0) | (special == 0)
    return _ReadText(spelling.data.tobytes(), spelling.edges[special], contents, is_outside.tolist())


@dataclass(frozen=True, slots=True)
class _ReadText:
    """Text that one side has read, and the special tokens in it."""

    data: bytes
    """Without special tokens."""
    places: NDArray[np.int64]
    """[N]: bytes of `data` before each special token; non-decreasing."""
    contents: Sequence[bytes]
    """[N]: bytes of the text that spells each special token."""
    is_outside: Sequence[bool]
    """[N]: whether the special token begins the sequence, or is aligned with one of the other side."""

    def spellings(self, start: int, stop: int) -> set[str]:
        """Return the plain texts of data[start:stop] without special tokens, with those that are not outside, and with
        all.

        Special tokens at either end are included.
        """
        first, last = np.searchsorted(self.places, start, "left"), np.searchsorted(self.places, stop, "right")
        without, inside, full = bytearray(), bytearray(), bytearray()
        at = start
        for n in range(first, last):
            for text in (without, inside, full):
                text += self.data[at : self.places[n]]
            at = int(self.places[n])
            full += self.contents[n]
            if not self.is_outside[n]:
                inside += self.contents[n]
        return {_plain_text(bytes(text) + self.data[at:stop]) for text in (without, inside, full)}


def _run_histories(student: _ReadText, teacher: _ReadText, runs: NDArray[np.int64]) -> NDArray[np.int8]:
    """Classify what both sides have read before each run of equal bytes from `equal_runs`: [R].

    HISTORY_REWRITTEN if the regions between runs agree up to white space, Unicode form, and special tokens that one
    side has read as such and the other letter by letter.
    """
    histories = np.full(len(runs), HISTORY_SAME, np.int8)
    if len(runs) > 1:
        histories[1:] = HISTORY_REWRITTEN
        changed = _first_changed(student, teacher, runs)
        histories[changed:] = HISTORY_CHANGED
    return histories


def _first_changed(student: _ReadText, teacher: _ReadText, runs: NDArray[np.int64]) -> int:
    """Return the first run after a region of different text, or the number of runs."""
    if _plain_text(student.data) == _plain_text(teacher.data):
        return len(runs)
    for r, ((a, b, length), (a_next, b_next, _)) in enumerate(zip(runs[:-1].tolist(), runs[1:].tolist(), strict=True)):
        a_start, b_start = a + length, b + length
        # Only the first run may end inside a character.
        while _continues(student.data, a_start) or _continues(teacher.data, b_start):
            a_start, b_start = a_start - 1, b_start - 1
        if student.spellings(a_start, a_next).isdisjoint(teacher.spellings(b_start, b_next)):
            return r + 1
    return len(runs)


def _continues(data: bytes, at: int) -> bool:
    """Return whether the byte at `at` continues a UTF-8 character."""
    return 0 < at < len(data) and data[at] & 0xC0 == 0x80


def _chunk_histories(
    bounds: NDArray[np.int32], edges: Sequence[NDArray[np.int64]], runs: NDArray[np.int64], histories: NDArray[np.int8]
) -> NDArray[np.int8]:
    """Return the history of each chunk [C], which is its run's.

    edges: byte edges of the student's tokens and of the teacher's.
    """
    if len(runs) == 1:
        return np.zeros(len(bounds), np.int8)
    starts = (edges[0][bounds[:, 0]], edges[1][bounds[:, 2]])
    run = np.minimum(*(np.searchsorted(runs[:, side], starts[side], "right") - 1 for side in (0, 1)))
    return histories[np.maximum(run, 0)]


def content_history(student: bytes, teacher: bytes, texts: Sequence[str]) -> int:
    """Compare two sides' renderings of a message with these texts.

    HISTORY_SAME: equal bytes, or all texts unchanged on both sides, each in its own place, among different marks of the
    templates. HISTORY_REWRITTEN: the same up to white space and Unicode form, or both sides omit the same. Otherwise,
    HISTORY_CHANGED.
    """
    if student == teacher:
        return HISTORY_SAME
    spelled = [(text.encode(),) for text in texts]
    if texts and all(_holds_all(side, spelled) for side in (student, teacher)):
        return HISTORY_SAME
    ours, theirs = _plain_text(student), _plain_text(teacher)
    plain = [_plain_forms(text) for text in texts]
    all_ours, all_theirs = (bool(texts) and _holds_all(side, plain) for side in (ours, theirs))
    leaves_out_the_same = not (all_ours or all_theirs) and ours and theirs and (ours in theirs or theirs in ours)
    if ours == theirs or (all_ours and all_theirs) or leaves_out_the_same:
        return HISTORY_REWRITTEN
    return HISTORY_CHANGED


def _holds_all(rendering: AnyStr, texts: Sequence[tuple[AnyStr, ...]]) -> bool:
    """Return whether a rendering contains each text, in one of its forms and in its own place.

    An answer that repeats a thought does not count as the thought. The longest texts are matched first.
    """
    parts = [rendering]
    for forms in sorted(texts, key=lambda forms: len(forms[0]), reverse=True):
        match = next(((i, form) for form in forms for i, part in enumerate(parts) if form in part), None)
        if match is None:
            return False
        i, form = match
        start = parts[i].index(form)
        parts[i : i + 1] = parts[i][:start], parts[i][start + len(form) :]
    return True


def _plain_forms(text: str) -> tuple[str, ...]:
    """Return a text's plain form, and that of its JSON string, since templates may quote tools' results."""
    return _plain_text(text.encode()), _plain_text(json.dumps(text, ensure_ascii=False)[1:-1].encode())


def _plain_text(data: bytes) -> str:
    """Return the text without white space, in Unicode's form for equivalent characters (NFKC).

    `▁` counts as white space: SentencePiece tokenizers write a space as `▁`, and read `▁` in a text as a space.
    """
    text = unicodedata.normalize("NFKC", data.decode("utf-8", "replace"))
    return "".join(text.replace(META_SPACE, " ").split())
