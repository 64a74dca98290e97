"""Damaged or hostile model folders: a one-line error with the key before a run starts, and no code of theirs is run."""

import json
import re
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_opd.config.model import Student
from nemo_opd.errors import OPDError
from nemo_opd.preflight.model_info import read_model_info
from tests.tiny import Tiny

WEIGHTS, INDEX, CONFIG, TOKENIZER = (
    "model.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "tokenizer.json",
)


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny.student, tmp_path / "model"))


def refusal(folder: Path) -> str:
    with pytest.raises(OPDError) as caught:
        read_model_info(Student(model=str(folder)), "student", "cpu")
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def rewritten(file: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 10**6}, "says 1000000 layers, but its weights are"),
        ({"num_hidden_layers": 0}, "says 0 layers"),
        ({"vocab_size": 0}, "embed_tokens.weight is .*, the model has .0,"),
        ({"vocab_size": 10**9}, "embed_tokens.weight is .*, the model has .1000000000"),
        ({"num_attention_heads": 7}, r"no model configuration could be read \(.*attention heads \(7\)"),
        ({"num_attention_heads": 0}, r"no model configuration could be read \(ZeroDivisionError"),
        ({"hidden_act": "os.system"}, r"no model can be built .* \(KeyError: 'os.system'\)"),
        ({"dtype": "float128"}, "no model configuration could be read .*float128"),
        ({"attn_implementation": "evil/repo"}, "asks for the attention 'evil/repo', which is code from the hub"),
        ({"_attn_implementation": "evil/repo"}, "asks for the attention 'evil/repo', which is code from the hub"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_configuration_that_describes_no_model(folder: Path, changes: dict[str, object], reason: str) -> None:
    rewritten(folder / CONFIG, lambda config: config.update(changes))
    assert re.match(f"student.model={folder}: .*{reason}", refusal(folder))


@pytest.mark.parametrize("content", [b"{", b"[]", bytes(range(128, 256)), b'{"a":' * 100_000 + b"1" + b"}" * 100_000])
def test_a_configuration_that_is_none(folder: Path, content: bytes) -> None:
    (folder / CONFIG).write_bytes(content)
    assert refusal(folder).startswith(f"student.model={folder}: no model configuration could be read (")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[]", "it has no weight_map"),
        ('{"weight_map": [1]}', "it has no weight_map"),
        ('{"weight_map": {"a": 5}}', "it names 5, which is not a file of the model's folder"),
        ('{"weight_map": {"a": "../other/model.safetensors"}}', "'../other/model.safetensors', which is not a file"),
        ('{"weight_map": {"a": "/etc/model.safetensors"}}', "'/etc/model.safetensors', which is not a file"),
        ("[" * 100_000, "maximum recursion depth"),
    ],
    ids=["list", "list of tensors", "number", "parent", "absolute", "deep"],
)
@pytest.mark.parametrize("index", [INDEX, "pytorch_model.bin.index.json"])
def test_an_index_that_is_none_or_leaves_the_folder(folder: Path, index: str, content: str, reason: str) -> None:
    shutil.copytree(folder, folder.parent / "other")
    (folder / WEIGHTS).unlink()
    (folder / index).write_text(content)
    assert f"{index} is damaged (" in (message := refusal(folder))
    assert reason in message


def test_a_shard_that_is_not_there(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    assert "model-00001-of-00002.safetensors is missing or damaged" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e4m3fn], ids=str)
def test_weights_that_are_no_numbers_to_compute_with(folder: Path, dtype: torch.dtype) -> None:
    """Bug: codes of quantised weights are trained as if they were weights, without their scales."""
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    save_file(tensors, folder / WEIGHTS)
    assert "model.norm.weight is of type" in refusal(folder)


@pytest.mark.parametrize("size", [0, 7])
def test_a_tensor_of_another_size(folder: Path, size: int) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {"model.norm.weight": torch.ones(size)}, folder / WEIGHTS)
    assert f"model.norm.weight is [{size}], the model has" in refusal(folder)


def test_a_tensor_that_is_missing(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / WEIGHTS)
    assert "1 weights are missing (model.norm.weight)" in refusal(folder)


