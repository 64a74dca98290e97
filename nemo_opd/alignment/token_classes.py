"""Classes of tokens by the characters they stand for."""

from __future__ import annotations

import unicodedata
from functools import cache

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment.pieces import Pieces

CLASSES = (
    "cjk",
    "other_script",
    "code",
    "word",
    "numeral",
    "punctuation",
    "white_space",
    "part_of_character",
    "special",
)
"""Names of the classes, by number. The lowest class among its characters is a text's class, and so of two texts
together. A part of a character has no complete character, `special` no text.
"""
_CJK, _OTHER_SCRIPT, _CODE, _WORD, _NUMERAL, _PUNCTUATION, _WHITE_SPACE, _PART, _SPECIAL = range(len(CLASSES))
_CODE_CHARACTERS = frozenset("{}[]<>=;_\\|&^~`$#@*/+")
"""Characters that are frequent in source code and rare in prose."""
_CJK_RANGES = (
    (0x1100, 0x11FF),
    (0x2E80, 0x9FFF),
    (0xAC00, 0xD7FF),
    (0xF900, 0xFAFF),
    (0xFF00, 0xFFEF),
    (0x20000, 0x3FFFF),
)
"""Han, kana, bopomofo and hangul, with their punctuation and full-width forms."""
_LATIN_RANGES = ((0, 0x24F), (0x300, 0x36F), (0x1E00, 0x1EFF), (0x2C60, 0x2C7F), (0xA720, 0xA7FF), (0xFB00, 0xFB06))


def token_classes(pieces: Pieces) -> NDArray[np.uint8]:
    """Return the class number of each id: [V]."""
    return np.array([class_of(piece) for piece in pieces.as_list()], np.uint8)


def class_of(text: bytes) -> int:
    """Return the number of a text's class, by its complete characters."""
    return min(map(_class_of_character, text.decode(errors="ignore")), default=_PART if text else _SPECIAL)


@cache
def _class_of_character(character: str) -> int:
    code, category = ord(character), unicodedata.category(character)
    if character.isspace():
        return _WHITE_SPACE
    if _is_in(code, _CJK_RANGES):
        return _CJK
    if character in _CODE_CHARACTERS:
        return _CODE
    if category.startswith("N"):
        return _NUMERAL
    if category.startswith(("L", "M")):
        return _WORD if _is_in(code, _LATIN_RANGES) else _OTHER_SCRIPT
    return _PUNCTUATION


def _is_in(code: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    return any(first <= code <= last for first, last in ranges)
