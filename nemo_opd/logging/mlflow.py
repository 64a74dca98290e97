"""MLflow, on a tracking server or in a database file."""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_opd.config.logging import Mlflow
from nemo_opd.config.secrets import leaves
from nemo_opd.errors import ConfigError
from nemo_opd.logging.base import RunSummary
from nemo_opd.logging.facts import read_config
from nemo_opd.logging.tracker import Tracker

_PARAMETERS_A_CALL, _LONGEST_PARAMETER = 100, 6000
"""Limits of MLflow's servers."""


class MlflowLogger(Tracker):
    """Reports to MLflow."""

    name = "mlflow"

    def __init__(self, settings: Mlflow, output_dir: Path) -> None:
        super().__init__(output_dir)
        self._settings = settings
        self._client: Any = None
        self._run_id = ""

    def _open(self, run: RunSummary, previous: str | None) -> str:
        from mlflow import MlflowClient

        try:
            self._client = MlflowClient(tracking_uri=self._settings.tracking_uri)
            self._run_id = previous or self._new_run(run)
            self._client.update_run(self._run_id, status="RUNNING")
        except Exception as error:  # MLflow's own errors, and database errors
            raise ConfigError(
                f"logging.mlflow: the run could not be started ({_first_line(error)}); check "
                "logging.mlflow.tracking_uri (or MLFLOW_TRACKING_URI, if it is not set) and the network, or write "
                "logging.mlflow.enabled=false"
            ) from error
        return self._run_id

    def _new_run(self, run: RunSummary) -> str:
        from mlflow.entities import Param

        name = self._settings.experiment
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        identity: str = self._client.create_run(number, run_name=run.name).info.run_id
        # Parameters of a run cannot be changed, so a continued run does not write them.
        config = [Param(key, value) for key, value in parameters(read_config(self._output_dir)).items()]
        for start in range(0, len(config), _PARAMETERS_A_CALL):
            self._client.log_batch(identity, params=config[start : start + _PARAMETERS_A_CALL])
        return identity

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(allowed_name(name), float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def _conclude(self, figures: dict[str, float], paths: dict[str, str]) -> None:
        self.log(0, figures)
        for name, path in paths.items():
            self._client.set_tag(self._run_id, f"path.{name}", path)

    def _finish(self, *, ended_well: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if ended_well else "FAILED")


def parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings in MLflow's form: texts by dotted key."""
    return {
        allowed_name(".".join(map(str, path))): str(value)[:_LONGEST_PARAMETER] for path, value in leaves(dict(config))
    }


def allowed_name(name: str) -> str:
    """Replace the characters that MLflow rejects: pass@1 becomes pass_at_1."""
    return re.sub(r"[^\w/.\- :]", "_", name.replace("@", "_at_"))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
