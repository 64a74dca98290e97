"""The shipped demo models load as users load them, and form the same- and cross-tokenizer pairs of the demo."""

import sysconfig
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from nemo_opd.demo import MODEL_NAMES, is_demo, model_path
from nemo_opd.errors import ModelError

TEXTS = (
    "def f(x):\n    return x + 12345 * 100\n\n\n",
    "naïve café — 日本語, ﷽, 👩‍👩‍👧‍👦 e\u0301 \u00a0\t\r\n  end",
    "".join(map(chr, range(256))),
)


def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_path(name))


def test_references() -> None:
    assert is_demo("demo:student")
    assert not is_demo("student")
    assert not is_demo("org/demo:student")
    with pytest.raises(ModelError, match=r"demo:big: .*demo:student, demo:teacher_same, demo:teacher_cross"):
        model_path("big")


def test_all_models_stay_under_six_megabytes() -> None:
    """Bugs: fp32 weights, a tied head saved twice, or indented tokenizer files in the package."""
    files = [file for name in MODEL_NAMES for file in model_path(name).rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 6_000_000


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_model_loads_and_predicts_python(name: str) -> None:
    """Bug: weights that do not belong to config or tokenizer. A uniform guess scores log2(V) >= 11 bits a token."""
    torch.set_num_threads(1)
    tokenizer = tokenizer_of(name)
    model = AutoModelForCausalLM.from_pretrained(model_path(name), dtype=torch.float32)
    source = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_text(encoding="utf-8")[20_000:20_700]
    ids = tokenizer(source, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        nats = model(ids, labels=ids).loss.item()
    assert nats / torch.log(torch.tensor(2.0)).item() < 11 * 0.75


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_weights_are_bfloat16_and_tied(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path(name))
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("name", MODEL_NAMES)
@pytest.mark.parametrize("text", TEXTS, ids=["code", "unicode", "latin-1 range"])
def test_text_survives_the_tokenizer(name: str, text: str) -> None:
    """Bug: a normaliser, a prefix space, an unknown token, or special tokens that are added unasked."""
    tokenizer = tokenizer_of(name)
    ids = tokenizer(text)["input_ids"]
    assert not set(ids) & set(tokenizer.all_special_ids)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_id_decodes_and_special_tokens_are_in_the_config(name: str) -> None:
    """Bug: holes in the vocabulary, or a config whose end and pad ids are another tokenizer's."""
    tokenizer = tokenizer_of(name)
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    assert all(tokenizer.decode([i]) for i in range(len(tokenizer)))
    model = AutoModelForCausalLM.from_pretrained(model_path(name))
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == tokenizer.eos_token_id
        assert config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_student_and_teacher_same_share_a_tokenizer() -> None:
    student, teacher = (model_path(name) / "tokenizer.json" for name in ("student", "teacher_same"))
    assert student.read_bytes() == teacher.read_bytes()


def test_the_cross_teacher_differs_in_digits_vocabulary_and_special_tokens() -> None:
    """Bug: a cross pair that does not exercise the cross-tokenizer code."""
    student, teacher = tokenizer_of("student"), tokenizer_of("teacher_cross")
    assert [len(student.tokenize(number)) for number in ("100", "12")] == [1, 1]
    assert [len(teacher.tokenize(number)) for number in ("100", "12")] == [3, 2]
    assert all(sum(c.isdigit() for c in piece) <= 3 for piece in student.get_vocab())
    assert all(sum(c.isdigit() for c in piece) <= 1 for piece in teacher.get_vocab())
    assert not set(student.all_special_tokens) & set(teacher.all_special_tokens)
    assert len(student) < len(teacher)
    assert student.tokenize(TEXTS[0]) != teacher.tokenize(TEXTS[0])


def test_only_the_cross_teacher_has_a_padded_head() -> None:
    """Bug: no test cuts padded columns off."""
    padding = {
        name: AutoModelForCausalLM.from_pretrained(model_path(name)).config.vocab_size - len(tokenizer_of(name))
        for name in MODEL_NAMES
    }
    assert padding["student"] == padding["teacher_same"] == 0
    assert 0 < padding["teacher_cross"] < 64
