"""Weights & Biases, online or offline, with its files in the directory of the run."""

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nemo_opd.config.logging import Wandb
from nemo_opd.errors import ConfigError
from nemo_opd.files import write_atomically
from nemo_opd.logging.base import ClosingTable, Logger, RunSummary


def check_credentials() -> None:
    """Raise ConfigError where mode=online has no usable API key, instead of the prompt wandb would open."""
    import wandb

    remedy = "set WANDB_API_KEY, run `wandb login`, or use logging.wandb.mode=offline and `wandb sync` later"
    try:
        logged_in = wandb.login(prompt=False)
    except wandb.errors.Error as error:
        raise ConfigError(f"logging.wandb.mode=online: the API key is not usable ({error}); {remedy}") from error
    if not logged_in:
        raise ConfigError(f"logging.wandb.mode=online needs an API key and none is configured; {remedy}")


class WandbLogger(Logger):
    """One wandb run for each output directory: a run that continues reports to the same id."""

    def __init__(self, settings: Wandb, output_dir: Path) -> None:
        if settings.mode == "online":
            check_credentials()
        self._settings = settings
        self._output_dir = output_dir
        self._run: Any = None
        self._ended_well = False

    def start(self, run: RunSummary, step: int) -> None:
        import wandb

        online = self._settings.mode == "online"
        try:
            self._run = wandb.init(
                project=self._settings.project,
                entity=self._settings.entity,
                mode=self._settings.mode,
                name=run.name,
                id=self._run_id(step),
                resume="allow" if online else None,
                dir=str(self._output_dir),
                config=self._run_config(),
                settings=wandb.Settings(console="off", silent=not online, quiet=True),
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"logging.wandb: the run could not be started ({error}); check the key and the network, "
                "or use logging.wandb.mode=offline and `wandb sync` later"
            ) from error
        # wandb's own counter only rises, so it would drop the steps that a continued run repeats
        self._run.define_metric("*", step_metric="step")

    def _run_id(self, step: int) -> str:
        path = self._output_dir / "wandb" / "run_id"
        if not step or not path.exists():
            write_atomically(path, uuid.uuid4().hex[:16].encode())
        return path.read_text()

    def _run_config(self) -> Any:
        path = self._output_dir / "config.yaml"
        return yaml.safe_load(path.read_text()) if path.exists() else None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def summary(self, closing: ClosingTable) -> None:
        for row in closing.rows:
            if row.bits_per_byte is not None:
                self._run.summary[f"bits_per_byte/{row.name}"] = row.bits_per_byte
        self._ended_well = True

    def close(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=0 if self._ended_well else 1)
