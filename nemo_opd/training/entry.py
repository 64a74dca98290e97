"""Python entry points of runs, for scripts and notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_opd.config.load import compose, from_dict
from nemo_opd.config.run import RunConfig
from nemo_opd.errors import ConfigError
from nemo_opd.logging.loggers import read
from nemo_opd.paths import keep_compiled_code_private
from nemo_opd.preflight.inputs import check_inputs, with_documents_columns
from nemo_opd.progress import quiet_libraries

Settings = RunConfig | Mapping[str, Any] | str | Path


@dataclass(frozen=True)
class Finished:
    """Output files of a run."""

    output_dir: Path
    """The run's directory; not created with `run.dry_run`."""

    @property
    def model(self) -> Path | None:
        """Folder of the trained student in Hugging Face format, as last exported; None if it never was."""
        folder = self.output_dir / "final"
        return folder if folder.is_dir() else None

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One record per step, as in metrics.jsonl."""
        return read(self.output_dir / "metrics.jsonl")


def distil(config: Settings, overrides: Sequence[str] = (), *, callbacks: Sequence[Any] = ()) -> Finished:
    """Distil on a corpus, like `nemo-opd distil`, and return the run's output.

    config: settings as a nested dict or a `RunConfig`, or the path of a YAML file or the name of a recipe, to which
    `overrides` such as `train.max_steps=100` apply. `cluster.launcher: local` runs everything in this process.
    callbacks: objects with `nemo_opd.Callback`'s methods, their classes, or functions of a step and its
    metrics.

    Raises an OPDError if the settings are wrong or the run fails.
    """
    settings = _validated(config, overrides)
    check_inputs(settings, on_policy=False)
    from nemo_opd.training import off_policy  # a slow import, after the settings are validated

    return _finished(off_policy.distil(settings, callbacks))


def distil_on_policy(config: Settings, overrides: Sequence[str] = (), *, callbacks: Sequence[Any] = ()) -> Finished:
    """Distil on the student's own samples, like `nemo-opd distil-on-policy`. Arguments and result: see `distil`."""
    settings = _validated(config, overrides)
    check_inputs(settings, on_policy=True)
    from nemo_opd.training import on_policy

    return _finished(on_policy.distil(settings, callbacks))


def _validated(config: Settings, overrides: Sequence[str]) -> RunConfig:
    quiet_libraries()
    keep_compiled_code_private()
    if isinstance(config, str | Path):
        return compose(config, overrides, with_documents_columns)
    if overrides:
        raise ConfigError(f"overrides={list(overrides)}: only a file or a recipe takes overrides; change the settings")
    return config if isinstance(config, RunConfig) else from_dict(with_documents_columns(config))


def _finished(output_dir: Path | None) -> Finished:
    """Return the run's output; torchrun ranks that do not drive the run exit here."""
    if output_dir is None:
        raise SystemExit(0)
    return Finished(output_dir)
