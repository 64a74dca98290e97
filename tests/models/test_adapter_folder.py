"""An adapter folder is a model with the same outputs as its base with the adapter in `peft`."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_opd.config.model import Lora, Student
from nemo_opd.demo import model_path
from nemo_opd.distributed.layout import Layout
from nemo_opd.distributed.process_group import build_mesh
from nemo_opd.errors import ModelError
from nemo_opd.models.adapter_folder import hub_commit, resolve
from nemo_opd.models.folder import OwnCard, check_folder, read_own_card
from nemo_opd.models.load import load_config, load_model, load_tokenizer
from nemo_opd.models.lora import Adapters, adapter_parameters
from nemo_opd.models.sharded_load import load_sharded
from nemo_opd.models.stored_weights import weights_fingerprint
from tests.models.families import VOCABULARY, save
from tests.models.world import alone

IDS = torch.arange(12).view(2, 6)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEMO_OPD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def trained(base: Path, folder: Path, rows: int | None = None, **settings: Any) -> Tensor:
    """Save an adapter with random weights; return peft's logits for IDS."""
    torch.manual_seed(1)
    base_model = AutoModelForCausalLM.from_pretrained(base)
    if rows is not None:
        base_model.resize_token_embeddings(rows)
    model = get_peft_model(base_model, LoraConfig(r=3, task_type="CAUSAL_LM", **settings)).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(str(folder))
    with torch.no_grad():
        logits: Tensor = model(input_ids=IDS).logits
    return logits


def logits_of(reference: Path | str) -> Tensor:
    with torch.no_grad():
        logits: Tensor = load_model(str(reference), torch.float32, key="model")(input_ids=IDS).logits
    return logits


