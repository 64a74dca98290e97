"""A run with a quantised mixture of experts, a quantised dense model and one that also reads images as teachers."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nemo_opd.logging.loggers import read
from tests.models import test_quantised, test_text_part
from tests.tiny import Tiny
from tests.training.launch import run_here

pytestmark = pytest.mark.world


def test_quantised_teachers_give_the_kd_of_their_plain_weights(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs: a head larger than the tokenizer; a model that is loaded in another layout than planned; an image tower
    whose text part is not found; layers that are streamed although there is no device to stream them to.
    """
    monkeypatch.setenv("NEMO_OPD_CACHE", str(tmp_path / "cache"))
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (tiny.student, tiny.teacher_cross))
    test_quantised.save_fp8(tmp_path / "dense", vocab_size=len(ours))
    test_quantised.save_mxfp4(tmp_path / "experts", vocab_size=len(theirs))
    test_text_part.save("qwen3_vl", tmp_path / "images", vocab_size=len(ours))
    ours.save_pretrained(tmp_path / "images")
    kinds = ("quantised", "plain")
    for kind in kinds:
        ours.save_pretrained(tmp_path / "dense" / kind)
        theirs.save_pretrained(tmp_path / "experts" / kind)

    outputs = [run_here(tmp_path / kind, overrides(tiny, tmp_path, kind)) for kind in kinds]
    quantised, plain = (read(output / "metrics.jsonl")[-1] for output in outputs)
    for name in ("dense", "experts", "images"):
        assert quantised[f"train/kd/{name}"] == pytest.approx(plain[f"train/kd/{name}"], rel=0.02), name


def overrides(tiny: Tiny, folder: Path, kind: str) -> list[str]:
    teachers = [
        f"{{name: dense, type: same_tokenizer, model: {folder}/dense/{kind}}}",
        f"{{name: experts, type: cross_tokenizer, model: {folder}/experts/{kind}, offload: layers}}",
        f"{{name: images, type: same_tokenizer, model: {folder}/images}}",
    ]
    settings = [setting for setting in tiny.overrides("train.max_steps=2") if not setting.startswith("teachers")]
    return [*settings, f"teachers=[{','.join(teachers)}]"]
