"""Every YAML in configs/ composes into valid settings, and the recipes say what they are meant to."""

from pathlib import Path

import pytest
import yaml

from nemo_opd.config.load import from_dict, from_yaml, to_yaml
from tests.composition import CONFIGS, DEMO, PRODUCTION, compose

TOP_LEVEL = sorted(file.stem for file in CONFIGS.glob("*.yaml"))
OPTIONS = sorted(f"{file.parent.name}={file.stem}" for file in CONFIGS.glob("*/*.yaml"))
NEEDED = {
    "loss=same_vocab": ["teachers.0.loss.type=p_kl"],
    "aggregation=averaged_logits": ["teachers.0.type=same_tokenizer"],
}
"""What an option needs beside it: the recipes have a cross-tokenizer teacher."""


def test_all_files_are_covered() -> None:
    """A folder deeper or a `.yml` would be composed by no test here."""
    assert len(TOP_LEVEL) + len(OPTIONS) == len([file for file in CONFIGS.rglob("*") if file.is_file()])
    assert {DEMO, PRODUCTION} <= set(TOP_LEVEL)


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_a_top_level_file_composes(name: str) -> None:
    compose(config_name=name)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", TOP_LEVEL)
def test_an_option_of_a_group_composes(name: str, option: str) -> None:
    compose(option, *NEEDED.get(option, []), config_name=name)


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_a_resolved_config_says_everything(name: str) -> None:
    """What a run writes as config.yaml gives the same settings, with no default left out."""
    config = compose("run.output_dir=/runs/a", config_name=name)
    written = yaml.safe_load(to_yaml(config))

    assert from_dict(written) == config
    assert to_yaml(from_dict(written)) == to_yaml(config)
    assert {"betas", "eps", "lr"} <= written["student"]["optimizer"].keys()


def test_a_resolved_config_is_read_from_its_file(tmp_path: Path) -> None:
    config = compose('student.model="/models/größe"', "teachers.0.weight=0.1")
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")

    assert from_yaml(tmp_path / "config.yaml") == config


def test_the_production_recipe() -> None:
    config = compose(config_name=PRODUCTION)

    assert config.student.model == "meta-llama/Llama-3.2-1B"
    assert [(teacher.model, teacher.type) for teacher in config.teachers] == [
        ("microsoft/Phi-4-mini-instruct", "cross_tokenizer"),
        ("meta-llama/Llama-3.2-3B", "same_tokenizer"),
    ]
    assert [config.term(i).type for i in range(2)] == ["p_kl", "same_vocab"]
    assert (config.train.global_batch_size, config.train.max_length) == (64, 2048)
    optimizer, scheduler = config.student.optimizer, config.student.scheduler
    assert (optimizer.type, optimizer.lr, optimizer.betas, optimizer.weight_decay) == ("adamw", 5e-5, (0.9, 0.95), 1e-3)
    assert (scheduler.type, scheduler.warmup_steps) == ("cosine", 250)
    assert config.train.gradient_clip == 1.0
    assert config.data.train.given == {}
    assert yaml.safe_load((CONFIGS / "data" / "files.yaml").read_text())["train"] == {"arrow_files": None}


def test_the_demo_needs_nothing_from_outside() -> None:
    config = compose(config_name=DEMO)
    references = [config.student.model, *(teacher.model for teacher in config.teachers)]

    assert all(reference.startswith("demo:") for reference in references)
    assert config.data.train.arrow_files == ("demo:train",)
    assert not config.logging.wandb.enabled
