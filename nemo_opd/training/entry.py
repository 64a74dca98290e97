"""Python entry points of runs, for scripts and notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_opd.config.composition import compose
from nemo_opd.config.run import RunConfig, from_dict
from nemo_opd.errors import ConfigError
from nemo_opd.logging.terminal import loading
from nemo_opd.paths import keep_compiled_code_private
from nemo_opd.preflight.inputs import check_inputs, with_documents_columns
from nemo_opd.progress import quiet_libraries
from nemo_opd.training.finished import Finished, finished_before

Settings = RunConfig | Mapping[str, Any] | str | Path


def distil(config: Settings, overrides: Sequence[str] = (), *, callbacks: Sequence[Any] = ()) -> Finished:
    """Distil on a corpus, like `nemo-opd distil`, and return the run's output.

    config: settings as a nested dict or a `RunConfig`, or the path of a YAML file or the name of a recipe, to which
    `overrides` such as `train.max_steps=100` apply. `cluster.launcher: local` runs everything in this process.
    callbacks: objects with `nemo_opd.Callback`'s methods, their classes, or functions of a step and its
    metrics.

    Raises an OPDError if the settings are wrong or the run fails.
    """
    return _of_driver(run(_validated(config, overrides), callbacks, on_policy=False))


def distil_on_policy(config: Settings, overrides: Sequence[str] = (), *, callbacks: Sequence[Any] = ()) -> Finished:
    """Distil on the student's own samples, like `nemo-opd distil-on-policy`. Arguments and result: see `distil`."""
    return _of_driver(run(_validated(config, overrides), callbacks, on_policy=True))


def run(config: RunConfig, callbacks: Sequence[Any] = (), *, on_policy: bool) -> Finished | None:
    """Check the inputs, then distil, unless the run has finished already.

    Returns None on ranks other than the driver. Raises an OPDError if an input is wrong or the run fails.
    """
    check_inputs(config, on_policy=on_policy)
    if (finished := finished_before(config)) is not None:
        return finished
    # Imported after the checks: PyTorch takes seconds.
    with loading("PyTorch"):
        if on_policy:
            from nemo_opd.training.on_policy import distil as task
        else:
            from nemo_opd.training.off_policy import distil as task
    return task(config, callbacks)


def _validated(config: Settings, overrides: Sequence[str]) -> RunConfig:
    quiet_libraries()
    keep_compiled_code_private()
    if isinstance(config, str | Path):
        return compose(config, overrides, with_documents_columns)
    if overrides:
        raise ConfigError(f"overrides={list(overrides)}: only a file or a recipe takes overrides; change the settings")
    return config if isinstance(config, RunConfig) else from_dict(with_documents_columns(config))


def _of_driver(finished: Finished | None) -> Finished:
    """Return the run's output; torchrun ranks that do not drive the run exit here."""
    if finished is None:
        raise SystemExit(0)
    return finished
