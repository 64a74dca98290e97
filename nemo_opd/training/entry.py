"""Runs from Python: in a script or a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_opd.config.load import compose, from_dict
from nemo_opd.config.run import RunConfig
from nemo_opd.errors import ConfigError
from nemo_opd.logging.jsonl import read
from nemo_opd.progress import quiet_libraries
from nemo_opd.training.inputs import check_inputs

Settings = RunConfig | Mapping[str, Any] | str | Path


@dataclass(frozen=True)
class Finished:
    """Files that a run has left."""

    output_dir: Path
    """Directory of the run; with `run.dry_run` it is not made."""

    @property
    def model(self) -> Path | None:
        """Folder of the trained student, in Hugging Face form; None where the run was ended before."""
        folder = self.output_dir / "final"
        return folder if folder.is_dir() else None

    @property
    def metrics(self) -> list[dict[str, float]]:
        """A record for each step, as in metrics.jsonl."""
        file = self.output_dir / "metrics.jsonl"
        return read(file) if file.exists() else []


def distil(config: Settings, overrides: Sequence[str] = (), *, callbacks: Sequence[Any] = ()) -> Finished:
    """Distil on a corpus, as `nemo-opd distil` does, and return what the run has left.

    config: settings as a nested dict or a `RunConfig`; or the path of a YAML file or the name of a recipe, to which
    `overrides` such as `train.max_steps=100` apply. `cluster.launcher: local` keeps all in this process. callbacks:
    objects with methods of `nemo_opd.Callback`, classes of such, or functions of a step and its metrics.

    Raises an OPDError where the settings are wrong or the run fails.
    """
    settings = _validated(config, overrides)
    check_inputs(settings, on_policy=False)
    from nemo_opd.training import off_policy  # imported once the settings are known to be right

    return _finished(off_policy.distil(settings, callbacks))


def distil_on_policy(config: Settings, overrides: Sequence[str] = (), *, callbacks: Sequence[Any] = ()) -> Finished:
    """Distil on the student's own samples, as `nemo-opd distil-on-policy` does; otherwise as `distil`."""
    settings = _validated(config, overrides)
    check_inputs(settings, on_policy=True)
    from nemo_opd.training import on_policy

    return _finished(on_policy.distil(settings, callbacks))


def _validated(config: Settings, overrides: Sequence[str]) -> RunConfig:
    quiet_libraries()
    if isinstance(config, str | Path):
        return compose(config, overrides)
    if overrides:
        raise ConfigError(f"overrides={list(overrides)}: these are for a file or a recipe; change the settings instead")
    return config if isinstance(config, RunConfig) else from_dict(config)


def _finished(output_dir: Path | None) -> Finished:
    """Return what the run has left; the ranks of torchrun that do not drive it end here."""
    if output_dir is None:
        raise SystemExit(0)
    return Finished(output_dir)
