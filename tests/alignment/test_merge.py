"""The contract on real tokenizers: exact chunks, every common cut, no Python for each token, linear growth."""

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
    """Return the corpus with its domains mixed, so that any stretch has several."""
    documents = corpus_texts()
    return "\n".join(documents[i] for step in range(12) for i in range(step, len(documents), 12))


@cache
def aligner_of(student: str, teacher: str) -> TokenAligner:
    return TokenAligner(real_tokenizer(student), real_tokenizer(teacher))


@cache
def ids_of(name: str, start: int) -> list[int]:
    """Return at least 8,192 tokens, from a character of the text on."""
    ids = encode(real_tokenizer(name), text()[start : start + STRETCH])
    assert len(ids) >= 8192
    return ids


def starts() -> list[int]:
    """Return the starts of three stretches, one with literal `▁`."""
    return [0, 200_000, text().index("▁") - 1000]


class Sides:
    """Both sequences with their pieces, bytes and byte ends, and the alignment."""

    def __init__(self, names: tuple[str, str], ids: tuple[list[int], list[int]]) -> None:
        self.ids = ids
        self.aligner = aligner_of(*names)
        self.pieces = [[p[i] for i in side] for p, side in zip(map(pieces_of, names), ids, strict=True)]
        self.ends = [np.cumsum([0, *map(len, pieces)]) for pieces in self.pieces]
        self.data = [b"".join(pieces) for pieces in self.pieces]
        self.alignment = self.aligner.align(*ids)

    def places(self) -> Places:
        """Return (student start, student end, teacher start, teacher end) of exact text chunks, checked to be equal."""
        alignment, (student_ends, teacher_ends) = self.alignment, self.ends
        i, k, j, m = alignment.bounds[~alignment.inexact & ~alignment.special].T
        ends = (student_ends[i], student_ends[k], teacher_ends[j], teacher_ends[m])
        places = set(zip(*(side.tolist() for side in ends), strict=True))
        for a, b, c, d in places:
            assert self.data[0][a:b] == self.data[1][c:d]
        return places


@cache
def pieces_of(name: str) -> list[bytes]:
    partner = next(o for o in REAL if o != name)
    return aligner_of(name, partner).student_pieces.as_list()


def check_partition(alignment: Alignment) -> None:
    """Check that chunks are in order on both sides, and that ids and bounds agree."""
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
    """Return the places between neighbouring common ends of each run, within the limits of both sides."""
    places: Places = set()
    for run in runs:
        cuts = sorted(common_ends(*ends, run[None]))
        places |= {(a, b, c, d) for (a, c), (b, d) in pairwise(cuts) if b <= limits[0] and d <= limits[1]}
    return places


@pytest.mark.tokenizers
@pytest.mark.parametrize(("student", "teacher"), ORDERED)
@pytest.mark.parametrize("length", [512, 2048, 8192])
def test_contract(student: str, teacher: str, length: int) -> None:
    """Catches exact chunks with unequal bytes and common cuts that are missed; both sides are cut at `length` tokens.

    If one stream is a prefix of the other, the oracle is their common ends. Gemma reads a literal `▁` as a space; then
    the text gives the truth, for runs of at least two bytes and without the last window of the shorter stream.
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
    """Bug: text that one template adds after a turn, as in `fox<eot>##<start>dog`, keeps a mark from pairing."""
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
    """Return the shortest processor time of so many calls."""
    best = float("inf")
    for _ in range(times):
        start = time.thread_time()
        call()
        best = min(best, time.thread_time() - start)
    return best


@pytest.mark.tokenizers
def test_no_python_is_run_per_token() -> None:
    """Bug: Python runs for each token, which takes many times the fraction of a millisecond for thousands."""
    aligner = aligner_of("llama3_1", "qwen3")

    def lines(size: int) -> int:
        return lines_run(lambda: aligner.align(ids_of("llama3_1", 0)[:size], ids_of("qwen3", 0)[:size]))

    first, short, long = lines(256), lines(256), lines(4096)
    assert first >= short == long, "the first call may include preparation"


@pytest.mark.tokenizers
def test_growth_is_linear_to_131_072_tokens() -> None:
    """Bug: quadratic growth, 28 times the cost for each token; fresh memory pages and full caches cost a factor of 2.

    Measured in the thread's processor time, as the machine may be busy.
    """
    sides = [encode(real_tokenizer(name), text()[:20_000]) for name in ("llama3_1", "qwen3")]
    times = -(-131_072 // min(map(len, sides)))
    short = [np.array(side) for side in sides]
    long = [np.tile(side, times) for side in short]
    aligner = aligner_of("llama3_1", "qwen3")
    growth = seconds(lambda: aligner.align(*long), 5) / seconds(lambda: aligner.align(*short), 20)
    assert growth < 4 * times
