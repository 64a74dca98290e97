"""What an alignment should have found, derived from the text and not from the aligner's tables."""

import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

Bounds = NDArray[np.integer]
"""[C, 4]: student start, student end, teacher start, teacher end of the chunks a method offers for use."""


@dataclass(frozen=True, eq=False)
class Side:
    """One tokenizer's view of a text of S tokens."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    """The tokenizer's own character offsets."""
    special: NDArray[np.bool_]
    """[S]: stands outside the text."""
    stream: bytes
    """What the tokens spell; a special token spells its name here, so that every token has a place."""
    ends: list[int]
    """[S + 1]: stream position before token i."""
    places: list[int]
    """[S + 1]: byte of the text before token i, −1 inside a stretch that the tokenizer rewrote."""

    def between(self, start: int, stop: int) -> bytes:
        return self.stream[self.ends[start] : self.ends[stop]]


@dataclass(frozen=True)
class Score:
    """Counts, so that scores of several texts add up."""

    used_chunks: int = 0
    exact_chunks: int = 0
    student_tokens: int = 0
    aligned_tokens: int = 0
    """Student tokens in exact chunks."""
    common_cuts: int = 0
    found_cuts: int = 0

    def __add__(self, other: "Score") -> "Score":
        return Score(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


class Reader:
    """Reads texts with one tokenizer and knows the bytes of its tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.backend = tokenizer.backend_tokenizer
        self._byte_level = "ByteLevel" in repr(self.backend.decoder)
        self._added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
        self._special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._pieces: dict[int, bytes] = {}
        self._rewritten: dict[str, bytes] = {}

    def read(self, text: str) -> Side:
        """Raises ValueError where the tokens do not spell the text as the tokenizer's normaliser leaves it."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids: list[int] = encoded["input_ids"]
        pieces = [self._piece(token_id) for token_id in ids]
        stream = b"".join(pieces)
        expected, places = self._places(text)
        if stream != expected:
            raise ValueError(
                f"the tokens of {self.tokenizer.name_or_path} do not spell {text[:40]!r}… as its normaliser leaves it, "
                "so there is nothing to judge an alignment by; leave this tokenizer out with --pairs"
            )
        ends = [0, *np.cumsum([len(piece) for piece in pieces]).tolist()]
        special = np.array([token_id in self._special for token_id in ids], np.bool_)
        return Side(ids, encoded["offset_mapping"], special, stream, ends, [places[end] for end in ends])

    def _piece(self, token_id: int) -> bytes:
        if token_id not in self._pieces:
            self._pieces[token_id] = self._spelled(token_id)
        return self._pieces[token_id]

    def _spelled(self, token_id: int) -> bytes:
        token = self._added.get(token_id) or self.backend.id_to_token(token_id)
        if self._byte_level:
            return token.encode() if token_id in self._added else bytes(byte_alphabet()[c] for c in token)
        if len(token) == 6 and token.startswith("<0x"):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()

    def _rewrite(self, text: str) -> bytes:
        normalizer = self.backend.normalizer
        text = normalizer.normalize_str(text) if normalizer else text
        return (text if self._byte_level else text.replace("▁", " ")).encode()

    def _places(self, text: str) -> tuple[bytes, Sequence[int]]:
        """The text as the tokenizer rewrites it, and for each of its bytes, and its end, the byte of the text."""
        whole = self._rewrite(text)
        if whole == text.encode():
            return whole, range(len(whole) + 1)
        places: list[int] = []
        at = 0
        for stretch in stretches(text):
            raw = stretch.encode()
            if stretch not in self._rewritten:
                self._rewritten[stretch] = self._rewrite(stretch)
            new = self._rewritten[stretch]
            places += range(at, at + len(raw)) if new == raw else [at, *[-1] * (len(new) - 1)][: len(new)]
            at += len(raw)
        return whole, [*places, at]


@cache
def byte_alphabet() -> dict[str, int]:
    """The character that byte-level tokenizers write for each byte of UTF-8, asked of their own pre-tokenizer."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet: dict[str, int] = {}
    for code_point in (*range(0x800), *range(0x800, 0xD800, 0x400), *range(0xE000, 0x110000, 0x400)):
        character = chr(code_point)
        [(written, _)] = level.pre_tokenize_str(character)
        alphabet |= dict(zip(written, character.encode(), strict=True))
    return alphabet


@cache
def _composing() -> frozenset[str]:
    """Characters that canonical composition may melt into the one before, though they are no combining marks."""
    decompositions = (unicodedata.decomposition(chr(code_point)).split() for code_point in range(sys.maxunicode + 1))
    seconds = {chr(int(parts[1], 16)) for parts in decompositions if len(parts) == 2 and not parts[0].startswith("<")}
    jamo = {chr(code_point) for code_point in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))}
    return frozenset(seconds | jamo)


def stretches(text: str) -> list[str]:
    """A text in the smallest parts that canonical composition rewrites independently of each other."""
    starts = [i for i, c in enumerate(text) if i == 0 or not (unicodedata.combining(c) or c in _composing())]
    return [text[start:stop] for start, stop in pairwise([*starts, len(text)])]


def wanted_cuts(student: Side, teacher: Side) -> set[int]:
    """Places of the text where both sides cut, beside a stretch that both spell with the same bytes and no special."""
    s_index, t_index = _index(student), _index(teacher)
    wanted: set[int] = set()
    for start, stop in pairwise(sorted(s_index.keys() & t_index.keys())):
        i, k, j, m = s_index[start], s_index[stop], t_index[start], t_index[stop]
        specials = student.special[i:k].any() or teacher.special[j:m].any()
        if not specials and student.between(i, k) == teacher.between(j, m):
            wanted |= {start, stop}
    return wanted


def _index(side: Side) -> dict[int, int]:
    return {place: token for token, place in enumerate(side.places) if place >= 0}


def judge(student: Side, teacher: Side, bounds: Bounds, wanted: set[int]) -> Score:
    """Score the chunks a method offers, a chunk of special tokens counting as exact where both sides are special."""
    exact = aligned = 0
    found: set[int] = set()
    for i, k, j, m in bounds.tolist():
        s_special, t_special = student.special[i:k].any(), teacher.special[j:m].any()
        if s_special == t_special and (s_special or student.between(i, k) == teacher.between(j, m)):
            exact += 1
            aligned += k - i
        for token, other in ((i, j), (k, m)):
            if student.places[token] == teacher.places[other]:
                found.add(student.places[token])
    return Score(len(bounds), exact, len(student.ids), aligned, len(wanted), len(wanted & found))
