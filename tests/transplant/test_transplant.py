"""Model folders with another tokenizer: their outputs, their files, and refused arguments."""

import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from nemo_opd.errors import AlignmentError, CheckpointError, DataError, ModelError
from nemo_opd.transplant import transplant
from tests.models.families import FAMILIES, MIXTURES
from tests.models.test_text_part import WHOLE
from tests.tokenizers_fixture import DIGITS_BY_THREE, DIGITS_ONE_BY_ONE, byte_level, word_piece
from tests.transplant.oracle import contents, dense_map

NEW = byte_level(330, DIGITS_BY_THREE, eos="<|eot_id|>", extra=("<|begin_of_text|>",))
OLD = byte_level(300, DIGITS_ONE_BY_ONE, eos="<|im_end|>", extra=("<|endoftext|>", "<|im_start|>"))
OLD_ROWS = 304
MULTIMODAL = {kind: WHOLE[kind] for kind in ("gemma3", "llava", "qwen3_vl")}


def filled(config: PretrainedConfig, **sizes: object) -> PreTrainedModel:
    """Return a model whose weights are all random: biases of 0 would hide one that is not mapped."""
    config = deepcopy(config)
    # Without ids of special tokens, which belong to other tokenizers.
    config.get_text_config().update({"vocab_size": OLD_ROWS, "bos_token_id": None, **sizes})
    kind = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
    model: PreTrainedModel = kind.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def save_old(model: PreTrainedModel, folder: Path, **options: object) -> Path:
    model.save_pretrained(folder, **options)
    OLD.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with only a tokenizer."""
    folder = tmp_path_factory.mktemp("new")
    NEW.save_pretrained(folder)
    return folder


def exact_pairs() -> Tensor:
    """Return new and old ids [P, 2] of the same bytes or role, from the dense map's rows with one entry."""
    dense = dense_map(NEW, OLD, "bytes")
    pairs = [(i, int(dense[i].argmax())) for i in range(len(dense)) if np.count_nonzero(dense[i]) == 1]
    new, old = contents(NEW), contents(OLD)
    return torch.tensor([pair for pair in pairs if new.get(pair[0]) == old.get(pair[1])])


