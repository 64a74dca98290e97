"""transformers' generation as an engine: the contract, and tests of this engine alone."""

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    RecurrentGemmaConfig,
    RwkvConfig,
)

from nemo_opd.config.rollout import HFRollout
from nemo_opd.demo import model_path
from nemo_opd.errors import ConfigError, ModelError, RolloutError
from nemo_opd.rollout.engine_interface import BatchLimit, Completion, EngineSpec, Request, Sampling
from nemo_opd.rollout.transformers_engine import Sampler, end_ids, for_model
from tests.models.families import VOCABULARY, model_of
from tests.rollout.contract import EngineContract, Folders, Subject, make_requests, same, save_folders
from tests.tokenizers_fixture import byte_level


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return save_folders(tmp_path_factory.mktemp("models"), extra_rows=20)


@pytest.fixture(scope="module")
def subject(folders: Folders) -> Iterator[Subject]:
    spec = EngineSpec(folders.vocab_size, folders.end_ids, "float32", folders.first)
    with for_model(HFRollout(batch_size=3), spec, str(folders.first), "cpu") as engine:
        yield Subject(engine, folders)


class TestHFEngine(EngineContract):
    """The contract with a head wider than the vocabulary, and more requests than rows in a batch."""


def sampler(model: PreTrainedModel, *, ends: tuple[int, ...] = (2,), batch_size: int = 16) -> Sampler:
    return Sampler(model, end_ids=ends, vocab_size=VOCABULARY, limit=BatchLimit(batch_size), device="cpu")


def small_vocabulary_requests(count: int, max_new_tokens: int = 12) -> list[Request]:
    return [
        replace(request, prompt_ids=request.prompt_ids % VOCABULARY)
        for request in make_requests(count, max_new_tokens=max_new_tokens)
    ]


SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "bos_token_id": 1, "eos_token_id": 2}
READ_PADDING = {
    "rwkv, which mixes rows too": RwkvConfig(**SIZES),
    "recurrent_gemma": RecurrentGemmaConfig(
        **SIZES, intermediate_size=48, num_attention_heads=4, lru_width=32, head_dim=8, pad_token_id=0
    ),
}


@pytest.mark.parametrize("family", READ_PADDING)
def test_a_model_that_reads_padding_handles_prompts_of_different_lengths(family: str) -> None:
    """Catches recurrent states that include a shorter prompt's left padding, or that rows of a batch share."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(READ_PADDING[family]).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    draw = np.random.default_rng(0)
    lengths = (20, 2, 9, 2, 20)
    requests = [Request(draw.integers(3, 40, n).astype(np.int32), 5 + n % 3, seed) for seed, n in enumerate(lengths)]

    for request, completion in zip(requests, sampler(model).generate(requests, Sampling()), strict=True):
        ids = torch.from_numpy(np.concatenate([request.prompt_ids, completion.ids]).astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
        start = len(request.prompt_ids)
        expected = logits.log_softmax(-1)[start - 1 : -1].gather(1, ids[start:, None])[:, 0]
        # float32 rounding of logits of about 10, through three layers.
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("family", ["llama, tied", "qwen3, norms of heads", "gemma3, two rotary embeddings"])
def test_a_seed_gives_the_same_sample_in_batches_of_any_size(family: str) -> None:
    """Bug: left padding, sliding windows or the end of a batch change a sample."""
    model, requests = model_of(family), small_vocabulary_requests(7)
    alone = [sampler(model).generate([request], Sampling(), 3)[0] for request in requests]

    for batch_size in (2, 16):
        completions = sampler(model, batch_size=batch_size).generate(requests, Sampling(), 3)
        for completion, expected in zip(completions, alone, strict=True):
            np.testing.assert_array_equal(completion.ids, expected.ids)
            # float32 rounding of logits of about 10, through two layers.
            np.testing.assert_allclose(completion.logprobs, expected.logprobs, rtol=0, atol=1e-4)


def test_the_first_end_counts_if_padding_is_also_an_end() -> None:
    """Bug: a sampled id 0, which is also padding, does not end a sequence or is cut off."""
    model, requests = model_of("llama, tied"), small_vocabulary_requests(12)
    free = sampler(model, ends=()).generate(requests, Sampling(), 0)

    completions = sampler(model, ends=(0, 5, 9)).generate(requests, Sampling(), 0)

    assert {completion.finish_reason for completion in free} == {"length"}
    assert any(0 in completion.ids for completion in completions)
    for cut, full in zip(completions, free, strict=True):
        at = np.flatnonzero(np.isin(full.ids, (0, 5, 9)))
        length = at[0] + 1 if len(at) else len(full.ids)
        np.testing.assert_array_equal(cut.ids, full.ids[:length])
        assert len(cut.logprobs) == length


def test_an_end_in_the_prompt_does_not_end_the_sample() -> None:
    model = model_of("llama, tied")
    requests = [Request(np.array([2, 5, 2], np.int32), 5, seed) for seed in range(3)]

    completions = sampler(model).generate(requests, Sampling(), 0)

    assert all(len(completion.ids) == 5 or completion.ids[-1] == 2 for completion in completions)
    assert any(len(completion.ids) > 1 for completion in completions)


def test_the_models_generation_config_does_not_change_samples() -> None:
    """Bugs: penalties or limits of the model's settings in samples; settings that are lost afterwards."""
    model: Any = model_of("llama, tied")
    expected = sampler(model).generate(small_vocabulary_requests(6), Sampling(), 0)
    settings = GenerationConfig(
        do_sample=True,
        temperature=0.1,
        top_p=0.2,
        top_k=3,
        repetition_penalty=3.0,
        no_repeat_ngram_size=1,
        min_new_tokens=11,
        max_length=7,
        forced_eos_token_id=4,
        suppress_tokens=list(range(5, 20)),
        eos_token_id=[2, 7],
        num_return_sequences=2,
        use_cache=False,
    )
    model.generation_config = settings
    model.config.use_cache = False

    completions = sampler(model).generate(small_vocabulary_requests(6), Sampling(), 0)

    assert same(completions, expected)
    assert model.generation_config is settings


