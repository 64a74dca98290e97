"""The contract on real tokenizers: exact chunks, every common cut, nothing in Python per token, linear growth."""

import time
import unicodedata
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from nemo_opd.alignment import TokenAligner
from nemo_opd.alignment.resync import ANCHOR
from nemo_opd.types import Alignment
from tests.alignment.conftest import REAL_PAIRS, small_pair
from tests.alignment.lines import lines_run
from tests.alignment.oracle import common_ends, true_runs
from tests.tokenizers_fixture import REAL, corpus_texts, encode, real_tokenizer

Places = set[tuple[int, int, int, int]]
ORDERED = [*REAL_PAIRS, ("llama3_1", "gemma3")]
STRETCH = 60_000


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


NORMALIZER: dict[str, Callable[[str], str]] = {
    "llama3_1": str,
    "gpt4o": str,
    "qwen3": nfc,
    "gemma3": lambda text: text.replace("▁", " "),
}


@cache
def text() -> str:
    """The corpus, its domains mixed, so that any stretch of it holds several."""
    documents = corpus_texts()
    return "\n".join(documents[i] for step in range(12) for i in range(step, len(documents), 12))


@cache
def aligner_of(student: str, teacher: str) -> TokenAligner:
    return TokenAligner(real_tokenizer(student), real_tokenizer(teacher))


@cache
def ids_of(name: str, start: int) -> list[int]:
    """From a character of the text on, 8,192 tokens at least."""
    ids = encode(real_tokenizer(name), text()[start : start + STRETCH])
    assert len(ids) >= 8192
    return ids


def starts() -> list[int]:
    """Three stretches, one with literal `▁`."""
    return [0, 200_000, text().index("▁") - 1000]


class Sides:
    """Byte ends and bytes of both sequences, from the pieces as a list."""

    def __init__(self, names: tuple[str, str], ids: tuple[list[int], list[int]]) -> None:
        self.ids = ids
        self.aligner = aligner_of(*names)
        self.pieces = [[p[i] for i in side] for p, side in zip(map(pieces_of, names), ids, strict=True)]
        self.ends = [np.cumsum([0, *map(len, pieces)]) for pieces in self.pieces]
        self.data = [b"".join(pieces) for pieces in self.pieces]
        self.alignment = self.aligner.align(*ids)

    def places(self) -> Places:
        """Bytes of exact text chunks: student start and end, teacher start and end. Checks that they are equal."""
        alignment, (left, right) = self.alignment, self.ends
        i, k, j, m = alignment.bounds[~alignment.inexact & ~alignment.special].T
        places = set(zip(*(side.tolist() for side in (left[i], left[k], right[j], right[m])), strict=True))
        for a, b, c, d in places:
            assert self.data[0][a:b] == self.data[1][c:d]
        return places


@cache
def pieces_of(name: str) -> list[bytes]:
    other = next(o for o in REAL if o != name)
    return aligner_of(name, other).student_pieces.as_list()


def check_partition(alignment: Alignment) -> None:
    """Chunks follow one another on both sides, and the ids say what the bounds say."""
    i, k, j, m = alignment.bounds.T
    assert (i < k).all()
    assert (j < m).all()
    assert (k[:-1] <= i[1:]).all()
    assert (m[:-1] <= j[1:]).all()
    numbers = np.arange(alignment.num_chunks)
    for ids, start, end in ((alignment.student_chunk_id, i, k), (alignment.teacher_chunk_id, j, m)):
        used = ids[ids >= 0]
        assert (used == np.repeat(numbers, end - start)).all()
        assert (ids[start] == numbers).all()
        assert (ids[end - 1] == numbers).all()


def expected_places(ends: list[np.ndarray], runs: np.ndarray, limits: list[int]) -> Places:
    """What lies between neighbouring common ends of one run, as long as both sides are within the limits."""
    places: Places = set()
    for run in runs:
        cuts = sorted(common_ends(*ends, run[None]))
        places |= {(a, b, c, d) for (a, c), (b, d) in pairwise(cuts) if b <= limits[0] and d <= limits[1]}
    return places


