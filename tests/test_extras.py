import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import nemo_opd
from nemo_opd import extras
from nemo_opd.cli.main import main
from nemo_opd.config.reward import ExactReward, MathReward
from nemo_opd.config.run_fields import Logging, Mlflow, TensorBoard, Trackio, Wandb
from nemo_opd.errors import ConfigError

SETTINGS: dict[str, tuple[Any, Any]] = {
    "logging.wandb.enabled=true": (Logging(wandb=Wandb(enabled=True)), None),
    "logging.tensorboard.enabled=true": (Logging(tensorboard=TensorBoard(enabled=True)), None),
    "logging.mlflow.enabled=true": (Logging(mlflow=Mlflow(enabled=True)), None),
    "logging.trackio.enabled=true": (Logging(trackio=Trackio(enabled=True)), None),
    "reward.type=math": (None, MathReward()),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_whose_library_is_missing_names_the_extra(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda _: True)
    extras.require_extras(*SETTINGS[setting])
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"^{setting}: needs the library (\w+), .*`pip install 'nemo-opd\[\w+\]'`"):
        extras.require_extras(*SETTINGS[setting])
    extras.require_extras(Logging(), ExactReward())


def test_runs_and_the_command_name_the_extra_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    way_out = r"\(argcomplete, datasets, .*\); run `pip install 'nemo-opd\[train\]'`"
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=rf"^nemo_opd\.distil: needs packages that are not installed {way_out}$"):
        _ = nemo_opd.distil
    with pytest.raises(SystemExit, match=rf"^nemo-opd cache build: needs .* {way_out}$"):
        main(["cache", "build"])
    assert nemo_opd.Callback.__name__ == "Callback"
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])


def test_the_extra_for_training_is_complete() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {re.split("[<>=]", line)[0].removesuffix("-core") for line in project["optional-dependencies"]["train"]}
    assert named == {*extras.TRAIN}


def test_the_extras_exist() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    for module, extra in extras.EXTRAS.items():
        name = module.replace("_", "-")
        assert any(line.startswith(name) for line in project["optional-dependencies"][extra])
        assert not any(line.startswith(name) for line in project["dependencies"])