def test_samples_are_distributed_as_the_model_says() -> None:
    """χ² of the first token's counts against the model's probabilities; the 99.9 % quantile for 40 degrees is 73.4."""
    model: Any = model_of("llama, tied")
    # Flat, so that every token is expected at least 20 times.
    model.get_output_embeddings().weight.data *= 0.05
    prompt, count = np.array([5, 6, 7], np.int32), 4000
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1).numpy() * count

    completions = sampler(model, batch_size=1000).generate(
        [Request(prompt, 1, seed) for seed in range(count)], Sampling(), 0
    )

    counts = np.bincount([completion.ids[0] for completion in completions], minlength=VOCABULARY)
    assert expected.min() > 20
    assert ((counts - expected) ** 2 / expected).sum() < 73.4


def test_logits_that_are_not_finite_are_reported() -> None:
    model: Any = model_of("llama, tied")
    model.get_output_embeddings().weight.data.fill_(torch.nan)

    with pytest.raises(RolloutError, match=r"not finite after \d+ tokens"):
        sampler(model).generate(small_vocabulary_requests(2), Sampling(), 0)


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [(60, 5, "make 65, and the model has 64"), (0, 5, "0 prompt"), (3, 0, "max_new_tokens=0")],
)
def test_impossible_requests_are_refused(prompt: int, new: int, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        sampler(model_of("llama, tied")).generate([Request(np.ones(prompt, np.int32), new, 0)], Sampling(), 0)


def test_a_request_may_fill_the_models_positions() -> None:
    completions: list[Completion] = sampler(model_of("llama, tied"), ends=()).generate(
        [Request(np.ones(60, np.int32), 4, 0)], Sampling(), 0
    )

    assert len(completions[0].ids) == 4


@pytest.mark.parametrize(
    ("model", "device", "error", "match"),
    [
        ("nowhere", "cpu", ModelError, "nowhere"),
        ("demo:student", "cuda", ConfigError, "device=cuda: PyTorch sees no GPU"),
    ],
)
def test_a_missing_model_or_device_is_refused(
    model: str, device: str, error: type[Exception], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    source = model if model.startswith("demo:") else str(tmp_path / model)
    spec = EngineSpec(8, frozenset(), "auto", tmp_path)
    with pytest.raises(error, match=match), for_model(HFRollout(), spec, source, device):
        pass


def test_the_demo_student_is_found_by_its_name(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path("student"))
    prompt = np.array(tokenizer.encode("The answer"), np.int32)
    spec = EngineSpec(len(tokenizer), frozenset(), "float32", tmp_path)
    with for_model(HFRollout(), spec, "demo:student", "cpu") as engine:
        completions = engine.generate([Request(prompt, 8, seed) for seed in range(3)], Sampling())

    assert [(len(completion.ids), completion.version) for completion in completions] == [(8, 0)] * 3


def test_ends_come_from_both_generation_configs_and_the_tokenizer(folders: Folders) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folders.first)

    assert end_ids(tokenizer) == folders.end_ids
    assert end_ids(tokenizer, GenerationConfig(eos_token_id=7)) == folders.end_ids | {7}
    assert end_ids(tokenizer, GenerationConfig(eos_token_id=[7, 8])) == folders.end_ids | {7, 8}


def test_the_chat_templates_end_of_turn_is_an_end() -> None:
    """Bug: a base model, whose EOS is another token, never ends its turns."""
    tokenizer = copy(byte_level(eos="<|endoftext|>", extra=("<|im_start|>", "<|im_end|>")))
    eos = {tokenizer.eos_token_id}
    assert end_ids(tokenizer) == eos

    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    )

    assert end_ids(tokenizer) == eos | {tokenizer.convert_tokens_to_ids("<|im_end|>")}
