"""Recipes of strangers cannot run code through Hydra's own settings."""

import sys
from pathlib import Path

import pytest

from nemo_opd.config.composition import compose
from nemo_opd.errors import ConfigError
from tests.composition import configured

CALLBACK = "{attack: {_target_: tests.config.test_recipes_are_data.Attack}}"
DEMO = "defaults: [off_policy_demo, _self_]\n"
FILES = {
    "a section": {"mine.yaml": f"{DEMO}hydra: {{callbacks: {CALLBACK}}}\n"},
    "variables of the environment": {"mine.yaml": f"{DEMO}hydra: {{job: {{env_set: {{PATH: /tmp}}}}}}\n"},
    "an option": {
        "mine.yaml": "defaults: [off_policy_demo, override hydra/launcher: theirs, _self_]\n",
        "hydra/launcher/theirs.yaml": "_target_: tests.config.test_recipes_are_data.Attack\n",
    },
    "overrides of a sweep": {"mine.yaml": f"{DEMO}hydra: {{overrides: {{hydra: ['+hydra.callbacks={CALLBACK}']}}}}\n"},
    "a file that it builds on": {
        "mine.yaml": "defaults: [base, _self_]\n",
        "base.yaml": f"{DEMO}hydra: {{callbacks: {CALLBACK}}}\n",
    },
}
ran: list[str] = []


class Attack:
    def __init__(self, **_: object) -> None:
        ran.append("attack")


def written(folder: Path, files: dict[str, str]) -> str:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return str(folder / "mine.yaml")


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_a_file_cannot_set_hydra(tmp_path: Path, files: dict[str, str]) -> None:
    """Bug: a downloaded recipe ran its code, also with run.dry_run=true."""
    recipe = written(tmp_path, files)
    for attempt in (lambda: configured("--config", recipe, "run.dry_run=true"), lambda: compose(recipe)):
        with pytest.raises(
            ConfigError, match=r"mine.yaml: it sets hydra\.(callbacks|job|launcher|overrides); settings of Hydra"
        ):
            attempt()
    assert not ran


@pytest.mark.parametrize("arguments", [["loss=theirs"], ["--multirun", "loss=p_kl,theirs"]], ids=["one", "sweep"])
def test_an_option_of_a_group_cannot_set_hydra(tmp_path: Path, arguments: list[str]) -> None:
    """Bug: only the recipe itself was read, and not the options that the command line selects."""
    logs = "hydra: {job_logging: {handlers: {console: {(): tests.config.test_recipes_are_data.Attack}}}}"
    recipe = written(tmp_path, {"mine.yaml": DEMO, "loss/theirs.yaml": f"# @package _global_\n{logs}\n"})
    with pytest.raises(ConfigError, match=r"it sets hydra\.job_logging"):
        configured("--config", recipe, *arguments)
    assert not ran


def test_the_command_line_can(tmp_path: Path) -> None:
    """Bug: the user's own overrides are refused as the recipe's."""
    recipe = written(tmp_path, {"mine.yaml": DEMO})
    assert "tests.config.test_recipes_are_data" in sys.modules
    configured("--config", recipe, f"hydra.callbacks={CALLBACK}")
    assert ran.pop() == "attack"
    assert configured("--config", recipe, "train.max_steps=3").train.max_steps == 3


def test_a_target_in_a_section_is_an_unknown_key(tmp_path: Path) -> None:
    """Bug: `_target_`, which Hydra would call, is accepted as a setting."""
    recipe = written(tmp_path, {"mine.yaml": f"{DEMO}student: {{_target_: builtins.print}}\n"})
    with pytest.raises(ConfigError, match=r"student\._target_"):
        configured("--config", recipe)
