"""Cuts, chunks and flags against the set oracle, on canonical, arbitrary, cut and differing sequences."""

import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_opd.alignment import Pieces, TokenAligner
from nemo_opd.alignment.merge import merge, spell
from nemo_opd.alignment.resync import equal_runs
from nemo_opd.errors import AlignmentError
from tests.alignment.conftest import SMALL, Pair, small_pair
from tests.alignment.oracle import chunks_of, expected_chunks
from tests.tokenizers_fixture import corpus_texts, encode, sentencepiece

HOSTILE = st.sampled_from(
    (
        *(
            "e\u0301",
            "é",
            "\u0301",
            "Å",
            "ß",
            "ﬁ",
            "한",
            "東京",
            "👩‍👩‍👧‍👦",
            "👍🏽",
            "\u200d",
            "\ufeff",
            "\ufffd",
            "\U0010ffff",
        ),
        *("\x00", "▁", "▁▁", "  ", "    ", "\t\t", "\r\n", "\u3000", "11", "123", "<0x0A>", "<|im_", "Ġ", "Ċ"),
    )
)
TEXTS = st.lists(HOSTILE | st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=12).map("".join)
quick = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def spelled(pieces: Pieces, ids: list[int]) -> list[bytes]:
    return [pieces.bytes_of(token_id) for token_id in ids]


def runs_of(student: list[bytes], teacher: list[bytes]) -> list[tuple[int, int, int]]:
    """Return the runs of the bytes, which test_resync.py checks."""
    sides = [np.frombuffer(b"".join(pieces), np.uint8).copy() for pieces in (student, teacher)]
    return [tuple(run) for run in equal_runs(*sides).tolist()]


def check(aligner: TokenAligner, student_ids: list[int], teacher_ids: list[int]) -> None:
    """Compare with the oracle, without special tokens, whose names a random text may contain."""
    student_ids = [i for i in student_ids if aligner.student_pieces.lengths[i]]
    teacher_ids = [i for i in teacher_ids if aligner.teacher_pieces.lengths[i]]
    alignment = aligner.align(student_ids, teacher_ids)
    student, teacher = spelled(aligner.student_pieces, student_ids), spelled(aligner.teacher_pieces, teacher_ids)
    assert chunks_of(alignment) == expected_chunks(student, teacher, runs_of(student, teacher))
    for c, (i, k, j, m) in enumerate(alignment.bounds.tolist()):
        student_bytes, teacher_bytes = b"".join(student[i:k]), b"".join(teacher[j:m])
        exact = not alignment.inexact[c]
        assert (student_bytes == teacher_bytes) or not exact
        assert alignment.one_to_one[c] == (k - i == 1 and m - j == 1)
        assert alignment.whitespace[c] == (exact and student_bytes.isspace())
        assert alignment.digit[c] == (exact and student_bytes.isdigit())
        assert not alignment.special[c]


@pytest.mark.parametrize("name", SMALL)
@quick
@given(text=TEXTS)
def test_any_text(name: str, text: str) -> None:
    """Catches cuts inside characters that one side splits and the other does not."""
    student, teacher = small_pair(name)
    check(aligner_of(name), encode(student, text), encode(teacher, text))


@pytest.mark.tokenizers
def test_real_pairs_on_the_corpus(real_pair: Pair) -> None:
    """Catches wrong pieces in real vocabularies: runs of spaces, newlines, emoji, half characters."""
    aligner = TokenAligner(*real_pair)
    for text in corpus_texts()[::6]:
        check(aligner, encode(real_pair[0], text[:1500]), encode(real_pair[1], text[:1500]))


