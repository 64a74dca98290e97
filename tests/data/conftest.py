from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]

SENTENCES = ["the cat sat on the mat, the cat sat", "naïve Größe 東京タワー 東京", "1 2 34 345 the end of the cat"] * 4


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def byte_bpe(num_merges: int, *, bos: bool = True, **options: object) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with at most `num_merges` merges; `bos` puts `<s>` first, eos is `</s>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=258 + num_merges,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **options)


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    return byte_bpe


@pytest.fixture(scope="session")
def coarse() -> PreTrainedTokenizerFast:
    """Return a tokenizer with mostly one token a word."""
    return byte_bpe(60)


@pytest.fixture(scope="session")
def fine() -> PreTrainedTokenizerFast:
    """Return a tokenizer with mostly one token a byte and no BOS."""
    return byte_bpe(8, bos=False)
