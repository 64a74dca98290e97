"""Runs from Python: `nemo_opd.distil` and its on-policy sibling."""

from pathlib import Path

import pytest

import nemo_opd
from nemo_opd.errors import ConfigError
from tests.composition import compose

SETTINGS = {
    "train": {"max_steps": 2, "global_batch_size": 2, "micro_batch_size": 2, "max_length": 32},
    "student": {"model": "demo:student"},
    "teachers": [{"name": "t", "type": "cross_tokenizer", "model": "demo:teacher_cross", "dtype": "float32"}],
    "data": {"train": {"arrow_files": "demo:train"}, "packing": False},
    "cluster": {"launcher": "local"},
    "logging": {"console": {"enabled": False}},
}


def test_a_dict_of_settings_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    finished = nemo_opd.distil(SETTINGS | {"run": {"name": "mine"}})
    assert finished.output_dir.parent == Path("outputs/mine")
    assert finished.model is not None
    assert [record["step"] for record in finished.metrics] == [1, 2]


def test_a_recipe_with_overrides_is_a_run_of_either_kind(tmp_path: Path) -> None:
    here = ["cluster.launcher=local", "run.dry_run=true", f"run.output_dir={tmp_path / 'none'}"]
    for run, recipe in ((nemo_opd.distil, "off_policy_demo"), (nemo_opd.distil_on_policy, "on_policy_demo")):
        finished = run(recipe, here)
        assert (finished.output_dir, finished.model, finished.metrics) == (tmp_path / "none", None, [])
    assert not (tmp_path / "none").exists()


def test_settings_of_the_other_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"or use nemo-opd distil$"):
        nemo_opd.distil_on_policy(SETTINGS)
    with pytest.raises(ConfigError, match=r"or use nemo-opd distil-on-policy$"):
        nemo_opd.distil(compose(config_name="on_policy_demo"))
    with pytest.raises(ConfigError, match="only a file or a recipe takes overrides"):
        nemo_opd.distil(SETTINGS, ["train.max_steps=3"])
    with pytest.raises(ConfigError, match=r"did you mean train\.max_steps"):
        nemo_opd.distil(SETTINGS | {"train": {"max_step": 3}})
    with pytest.raises(AttributeError, match="nothing"):
        _ = nemo_opd.nothing