KINDS: dict[str, dict[str, Any]] = {
    "linear layers": {"target_modules": "all-linear"},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "head whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "added tokens": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"], "rows": 70},
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_what_peft_does(kind: str, tmp_path: Path) -> None:
    """Bugs: an adapter on one of two tied matrices changes both; added tokens are refused; the adapter is ignored."""
    base = save("llama, tied", tmp_path)
    expected = trained(base, tmp_path / "adapter", **KINDS[kind])
    torch.testing.assert_close(logits_of(tmp_path / "adapter"), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(expected[..., :VOCABULARY], logits_of(base), atol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exported_adapter_is_the_merged_export(dtype: torch.dtype, tmp_path: Path) -> None:
    """Bug: a model loaded from `export: adapter` has other weights than `export: merged`."""
    base = save("llama, tied", tmp_path)
    AutoModelForCausalLM.from_pretrained(base, dtype=dtype).save_pretrained(base)
    adapters = Adapters(Lora(rank=3, alpha=12), str(base), 0)
    merged, adapted = (AutoModelForCausalLM.from_pretrained(base, dtype=dtype) for _ in range(2))
    adapters.attach(adapted)
    state = {name: torch.randn_like(parameter) for name, parameter in adapter_parameters(adapted)}
    adapters.save(state, adapted, tmp_path / "adapter")
    adapters.merge(state, merged)
    with alone():
        sharded = load_sharded(
            Student(model=str(tmp_path / "adapter")),
            dtype,
            build_mesh(Layout(1), "cpu"),
            key="teachers.0.model",
            compute_dtype=dtype,
            device="cpu",
            trainable=False,
        )
        for (name, weight), expected in zip(sharded.named_parameters(), merged.parameters(), strict=True):
            assert torch.equal(weight.detach(), expected), name


def test_the_base_is_found_from_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a relative base path that is not tried from both the working directory and the adapter's folder.

    Also an adapter whose base is an adapter.
    """
    base = save("llama, tied", tmp_path / "here")
    expected = trained(base, tmp_path / "here" / "adapter", target_modules=["q_proj"])
    for directory, named in ((tmp_path / "here", base.name), (tmp_path, f"../{base.name}"), (tmp_path, str(base))):
        monkeypatch.chdir(directory)
        rename_base(tmp_path / "here" / "adapter", named)
        torch.testing.assert_close(logits_of(tmp_path / "here" / "adapter"), expected, rtol=0, atol=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(resolve(str(tmp_path / "here" / "adapter")))
    second = get_peft_model(plain, LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False)).eval()
    second.save_pretrained(str(tmp_path / "second"))
    rename_base(tmp_path / "second", "here/adapter")
    torch.testing.assert_close(logits_of(tmp_path / "second"), second(input_ids=IDS).logits, rtol=0, atol=1e-5)


def rename_base(adapter: Path, named: str | None) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": named}))


def test_a_changed_adapter_or_base_is_merged_anew(tmp_path: Path) -> None:
    """Bug: the cached merge of an older adapter at the same path is evaluated."""
    base = save("llama, tied", tmp_path)
    first = trained(base, tmp_path / "adapter", target_modules=["q_proj"])
    fingerprints = [weights_fingerprint(str(folder), key="model") for folder in (base, tmp_path / "adapter")]
    assert resolve(str(tmp_path / "adapter")) == resolve(str(tmp_path / "adapter"))
    second = trained(base, tmp_path / "adapter", target_modules=["v_proj"])
    assert not torch.equal(first, second)
    torch.testing.assert_close(logits_of(tmp_path / "adapter"), second, rtol=0, atol=1e-5)
    fingerprints.append(weights_fingerprint(str(tmp_path / "adapter"), key="model"))
    assert len(set(fingerprints)) == 3
    base_model = AutoModelForCausalLM.from_pretrained(base)
    base_model.model.norm.weight.data *= 2
    base_model.save_pretrained(base)
    third = PeftModel.from_pretrained(base_model, str(tmp_path / "adapter"))(input_ids=IDS).logits
    torch.testing.assert_close(logits_of(tmp_path / "adapter"), third, rtol=0, atol=1e-5)


def test_the_tokenizer_is_the_adapters_else_the_bases(tmp_path: Path, cache: Path) -> None:
    """Bugs: tokens that an adapter's tokenizer adds are lost; a model is merged only to read its tokenizer."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(model_path("student"), base)
    trained(base, adapter, target_modules=["q_proj"])
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert len(load_tokenizer(str(adapter), key="model")) == len(tokenizer)
    assert not cache.exists()
    assert len(AutoTokenizer.from_pretrained(resolve(str(adapter)))) == len(tokenizer)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(adapter)
    for source in (str(adapter), resolve(str(adapter))):
        assert load_tokenizer(source, key="model").convert_tokens_to_ids("<new>") == len(tokenizer) - 1


def test_the_licence_is_the_bases(tmp_path: Path) -> None:
    base = save("llama, tied", tmp_path)
    trained(base, tmp_path / "adapter", target_modules=["q_proj"])
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    assert read_own_card(str(tmp_path / "adapter")).terms == "mit"


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("/no/such/model", "an adapter of the model /no/such/model, and there is no such folder"),
        (None, "does not say of which model"),
        ("adapter", "names this folder as its model"),
        ("nobody/nothing", "an adapter of the model nobody/nothing, and the two cannot be merged"),
    ],
)
def test_a_missing_base_is_said(
    named: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: `the folder has no config.json`."""
    monkeypatch.chdir(tmp_path)
    trained(save("llama, tied", tmp_path), tmp_path / "adapter", target_modules=["q_proj"])
    rename_base(tmp_path / "adapter", named)
    with pytest.raises(ModelError, match=expected) as error:
        load_config(str(tmp_path / "adapter"), key="teachers.0.model")
    assert str(error.value).startswith(f"teachers.0.model={tmp_path / 'adapter'}: ")


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    """Bug: adapter weights that do not fit the base are ignored, and the plain base is evaluated."""
    trained(save("llama, tied", tmp_path), tmp_path / "adapter", target_modules=["q_proj"])
    rename_base(tmp_path / "adapter", str(save("phi3, fused", tmp_path / "other")))
    with pytest.raises(ModelError, match="cannot be merged"):
        load_config(str(tmp_path / "adapter"), key="model")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match="without its weights"):
        check_folder(str(tmp_path / "adapter"), key="model")


def test_an_adapter_may_be_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an adapter in the hub's cache whose base, also in the cache, is not found offline."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    base = save("llama, tied", tmp_path)
    expected = trained(base, tmp_path / "adapter", target_modules=["q_proj"])
    rename_base(tmp_path / "adapter", "me/base")
    for folder, name in ((base, "base"), (tmp_path / "adapter", "adapter")):
        downloaded = tmp_path / "hub" / f"models--me--{name}"
        shutil.copytree(folder, downloaded / "snapshots" / "0123")
        (downloaded / "refs").mkdir()
        (downloaded / "refs" / "main").write_text("0123")
    torch.testing.assert_close(logits_of("me/adapter"), expected, rtol=0, atol=1e-5)


def test_a_hub_name_may_have_a_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the newest commit is read whatever the revision, and the run does not record which commit it used."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    downloaded = tmp_path / "hub" / "models--me--base"
    (downloaded / "refs").mkdir(parents=True)
    for revision, kind, commit in (("main", "llama, tied", "a" * 40), ("v1", "phi3, fused", "b" * 40)):
        shutil.copytree(save(kind, tmp_path / revision), downloaded / "snapshots" / commit)
        (downloaded / "refs" / revision).write_text(commit)
    assert load_config("me/base", key="model").model_type == "llama"
    assert load_config("me/base@v1", key="model").model_type == "phi3"
    assert load_config(f"me/base@{'b' * 40}", key="model").model_type == "phi3"
    assert [hub_commit(name) for name in ("me/base", "me/base@v1", str(tmp_path))] == ["a" * 40, "b" * 40, None]
    with pytest.raises(
        ModelError, match=r"model=me/base@v2: me/base could not be read from the hub at the revision v2"
    ):
        load_config("me/base@v2", key="model")


def test_adapters_that_name_each_other(tmp_path: Path) -> None:
    """Bug: a RecursionError."""
    for name, base in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": f"../{base}"}))
        save_file({"weight": torch.zeros(1)}, tmp_path / name / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"^.{0,200}names this folder as its model, itself or by another adapter"):
        check_folder(str(tmp_path / "a"), key="student.model")
    assert read_own_card(str(tmp_path / "a")) == OwnCard()


def test_pipes_and_devices_in_a_folder_are_not_read(tmp_path: Path) -> None:
    """Bugs: a check that hangs on a pipe; a card that fills memory."""
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "part.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part.safetensors"}}')
    with pytest.raises(ModelError, match=r"part\.safetensors is missing or damaged \(it is not a file\)"):
        check_folder(str(tmp_path), key="student.model")
    (tmp_path / "README.md").symlink_to("/dev/zero")
    assert read_own_card(str(tmp_path)) == OwnCard()
