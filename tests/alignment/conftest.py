"""Pairs of tokenizers: small ones on every machine, real ones if they are installed."""

import pytest
from transformers import PreTrainedTokenizerBase

from nemo_opd.alignment import TokenAligner
from tests.tokenizers_fixture import DIGITS_ONE_BY_ONE, REAL, byte_level, real_tokenizer, sentencepiece

Pair = tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]
SMALL = ("byte-byte", "byte-sentencepiece", "sentencepiece-byte", "nfc-byte", "prefix-byte", "byte-itself")


def small_pair(name: str) -> Pair:
    first = byte_level()
    second = byte_level(450, DIGITS_ONE_BY_ONE, eos="<|im_end|>", extra=("<|endoftext|>", "<|im_start|>"))
    nfc = byte_level(500, DIGITS_ONE_BY_ONE, eos="</s>", extra=(), nfc=True)
    return {
        "byte-byte": (first, second),
        "byte-sentencepiece": (first, sentencepiece()),
        "sentencepiece-byte": (sentencepiece(), second),
        "nfc-byte": (nfc, first),
        "prefix-byte": (sentencepiece(dummy_prefix=True), first),
        "byte-itself": (first, first),
    }[name]


@pytest.fixture(scope="session", params=SMALL)
def pair(request: pytest.FixtureRequest) -> Pair:
    return small_pair(request.param)


@pytest.fixture(scope="session")
def aligner(pair: Pair) -> TokenAligner:
    return TokenAligner(*pair)


REAL_PAIRS = list(zip(REAL, (*REAL[1:], REAL[0]), strict=True))
"""A ring: each tokenizer is once a student and once a teacher."""


@pytest.fixture(scope="session", params=REAL_PAIRS, ids="-".join)
def real_pair(request: pytest.FixtureRequest) -> Pair:
    student, teacher = request.param
    return real_tokenizer(student), real_tokenizer(teacher)
