"""Loading models and tokenizers; an error names the key and the reason."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_opd.errors import ModelError
from nemo_opd.models import stored_weights
from nemo_opd.models.load import load_config, load_model, load_tokenizer
from tests.tiny import Tiny


@pytest.fixture
def copy(tiny: Tiny, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny.student, tmp_path / "model"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_loaded_in_the_precision_asked_for(tiny: Tiny, dtype: torch.dtype) -> None:
    model = load_model(str(tiny.student), dtype, key="student.model")
    expected = AutoModelForCausalLM.from_pretrained(tiny.student, dtype=torch.float32).state_dict()
    for name, value in model.state_dict().items():
        assert value.dtype == dtype
        assert torch.equal(value, expected[name].to(dtype)), name


def test_truncated_weights(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=rf"^student.model={copy}: model.safetensors "):
        load_model(str(copy), torch.float32, key="student.model")


def test_incomplete_folder(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=rf"teachers.0.model={copy}: .*no weights"):
        load_config(str(copy), key="teachers.0.model")


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"student.model=.*there is no such folder"):
        load_config(str(tmp_path / "nowhere"), key="student.model")


def test_tokenizer_that_is_not_there(copy: Path) -> None:
    for file in copy.glob("token*"):
        file.unlink()
    with pytest.raises(ModelError, match=f"student.tokenizer={copy}: "):
        load_tokenizer(str(copy), key="student.tokenizer")


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
@pytest.mark.parametrize("pattern", [{"String": "q"}, {"String": ""}, {"Regex": r"\b"}, {"Regex": "q?"}])
def test_tokenizer_that_makes_a_bomb_of_a_letter(copy: Path, part: str, pattern: dict[str, str]) -> None:
    """Bug: forty doublings of one letter fill memory."""
    settings = json.loads((copy / "tokenizer.json").read_text())
    doubling = {"type": "Replace", "pattern": pattern, "content": "qq"}
    settings[part] = {"type": "Sequence", f"{part}s": [doubling] * 40}
    (copy / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=f"the {part} in tokenizer.json may make more than 1,000 characters of one"):
        load_tokenizer(str(copy), key="student.tokenizer")


def test_tokenizer_that_writes_umlauts_as_two_letters(copy: Path) -> None:
    """Bug: replacements of different letters are multiplied, and a harmless tokenizer is refused."""
    settings = json.loads((copy / "tokenizer.json").read_text())
    settings["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Replace", "pattern": {"String": letter}, "content": "ae"} for letter in "äöüßàéíñåøæ"
        ],
    }
    (copy / "tokenizer.json").write_text(json.dumps(settings))
    load_tokenizer(str(copy), key="student.tokenizer")


def test_tokenizer_is_that_of_transformers(tiny: Tiny) -> None:
    text = "Größe 1234 🙂"
    ours = load_tokenizer(str(tiny.teacher_cross), key="teachers.0.tokenizer")
    assert ours(text).input_ids == AutoTokenizer.from_pretrained(tiny.teacher_cross)(text).input_ids


@pytest.mark.parametrize("is_pickled", [False, True])
def test_weights_on_the_hub_are_part_of_a_fingerprint(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_pickled: bool
) -> None:
    """Bug: before weights are downloaded only config.json is hashed, which models of a family share."""
    if is_pickled:
        (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()

    def downloaded(name: str, file: str, **_: object) -> str | None:
        assert name == "org/model"
        return str(shutil.copy(copy / file, snapshot)) if (copy / file).is_file() else None

    monkeypatch.setattr(stored_weights, "cached_file", downloaded)
    fingerprint = stored_weights.weights_fingerprint("org/model", key="teachers.0.model")
    monkeypatch.undo()
    assert fingerprint == stored_weights.weights_fingerprint(str(copy), key="teachers.0.model")
    next(iter(copy.glob("*model.*"))).write_bytes(b"others")
    assert fingerprint != stored_weights.weights_fingerprint(str(copy), key="teachers.0.model")