@pytest.mark.tokenizers
@pytest.mark.parametrize(("student", "teacher"), ORDERED)
@pytest.mark.parametrize("length", [512, 2048, 8192])
def test_contract(student: str, teacher: str, length: int) -> None:
    """Used chunks are byte-exact and every common cut is found; both sides are cut at `length` tokens.

    Where one stream is a prefix of the other the oracle is the common ends. Gemma reads a literal `▁` as a space;
    there the truth is known from the text, and is demanded of runs of two bytes or more, and not where only the last
    window of the shorter stream could show it.
    """
    for start in starts():
        sides = Sides((student, teacher), (ids_of(student, start)[:length], ids_of(teacher, start)[:length]))
        check_partition(sides.alignment)
        shortest = min(map(len, sides.data))
        if sides.data[0][:shortest] == sides.data[1][:shortest]:
            assert sides.places() == expected_places(sides.ends, np.array([(0, 0, shortest)]), [shortest] * 2)
            assert not sides.alignment.inexact.any()
        else:
            runs = true_runs(text()[start : start + STRETCH], NORMALIZER[student], NORMALIZER[teacher])
            limits = [len(data) - ANCHOR for data in sides.data]
            assert expected_places(sides.ends, runs[runs[:, 2] > 1], limits) <= sides.places()
            assert (sides.alignment.inexact.sum() > 0) == (limits[0] > runs[0, 2])


def test_barriers_on_both_sides_of_an_insertion() -> None:
    """`fox<eot><start>dog` against `fox<eot>##<start>dog`: a template writes more after a turn; both marks pair."""
    student, teacher = small_pair("byte-byte")
    eot, begin = student.eos_token_id, student.convert_tokens_to_ids("<|begin_of_text|>")
    end, start = teacher.eos_token_id, teacher.convert_tokens_to_ids("<|im_start|>")
    aligner = TokenAligner(student, teacher, roles={"<|begin_of_text|>": "opening", "<|im_start|>": "opening"})
    s_ids = [*encode(student, "fox"), eot, begin, *encode(student, "dog")]
    t_ids = [*encode(teacher, "fox"), end, *encode(teacher, "##"), start, *encode(teacher, "dog")]
    alignment = aligner.align(s_ids, t_ids)
    assert alignment.special.sum() == 2
    assert not alignment.inexact.any()
    assert (alignment.student_chunk_id >= 0).all()


def seconds(call: Callable[[], object], times: int) -> float:
    """The best of so many."""
    best = float("inf")
    for _ in range(times):
        start = time.thread_time()
        call()
        best = min(best, time.thread_time() - start)
    return best


@pytest.mark.tokenizers
def test_no_python_is_run_per_token() -> None:
    """Thousands of tokens take a fraction of a millisecond; one line for each would be many times that."""
    aligner = aligner_of("llama3_1", "qwen3")

    def lines(size: int) -> int:
        return lines_run(lambda: aligner.align(ids_of("llama3_1", 0)[:size], ids_of("qwen3", 0)[:size]))

    first, short, long = lines(256), lines(256), lines(4096)
    assert first >= short == long, "what is prepared once may be in the first"


@pytest.mark.tokenizers
def test_growth_is_linear_to_131_072_tokens() -> None:
    """Catches quadratic growth, 28 times the cost per token; that of fresh memory pages and full caches is about 2.

    Processor time of the thread, as the machine may be busy.
    """
    sides = [encode(real_tokenizer(name), text()[:20_000]) for name in ("llama3_1", "qwen3")]
    times = -(-131_072 // min(map(len, sides)))
    short = [np.array(side) for side in sides]
    long = [np.tile(side, times) for side in short]
    aligner = aligner_of("llama3_1", "qwen3")
    growth = seconds(lambda: aligner.align(*long), 5) / seconds(lambda: aligner.align(*short), 20)
    assert growth < 4 * times