@quick
@given(seed=st.integers(0, 2**32), cut=st.integers(0, 60))
def test_sequences_no_tokenizer_would_produce(seed: int, cut: int) -> None:
    """Catches a merge that tokenizes again or drops the cut end: on-policy ids are not canonical and end anywhere."""
    aligner = aligner_of("byte-byte")
    random.seed(seed)
    text_ids = np.flatnonzero(aligner.student_pieces.lengths > 0).tolist()
    student_ids = random.choices(text_ids, k=30)
    data = b"".join(spelled(aligner.student_pieces, student_ids))
    by_bytes = {piece: i for i, piece in enumerate(aligner.teacher_pieces.as_list()) if piece}
    teacher_ids = []
    while data:
        starts = [piece for piece in (data[:n] for n in range(1, 9)) if piece in by_bytes]
        piece = random.choice(starts)
        teacher_ids.append(by_bytes[piece])
        data = data[len(piece) :]
    check(aligner, student_ids, teacher_ids[:cut])
    check(aligner, student_ids[: cut // 2], teacher_ids)


@quick
@given(text=TEXTS, inserted=TEXTS, position=st.integers(0, 40))
def test_streams_that_differ(text: str, inserted: str, position: int) -> None:
    """Catches exact chunks over unequal bytes, if a normaliser or another template changes the middle."""
    student, teacher = small_pair("byte-byte")
    changed = text[:position] + inserted + text[position + 2 :]
    check(aligner_of("byte-byte"), encode(student, text), encode(teacher, changed))


@quick
@given(seed=st.integers(0, 2**32), lengths=st.tuples(st.integers(0, 12), st.integers(0, 12)))
def test_repetitive_streams(seed: int, lengths: tuple[int, int]) -> None:
    """Catches bytes used twice: in tokens of spaces and `o`, the equal prefix and the equal suffix overlap."""
    random.seed(seed)
    aligner = aligner_of("sentencepiece-byte")
    sides = []
    for pieces, length in zip((aligner.student_pieces, aligner.teacher_pieces), lengths, strict=True):
        ids = [i for i, piece in enumerate(pieces.as_list()) if piece and set(piece) <= set(b" o")]
        assert max(pieces.lengths[ids]) > 1
        sides.append(random.choices(ids, k=length))
    check(aligner, *sides)


@pytest.mark.parametrize(("student_ids", "teacher_ids"), [([], []), ([], [300, 301]), ([300], [])])
def test_empty_sequences(aligner: TokenAligner, student_ids: list[int], teacher_ids: list[int]) -> None:
    alignment = aligner.align(student_ids, teacher_ids)
    assert alignment.num_chunks == 0
    assert (len(alignment.student_chunk_id), len(alignment.teacher_chunk_id)) == (len(student_ids), len(teacher_ids))
    assert alignment.student_chunk_id.dtype == alignment.teacher_chunk_id.dtype == np.int32


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_an_id_outside_the_vocabulary_is_named(aligner: TokenAligner, bad: int) -> None:
    size = aligner.student_pieces.vocab_size
    with pytest.raises(AlignmentError, match=rf"student_ids\[1\] is {bad}, outside the vocabulary of size {size}"):
        aligner.align([300, bad], [300])


@pytest.mark.parametrize("bad", [[[300, 301]], [0.5], [True, False]])
def test_what_is_no_sequence_of_ids(aligner: TokenAligner, bad: list[object]) -> None:
    with pytest.raises(AlignmentError, match="1-D sequence of integers"):
        aligner.align([300], bad)  # type: ignore[arg-type]


def test_pickled_for_a_loader_worker(pair: Pair, aligner: TokenAligner) -> None:
    copy = pickle.loads(pickle.dumps(aligner))
    text = "The quick brown fox 123"
    ids = encode(pair[0], text), encode(pair[1], text)
    assert copy.align(*ids).student_chunk_id.tolist() == aligner.align(*ids).student_chunk_id.tolist()


IDS = ([260, 300, 301, 302, 303], [261, 302, 303, 301])


def every_form(ids: list[int]) -> list[object]:
    """Return the ids as a list, a tuple, and arrays of several widths, read-only, and with strides."""
    wide = np.array(ids)
    locked = wide.copy()
    locked.flags.writeable = False
    return [ids, tuple(ids), wide, wide.astype(np.int32), wide.astype(np.uint16), locked, wide.repeat(2)[::2]]


def test_no_form_of_input_compiles_anew(aligner: TokenAligner) -> None:
    """Bug: a read-only or 32-bit array, or a worker's read-only tables, cost seconds of compilation."""
    buffers: list[pickle.PickleBuffer] = []
    state = pickle.dumps(aligner, protocol=5, buffer_callback=buffers.append)
    copy = pickle.loads(state, buffers=[bytes(buffer) for buffer in buffers])
    assert not copy.student_pieces.buffer.flags.writeable
    expected = aligner.align(*IDS)
    kernels = spell, equal_runs, merge
    num_compiled = [len(kernel.signatures) for kernel in kernels]
    for tested in (aligner, copy):
        for student_ids, teacher_ids in zip(*map(every_form, IDS), strict=True):
            assert tested.align(student_ids, teacher_ids).bounds.tolist() == expected.bounds.tolist()
    assert [len(kernel.signatures) for kernel in kernels] == num_compiled


def test_threads_share_an_aligner() -> None:
    """Bug: state is shared between calls; the kernels run without the GIL."""
    student, teacher = small_pair("nfc-byte")
    aligner = aligner_of("nfc-byte")
    texts = [f"{n} caf\u0065\u0301s and {'fox ' * n}" for n in range(40)]
    pairs = [(encode(student, text), encode(teacher, text)) for text in texts]
    expected = [aligner.align(*pair).bounds.tolist() for pair in pairs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert [a.bounds.tolist() for a in pool.map(lambda pair: aligner.align(*pair), pairs)] == expected


_ALIGNERS: dict[str, TokenAligner] = {}


def aligner_of(name: str) -> TokenAligner:
    if name not in _ALIGNERS:
        _ALIGNERS[name] = TokenAligner(*small_pair(name))
    return _ALIGNERS[name]


def test_the_fingerprint_names_tokenizers_and_roles() -> None:
    """Bug: an override of roles does not change the key of cached alignments."""
    student, teacher = small_pair("byte-byte")
    roles = {"<|begin_of_text|>": "opening", "<|im_start|>": "opening"}
    fingerprints = [
        TokenAligner(student, teacher).fingerprint,
        TokenAligner(teacher, student).fingerprint,
        TokenAligner(student, teacher, roles=roles).fingerprint,
        TokenAligner(student, sentencepiece()).fingerprint,
    ]
    assert len(set(fingerprints)) == 4
    assert pickle.loads(pickle.dumps(TokenAligner(student, teacher))).fingerprint == fingerprints[0]