@pytest.mark.parametrize(
    "content",
    [b"", struct.pack("<Q", 2**62) + b"{}", struct.pack("<Q", 2) + b"[]"],
    ids=["empty", "header of 4 EiB", "list"],
)
def test_a_file_that_is_no_safetensors(folder: Path, content: bytes) -> None:
    (folder / WEIGHTS).write_bytes(content)
    assert f"{WEIGHTS} is missing or damaged (" in refusal(folder)


def test_a_folder_with_a_tokenizer_alone(tmp_path: Path) -> None:
    """Bug: "the folder has no config.json", without a word on the folder's files or the remedy."""
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    message = refusal(tmp_path)
    assert "has a tokenizer (tokenizer.model) without its model's config.json" in message
    assert "Hugging Face form" in message


def test_a_gguf_file_and_a_folder_of_one(folder: Path) -> None:
    """Bug: the message denies that the folder exists."""
    (folder / CONFIG).unlink()
    (folder / "model.gguf").write_bytes(b"GGUF\3\0\0\0")
    for reference in (folder, folder / "model.gguf"):
        message = refusal(reference)
        assert "GGUF" in message
        assert "Hugging Face form" in message
    assert "it is a file, and not a folder" in refusal(folder / WEIGHTS)


def test_a_sentencepiece_model_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the message asks for `tiktoken` when sentencepiece is missing."""
    (folder / TOKENIZER).unlink()
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.setattr("nemo_opd.models.folder.find_spec", lambda _: None)
    assert "pip install sentencepiece" in refusal(folder)


def renumber_last_token(id_: int) -> Callable[[Any], object]:
    def change(content: Any) -> None:
        vocabulary = content["model"]["vocab"]
        vocabulary[list(vocabulary)[-1]] = id_

    return change


def panic_in_normalizer(content: Any) -> None:
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


def panic_in_post_processor(content: Any) -> None:
    single = [{"SpecialToken": {"id": "<missing>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    content["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content.clear(), "no tokenizer could be loaded"),
        (panic_in_normalizer, "no tokenizer could be loaded .*precompiled_charsmap"),
        (panic_in_post_processor, "no tokenizer could be loaded .*no entry found for key"),
        (renumber_last_token(-1), "no tokenizer could be loaded .*-1"),
        (renumber_last_token(2**25), "has the id 33,554,432"),
        pytest.param(renumber_last_token(4_000_000_000), "has the id 4,000,000,000", marks=pytest.mark.nightly),
        (renumber_last_token(1_000_000), "has ids up to 1000000, but"),
    ],
    ids=[
        "empty",
        "panic",
        "later panic",
        "negative id",
        "id of no tokenizer",
        "id that no list can reach",
        "beyond the embeddings",
    ],
)
def test_a_tokenizer_that_is_none(folder: Path, change: Callable[[Any], object], reason: str) -> None:
    rewritten(folder / TOKENIZER, change)
    assert re.search(reason, refusal(folder))


CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from transformers import LlamaConfig as C, LlamaForCausalLM as M, PreTrainedTokenizerFast as T
"""


@pytest.mark.parametrize("file", [CONFIG, "tokenizer_config.json"])
def test_code_of_a_model_is_neither_run_nor_asked_about(
    folder: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: transformers prompts at the terminal during preflight, and a worker would wait for the answer."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    (folder / "evil.py").write_text(CODE)
    maps = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": [None, "evil.T"]}
    kind = {"model_type": "evil"} if file == CONFIG else {"tokenizer_class": "Evil"}
    rewritten(folder / file, lambda content: content.update(auto_map=maps, **kind))
    assert "(it needs Python code that comes with it, which is never run)" in refusal(folder)
    assert not (folder / "ran").exists()


def test_more_layers_than_any_model_has_where_tensors_cannot_be_counted(folder: Path) -> None:
    """Bug: building a million layers takes minutes, then the process is killed for its memory."""
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    rewritten(folder / CONFIG, lambda config: config.update(num_hidden_layers=10**6))
    assert "says 1000000 layers, but no model has that many" in refusal(folder)
