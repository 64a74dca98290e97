"""Tokenizer pairs and matrices that several tests share."""

from functools import cache

import pytest

from nemo_opd.projection import ProjectionMatrix, build_projection
from tests.tokenizers_fixture import DIGITS_ONE_BY_ONE, byte_level, real_tokenizer, sentencepiece

SMALL = {
    "three_digits": byte_level(),
    "one_digit": byte_level(450, DIGITS_ONE_BY_ONE, eos="<|im_end|>", extra=("<|endoftext|>", "<|im_start|>")),
    "nfc": byte_level(500, DIGITS_ONE_BY_ONE, eos="</s>", extra=(), nfc=True),
    "sentencepiece": sentencepiece(),
    "dummy_prefix": sentencepiece(dummy_prefix=True),
}
PAIRS = [(a, b) for a in SMALL for b in SMALL]


@cache
def real_matrix(student: str, teacher: str) -> ProjectionMatrix:
    """Build the default matrix of two real tokenizers, or skip the test."""
    return build_projection(real_tokenizer(student), real_tokenizer(teacher))


@pytest.fixture(scope="session")
def llama_qwen() -> ProjectionMatrix:
    return real_matrix("llama3_1", "qwen3")
