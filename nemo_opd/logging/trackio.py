"""Trackio, with a local database and dashboard, or a Space on the Hugging Face Hub."""

import uuid
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from nemo_opd.config.logging import Trackio
from nemo_opd.errors import ConfigError
from nemo_opd.logging.base import RunSummary
from nemo_opd.logging.facts import read_config
from nemo_opd.logging.tracker import Tracker


class TrackioLogger(Tracker):
    """Reports to trackio. It identifies runs by name, so names get a few random digits."""

    name = "trackio"

    def __init__(self, settings: Trackio, output_dir: Path) -> None:
        super().__init__(output_dir)
        self._settings = settings
        self._run: Any = None
        self._step = 0

    def _open(self, run: RunSummary, previous: str | None) -> str:
        import trackio

        name = previous or f"{run.name}-{uuid.uuid4().hex[:8]}"
        try:
            with redirect_stdout(StringIO()):  # hides its advice about the dashboard
                self._run = trackio.init(
                    project=self._settings.project,
                    name=name,
                    space_id=self._settings.space,
                    resume="allow" if previous else "never",
                    config=read_config(self._output_dir),
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        except Exception as error:
            raise ConfigError(
                f"logging.trackio: the run could not be started ({error}); check logging.trackio.space and the "
                "token of the hub (HF_TOKEN), or write logging.trackio.space=null"
            ) from error
        return name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._step = step
        self._run.log(dict(values), step=step)

    def _conclude(self, figures: dict[str, float], paths: dict[str, str]) -> None:
        import trackio

        written = trackio.Markdown("\n".join(f"- {name}: `{path}`" for name, path in paths.items()))
        self._run.log({**figures, "artefacts": written}, step=self._step)

    def _finish(self, *, ended_well: bool) -> None:
        import trackio

        with redirect_stdout(StringIO()):
            trackio.finish()
