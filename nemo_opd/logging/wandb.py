"""Weights & Biases, online or offline, with its files in the run's directory."""

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_opd.config.logging import Wandb
from nemo_opd.errors import ConfigError
from nemo_opd.logging.base import RunSummary
from nemo_opd.logging.facts import read_config
from nemo_opd.logging.tracker import Tracker


def check_credentials() -> None:
    """Raise ConfigError if mode=online has no usable API key, instead of letting wandb prompt for one."""
    import wandb

    remedy = "set WANDB_API_KEY, run `wandb login`, or use logging.wandb.mode=offline and `wandb sync` later"
    try:
        logged_in = wandb.login(prompt=False)
    except wandb.errors.Error as error:
        raise ConfigError(f"logging.wandb.mode=online: the API key is not usable ({error}); {remedy}") from error
    if not logged_in:
        raise ConfigError(f"logging.wandb.mode=online needs an API key and none is configured; {remedy}")


class WandbLogger(Tracker):
    """Reports to wandb."""

    name = "wandb"

    def __init__(self, settings: Wandb, output_dir: Path) -> None:
        super().__init__(output_dir)
        if settings.mode == "online":
            check_credentials()
        self._settings = settings
        self._run: Any = None

    def _open(self, run: RunSummary, previous: str | None) -> str:
        import wandb

        online = self._settings.mode == "online"
        identity = previous or uuid.uuid4().hex[:16]
        try:
            self._run = wandb.init(
                project=self._settings.project,
                entity=self._settings.entity,
                mode=self._settings.mode,
                name=run.name,
                id=identity,
                resume="allow" if online else None,
                dir=str(self._output_dir),
                config=read_config(self._output_dir),
                settings=wandb.Settings(console="off", silent=not online, quiet=True),
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"logging.wandb: the run could not be started ({error}); check the key and the network, "
                "or use logging.wandb.mode=offline and `wandb sync` later"
            ) from error
        # wandb's own counter only increases, so it would drop steps that a continued run repeats
        self._run.define_metric("*", step_metric="step")
        return identity

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def _conclude(self, figures: dict[str, float], paths: dict[str, str]) -> None:
        self._run.summary.update({**figures, **{f"path/{name}": path for name, path in paths.items()}})

    def _finish(self, *, ended_well: bool) -> None:
        self._run.finish(exit_code=0 if ended_well else 1)
