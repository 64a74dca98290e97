"""Properties of the rows of real pairs (methods.md §2), and the cost of a build."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest

from nemo_opd.alignment import pieces_of
from nemo_opd.alignment.roles import pair_special_tokens
from nemo_opd.alignment.spelling import TEXT
from nemo_opd.projection import ProjectionMatrix, build_projection
from tests.projection.conftest import real_matrix
from tests.tokenizers_fixture import real_tokenizer

pytestmark = pytest.mark.tokenizers

PAIRS = [("llama3_1", "qwen3"), ("gpt4o", "gemma3")]
"""Each tokenizer once, one of them SentencePiece: a build takes seconds. `test_audit` has overlaps of more pairs."""
every_pair = pytest.mark.parametrize("names", PAIRS, ids="-".join)


@every_pair
def test_no_mass_on_unrelated_ids(names: tuple[str, str]) -> None:
    """Catches text with mass on other bytes, or whose heaviest piece is not its beginning; roles that lead to text."""
    matrix = real_matrix(*names)
    tokenizers = [real_tokenizer(name) for name in names]
    student_pieces, teacher_pieces = map(pieces_of, tokenizers)
    special = pair_special_tokens(*tokenizers, student_pieces, teacher_pieces)
    student_is_text, teacher_is_text = special.student_class == TEXT, special.teacher_class == TEXT
    rows, places = np.nonzero(matrix.indices >= 0)
    columns = matrix.indices[rows, places]
    assert np.array_equal(student_is_text[rows], teacher_is_text[columns])
    ours, theirs = student_pieces.as_list(), teacher_pieces.as_list()
    text = student_is_text[rows]
    entries = zip(rows[text].tolist(), columns[text].tolist(), places[text].tolist(), strict=True)
    for s, t, place in entries:
        piece = theirs[t]
        assert ours[s].startswith(piece) if place == 0 else piece in ours[s], (ours[s], piece)
    exact = matrix.exact & student_is_text
    assert all(ours[s] == theirs[matrix.indices[s, 0]] for s in np.flatnonzero(exact).tolist())


@every_pair
def test_all_text_is_spelled(names: tuple[str, str]) -> None:
    """Catches empty rows of text, except text with `▁`, which means a space to a SentencePiece teacher."""
    matrix = real_matrix(*names)
    pieces = pieces_of(real_tokenizer(names[0]))
    contents = pieces.as_list()
    empty = [contents[s] for s in np.flatnonzero((matrix.row_lengths == 0) & (pieces.lengths > 0)).tolist()]
    assert all("▁".encode() in content for content in empty)
    assert len(empty) < 10


def test_the_reverse_pass_adds_related_tokens_only(llama_qwen: ProjectionMatrix) -> None:
    """Catches unrelated entries, changed exact rows, special rows or numerals, and a build of minutes."""
    tokenizers = real_tokenizer("llama3_1"), real_tokenizer("qwen3")
    start_s = time.process_time()
    both = build_projection(*tokenizers, reverse=True)
    assert time.process_time() - start_s < 60
    unchanged = llama_qwen.exact | (pieces_of(tokenizers[0]).lengths == 0)
    assert np.array_equal(both.indices[unchanged], llama_qwen.indices[unchanged])
    vocab = tokenizers[0].get_vocab()
    numerals = [vocab[f"{value:03d}"] for value in range(1000)]
    assert np.array_equal(both.indices[numerals], llama_qwen.indices[numerals])
    ours, theirs = (pieces_of(tokenizer).as_list() for tokenizer in tokenizers)
    rows, places = np.nonzero(both.indices >= 0)
    text = pieces_of(tokenizers[0]).lengths[rows] > 0
    entries = zip(rows[text].tolist(), both.indices[rows, places][text].tolist(), strict=True)
    assert all(theirs[t] in ours[s] or ours[s] in theirs[t] for s, t in entries)
    assert len(np.unique(both.indices)) > len(np.unique(llama_qwen.indices))


BUILD = r"""
import json, re, sys, time
from pathlib import Path
from tests.tokenizers_fixture import real_tokenizer
from nemo_opd.projection import build_projection
matrix = build_projection(*map(real_tokenizer, sys.argv[1:3]), reverse=True)
# getrusage's maximum includes the parent's memory.
peak = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
print(json.dumps([time.process_time(), peak, matrix.options.passes]))
"""


@pytest.mark.nightly
def test_a_build_takes_seconds_and_little_memory() -> None:
    """Catches a dense map, which has 100 GB for the largest pair; includes imports and tokenizers.

    Measures processor time of all threads, as the machine may be busy.
    """
    real_tokenizer("gemma3"), real_tokenizer("gpt4o")
    command = [sys.executable, "-c", BUILD, "gemma3", "gpt4o"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    used, peak, passes = json.loads(done.stdout)
    assert used < 150
    assert peak < 2e9
    assert passes == ["exact_map", "multi_token", "sort_and_cut", "byte_prefix", "shared_prefix"]
