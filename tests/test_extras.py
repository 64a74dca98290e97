import tomllib
from pathlib import Path
from typing import Any

import pytest

from nemo_opd import extras
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


def test_the_extras_exist() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    for module, extra in extras.EXTRAS.items():
        name = module.replace("_", "-")
        assert any(line.startswith(name) for line in project["optional-dependencies"][extra])
        assert not any(line.startswith(name) for line in project["dependencies"])
