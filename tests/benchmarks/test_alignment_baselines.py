"""The alignment benchmark's baselines and judge: a weak baseline or a blind judge would flatter us."""

import random
import unicodedata
from functools import cache

import numpy as np
import pytest

from benchmarks import alignment_baselines
from benchmarks.alignment_baselines import LONGEST_COMBINATION, character_offsets, needleman_wunsch
from benchmarks.alignment_oracle import Reader, Score, judge, stretches, wanted_cuts
from tests.tokenizers_fixture import DIGITS_ONE_BY_ONE, byte_level, sentencepiece

TEXT = "Größe 12345 👍🏽 東京 the fox"


@cache
def best_score(student: tuple[str, ...], teacher: tuple[str, ...]) -> int:
    """Return the best Needleman–Wunsch score, by recursion over prefixes."""
    if not student or not teacher:
        return -len(student) - len(teacher)
    scores = [best_score(student[:-1], teacher) - 1, best_score(student, teacher[:-1]) - 1]
    for n in range(1, LONGEST_COMBINATION + 1):
        for m, k in ((1, n), (n, 1)):
            if m <= len(student) and k <= len(teacher) and "".join(student[-m:]) == "".join(teacher[-k:]):
                scores.append(best_score(student[:-m], teacher[:-k]) + m + k)
    return max(scores)


def test_needleman_wunsch_finds_a_best_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a wrong step back, and combinations that are scored but not used."""
    for name in ("_best_path", "_walk_back"):  # for so few tokens, interpreting is faster than compiling
        monkeypatch.setattr(alignment_baselines, name, getattr(alignment_baselines, name).py_func)
    draw = random.Random(0)
    for _ in range(60):
        student, teacher = ([draw.choice(["a", "b", "ab", "aab"]) for _ in range(draw.randint(0, 5))] for _ in "st")
        bounds = needleman_wunsch(student, teacher).tolist()
        num_aligned = sum(k - i + m - j for i, k, j, m in bounds)
        assert 2 * num_aligned - len(student) - len(teacher) == best_score(tuple(student), tuple(teacher))
        for i, k, j, m in bounds:
            assert "".join(student[i:k]) == "".join(teacher[j:m])


def test_offsets_cut_only_behind_whole_characters() -> None:
    """Catches a pair of two first parts of one character."""
    student = [(0, 1), (1, 2), (1, 2), (2, 3)]
    teacher = [(0, 2), (1, 2), (2, 3)]
    assert character_offsets(student, teacher).tolist() == [[0, 3, 0, 2], [3, 4, 2, 3]]
    assert character_offsets([], []).shape == (0, 4)


def test_the_judge_sees_wrong_chunks_and_missed_cuts() -> None:
    """Catches a judge that compares lengths, or that counts cuts of one tokenizer only."""
    student, teacher = Reader(byte_level()).read(TEXT), Reader(sentencepiece()).read(TEXT)
    cuts = wanted_cuts(student, teacher)
    one_chunk = np.array([[0, len(student.ids), 0, len(teacher.ids)]])
    assert judge(student, teacher, one_chunk, cuts) == Score(1, 1, len(student.ids), len(student.ids), len(cuts), 2)
    shifted = np.array([[0, 1, 1, 2]])
    assert judge(student, teacher, shifted, cuts).exact_chunks == 0


def test_no_cut_is_wanted_inside_rewritten_text() -> None:
    """Catches a comparison of positions in two different byte streams."""
    text = unicodedata.normalize("NFD", "a né 한")
    assert stretches(text) == ["a", " ", "n", "e\u0301", " ", unicodedata.normalize("NFD", "한")]
    raw = Reader(byte_level(450, DIGITS_ONE_BY_ONE)).read(text)
    composed = Reader(byte_level(500, DIGITS_ONE_BY_ONE, eos="</s>", extra=(), nfc=True)).read(text)
    cuts = wanted_cuts(raw, composed)
    accented = len(b"a n")
    assert not cuts & set(range(accented + 1, accented + 3))
    assert max(cuts) <= len(unicodedata.normalize("NFD", "a né ").encode())