def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES, *MULTIMODAL])
def test_what_reads_and_predicts_shared_tokens_is_the_old_model(family: str, new: Path, tmp_path: Path) -> None:
    """Bugs: a head, bias, scale or one of two tied matrices is not mapped; another weight changes or loses its name.

    Texts of tokens that both vocabularies have are read alike, so the logits of such tokens do not change.
    """
    model = filled({**FAMILIES, **MIXTURES, **MULTIMODAL}[family])
    old = save_old(model, tmp_path / "old", max_shard_size="30KB")
    assert len(list(old.glob("*.safetensors"))) > 1
    transplant(str(old), str(new), tmp_path / "made")
    new_model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "made", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert new_model.config.vocab_size == len(NEW)
    pairs = exact_pairs()[::7]
    assert len(pairs) > 30
    text = torch.arange(20).view(2, 10)
    expected = logits(model, pairs[text, 1])[..., pairs[:, 1]]
    # Products of other widths sum in another order in fp32.
    torch.testing.assert_close(logits(new_model, pairs[text, 0])[..., pairs[:, 0]], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_matrices_and_all_else(tied: bool, dtype: torch.dtype, new: Path, tmp_path: Path) -> None:
    """Bugs: weights are written in the dtype of the computation; the index lacks a shard; padding is not the mean."""
    model = filled(FAMILIES["qwen3, norms of heads"], tie_word_embeddings=tied).to(dtype)
    old = save_old(model, tmp_path / "old", max_shard_size="20KB")
    result = transplant(str(old), str(new), tmp_path / "made", pad_to_multiple=64, weighting="uniform")
    index = json.loads((tmp_path / "made" / "model.safetensors.index.json").read_text())
    stored: dict[str, Tensor] = {}
    for file in set(index["weight_map"].values()):
        stored |= load_file(tmp_path / "made" / file)
    assert stored.keys() == index["weight_map"].keys()
    assert sum(value.nbytes for value in stored.values()) == index["metadata"]["total_size"]
    assert ("lm_head.weight" in stored) is not tied
    dense = torch.from_numpy(dense_map(NEW, OLD, "uniform"))
    for name, old_value in model.state_dict().items():
        if name not in ("model.embed_tokens.weight", "lm_head.weight"):
            assert torch.equal(stored[name], old_value), name
        elif name in stored:
            rows = old_value[: dense.shape[1]].double()
            expected = dense @ rows
            expected[dense.sum(1) == 0] = rows.mean(0)
            expected = torch.cat([expected, rows.mean(0).expand(384 - len(dense), -1)])
            assert stored[name].dtype == dtype
            torch.testing.assert_close(stored[name].double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-12)
    assert (result.rows.total, result.old_vocab_size) == (384, OLD_ROWS)
    assert result.rows.tokens == len(NEW)
    assert result.is_tied is tied


def test_there_and_back(new: Path, tmp_path: Path) -> None:
    """Bug: rows of shared tokens change a little each time."""
    old = save_old(filled(FAMILIES["llama, tied"]), tmp_path / "old")
    transplant(str(old), str(new), tmp_path / "there")
    transplant(str(tmp_path / "there"), str(old), tmp_path / "back")
    folders = (old, tmp_path / "back")
    original, returned = (load_file(folder / "model.safetensors")["model.embed_tokens.weight"] for folder in folders)
    shared = exact_pairs()[:, 1]
    assert torch.equal(returned[shared], original[shared])
    assert len(returned) == len(OLD)


def test_special_ids_of_the_configurations(new: Path, tmp_path: Path) -> None:
    """Bugs: the new configuration has old ids; the end of a turn is lost; lists of old tokens forbid new ones."""
    old = save_old(filled(FAMILIES["llama, tied"], pad_token_id=5), tmp_path / "old")
    ids = {token: OLD.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")}
    written = {"eos_token_id": list(ids.values()), "bos_token_id": 7, "suppress_tokens": [9], "temperature": 0.6}
    (old / "generation_config.json").write_text(json.dumps(written))
    result = transplant(str(old), str(new), tmp_path / "made")
    generation = json.loads((tmp_path / "made" / "generation_config.json").read_text())
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    end = NEW.convert_tokens_to_ids("<|eot_id|>")
    assert generation["eos_token_id"] == [end]
    assert generation["temperature"] == 0.6
    assert config["eos_token_id"] == end
    # Old id 7 is an ordinary token with a counterpart, which stays because the new tokenizer has no bos.
    counterpart = {int(b): int(a) for a, b in exact_pairs()}
    assert generation["bos_token_id"] == counterpart[7]
    assert config["pad_token_id"] == counterpart[5]
    assert "suppress_tokens" not in generation
    assert result.left_out == ("suppress_tokens",)
    paired = {pair.student: pair.teacher for pair in result.special}
    assert paired["<|eot_id|>"] == "<|im_end|>"
    new_rows = load_file(tmp_path / "made" / "model.safetensors")["model.embed_tokens.weight"]
    old_rows = load_file(old / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(new_rows[end], old_rows[ids["<|im_end|>"]])


def test_roles_and_the_template_of_the_user(new: Path, tmp_path: Path) -> None:
    old = save_old(filled(FAMILIES["llama, tied"]), tmp_path / "old")
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}<|eot_id|>")
    roles = {"<|begin_of_text|>": "start", "<|im_start|>": "start"}
    without_roles = transplant(str(old), str(new), tmp_path / "without")
    result = transplant(str(old), str(new), tmp_path / "made", roles=roles, chat_template=str(template))
    assert {pair.student: pair.teacher for pair in result.special}["<|begin_of_text|>"] == "<|im_start|>"
    assert "<|begin_of_text|>" in [row.token for row in without_roles.unreached]
    assert "<|begin_of_text|>" not in [row.token for row in result.unreached]
    chat = AutoTokenizer.from_pretrained(tmp_path / "made").apply_chat_template(
        [{"role": "user", "content": "The fox"}], tokenize=False
    )
    assert chat == "The fox<|eot_id|>"


@pytest.mark.parametrize("tied", [True, False])
def test_random_rows(tied: bool, new: Path, tmp_path: Path) -> None:
    """Bugs: copied rows are drawn; a head shares the embeddings' noise, or a tied head does not."""
    model = filled(FAMILIES["llama, tied"], tie_word_embeddings=tied)
    old = save_old(model, tmp_path / "old")
    if tied:  # as some checkpoints are stored
        weights = load_file(old / "model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, old / "model.safetensors", metadata={"format": "pt"})
    weights_by_run = {}
    for name, options in {
        "whole": {},
        "all": {"random": "all"},
        "again": {"random": "all"},
        "other": {"random": "all", "seed": 1},
        "unmatched": {"random": "unmatched"},
    }.items():
        transplant(str(old), str(new), tmp_path / name, **options)
        weights_by_run[name] = load_file(tmp_path / name / "model.safetensors")
    embeddings = {name: run_weights["model.embed_tokens.weight"] for name, run_weights in weights_by_run.items()}
    matched = exact_pairs()[:, 0]
    is_unmatched = torch.ones(len(NEW), dtype=torch.bool)
    is_unmatched[matched] = False
    assert torch.equal(embeddings["all"], embeddings["again"])
    assert (embeddings["all"] != embeddings["other"]).all()
    assert (embeddings["all"][matched] != embeddings["whole"][matched]).all()
    assert torch.equal(embeddings["unmatched"][matched], embeddings["whole"][matched])
    assert (embeddings["unmatched"][is_unmatched] != embeddings["whole"][is_unmatched]).all()
    head = weights_by_run["all"]["lm_head.weight"]
    if tied:
        assert torch.equal(head, embeddings["all"])
    else:
        assert torch.corrcoef(torch.stack([head.flatten(), embeddings["all"].flatten()]))[0, 1].abs() < 0.1


def test_bits_per_byte_are_those_of_the_same_bytes(new: Path, tmp_path: Path) -> None:
    """Bugs: the old model reads new tokens; other bytes are scored after than before; the softmax includes padding."""
    old = save_old(filled(FAMILIES["llama, tied"]), tmp_path / "old")
    texts = ["The quick brown fox jumps over 1234 dogs.", "Größe und 東京タワー 👍🏽\n\n    return x + 1"]
    result = transplant(str(old), str(new), tmp_path / "made", texts=texts, pad_to_multiple=64, device="cpu")
    read = [(tokenizer, [tokenizer(text).input_ids for text in texts]) for tokenizer in (OLD, NEW)]
    starts = [min(cuts(OLD, a) & cuts(NEW, b)) for a, b in zip(read[0][1], read[1][1], strict=True)]
    num_bytes = sum(len(text.encode()) - start for text, start in zip(texts, starts, strict=True))
    assert result.bits_per_byte is not None
    assert result.bits_per_byte.num_bytes == num_bytes
    for folder, (tokenizer, rows), actual in zip(
        (old, tmp_path / "made"), read, (result.bits_per_byte.before, result.bits_per_byte.after), strict=True
    ):
        model, bits = AutoModelForCausalLM.from_pretrained(folder), 0.0
        for ids, start in zip(rows, starts, strict=True):
            log_p = logits(model, torch.tensor([ids]))[0, :, : len(tokenizer)].double().log_softmax(1) / np.log(2)
            ends = np.cumsum([len(piece) for piece in pieces(tokenizer, ids)])
            bits -= sum(float(log_p[i - 1, ids[i]]) for i in range(1, len(ids)) if ends[i] > start)
        assert actual == pytest.approx(bits / num_bytes, rel=1e-5)


def pieces(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    """Return byte-level tokens, with one character for each byte."""
    return tokenizer.convert_ids_to_tokens(ids)


def cuts(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> set[int]:
    """Return the ends of tokens, in bytes."""
    return set(np.cumsum([len(piece) for piece in pieces(tokenizer, ids)]).tolist())


def test_tensors_that_the_model_does_not_read_are_left_out(new: Path, tmp_path: Path) -> None:
    """Bug: a second table of embeddings, as for heads that predict several tokens, keeps the old vocabulary."""
    old = save_old(filled(FAMILIES["llama, tied"]), tmp_path / "old")
    weights = load_file(old / "model.safetensors")
    save_file({**weights, "model.mtp.embed_tokens.weight": torch.ones(OLD_ROWS, 16)}, old / "model.safetensors")
    assert transplant(str(old), str(new), tmp_path / "made").left_out == ("model.mtp.embed_tokens.weight",)
    assert load_file(tmp_path / "made" / "model.safetensors").keys() == weights.keys()


REFUSED = {
    "no model": (ModelError, "--model={missing}: "),
    "no tokenizer": (ModelError, "--tokenizer={missing}: "),
    "the same tokenizer": (ModelError, "--tokenizer={old}: {old} has this tokenizer already; name another one"),
    "words": (AlignmentError, "WordPiece"),
    "output in use": (CheckpointError, "--output={output}: "),
    "no safetensors": (ModelError, "--model={old}: it has no safetensors files"),
    "damaged": (ModelError, "--model={old}: model.safetensors "),
    "a short text": (DataError, "the texts have no byte that both models predict"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_one_message_and_leaves_nothing(case: str, new: Path, tmp_path: Path) -> None:
    old, output, missing = save_old(filled(FAMILIES["llama, tied"]), tmp_path / "old"), tmp_path / "made", "/nowhere"
    model, tokenizer, texts = str(old), str(new), []
    match case:
        case "no model":
            model = missing
        case "no tokenizer":
            tokenizer = missing
        case "the same tokenizer":
            tokenizer = str(old)
        case "words":
            word_piece().save_pretrained(tmp_path / "words")
            tokenizer = str(tmp_path / "words")
        case "output in use":
            output.mkdir()
            (output / "mine").touch()
        case "no safetensors":
            torch.save(load_file(old / "model.safetensors"), old / "pytorch_model.bin")
            (old / "model.safetensors").unlink()
        case "damaged":
            (old / "model.safetensors").write_bytes((old / "model.safetensors").read_bytes()[:-9])
        case "a short text":
            texts = ["T"]
    kind, message = REFUSED[case]
    entries = sorted(tmp_path.rglob("*"))
    with pytest.raises(kind) as error:
        transplant(model, tokenizer, output, texts=texts)
    assert message.format(old=old, output=output, missing=missing) in str(error.value)
    assert "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == entries


def test_a_failure_while_writing_leaves_nothing(new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a folder that looks like a model but lacks files."""
    old = save_old(filled(FAMILIES["llama, tied"]), tmp_path / "old")

    def broken(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", broken)
    with pytest.raises(CheckpointError, match="could not be written"):
        transplant(str(old), str(new), tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_further_embeddings_of_tokens_are_refused(tmp_path: Path) -> None:
    """Bug: layers with separate embedding tables keep rows of the old vocabulary."""
    from transformers import Gemma3nTextConfig

    from nemo_opd.models.load import build_on_meta
    from nemo_opd.transplant.matrices import vocabulary_weights

    config = Gemma3nTextConfig(
        vocab_size=40, vocab_size_per_layer_input=32, hidden_size=16, num_hidden_layers=2, num_kv_shared_layers=0
    )
    with pytest.raises(ModelError, match=r"--model=m: \S*embed_tokens_per_layer is a second matrix"):
        vocabulary_weights(build_on_meta(config, "m", key="--model"), "m", key="--model")
