"""Text prompts: their tokens, sampled tokens as text, and dropped prompts."""

from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from nemo_opd.data.row_types import Prompt
from nemo_opd.errors import DataError, RolloutError
from nemo_opd.rollout.collect import drop_long
from nemo_opd.rollout.renderer import TextRenderer
from tests.rollout.scripted import encoded
from tests.tokenizers_fixture import byte_level, llama_class, rebuilt, sentencepiece


def with_specials(single: str) -> Any:
    names = ("<|begin_of_text|>", "<|eot_id|>")
    specials = [(name, byte_level().convert_tokens_to_ids(name)) for name in names]
    return rebuilt(byte_level(), post_processor=processors.TemplateProcessing(single=single, special_tokens=specials))


@pytest.mark.parametrize("single", ["$A", "<|begin_of_text|> $A", "<|begin_of_text|> $A <|eot_id|>", "$A <|eot_id|>"])
def test_prompts_have_default_specials_but_no_end(single: str) -> None:
    tokenizer = with_specials(single)
    ids = TextRenderer(tokenizer).prompt_ids(Prompt(0, "The quick fox"))
    begin = [tokenizer.convert_tokens_to_ids("<|begin_of_text|>")] if single.startswith("<") else []
    assert ids.tolist() == begin + encoded(tokenizer, "The quick fox")
    assert ids.dtype == np.int32


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece(), sentencepiece(dummy_prefix=True), llama_class()])
def test_a_dataset_continuation_is_tokenized_with_its_prompt(tokenizer: Any) -> None:
    """Catches a dummy space before the continuation, and prompt tokens that are learned."""
    renderer = TextRenderer(tokenizer)
    prompt = Prompt(0, "The quick", response=" brown fox 123")
    continued = renderer.continued(prompt)
    expected = [i for i in tokenizer("The quick brown fox 123")["input_ids"] if i != tokenizer.eos_token_id]
    assert continued.ids.tolist() == [*expected, tokenizer.eos_token_id]
    assert renderer.text(continued.ids[continued.start : -1]) == " brown fox 123"
    assert continued.is_ended


def test_the_text_of_a_turn_is_exact() -> None:
    """Bugs: a stripped or added space, an error for a part of a character, special tokens in the text."""
    renderer = TextRenderer(byte_level())
    ids = encoded(byte_level(), "  the fox 東京 ")
    assert renderer.text(np.array(ids)) == "  the fox 東京 "
    cut = encoded(byte_level(), "é")
    assert len(cut) in (1, 2)
    first_byte = byte_level().convert_tokens_to_ids("Ã")
    assert renderer.text(np.array([first_byte, byte_level().eos_token_id, *encoded(byte_level(), "a")])) == "\ufffda"


def test_long_prompts_are_dropped() -> None:
    renderer = TextRenderer(byte_level())
    prompts = [Prompt(i, "the fox " * i) for i in (1, 9, 2, 30)]
    limit = len(renderer.prompt_ids(prompts[2]))
    remaining = drop_long(prompts, renderer, limit, key="data.train", way_out="do")
    assert [prompt.index for prompt in remaining] == [1, 2]
    assert drop_long(prompts, renderer, None, key="data.train", way_out="do") == tuple(prompts)
    with pytest.raises(DataError, match=r"^data: none of 1 prompts has 2 tokens or less; the shortest has \d+; do$"):
        drop_long(prompts[1:2], renderer, 2, key="data", way_out="do")


def test_invalid_prompts_are_refused() -> None:
    renderer = TextRenderer(byte_level())
    with pytest.raises(DataError, match=r"prompt 4 .* has no tokens"):
        renderer.prompt_ids(Prompt(4, ""))
    with pytest.raises(DataError, match=r"prompt 4 .* no response"):
        renderer.continued(Prompt(4, "a"))
    with pytest.raises(DataError, match="the model has no embedding"):
        TextRenderer(byte_level(), vocab_size=20).prompt_ids(Prompt(4, "the fox"))
    with pytest.raises(RolloutError, match="messages_key"):
        renderer.between([], [], None)
