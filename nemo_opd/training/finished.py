"""Result of a run, runs that had finished before, and facts of any run read from its directory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from yaml import YAMLError

from nemo_opd.checkpoint.run_directory import checkpoints_of, lock_holder
from nemo_opd.cluster.placement import Processes
from nemo_opd.config.composition import from_yaml, to_yaml
from nemo_opd.config.run import RunConfig
from nemo_opd.errors import DataError, OPDError
from nemo_opd.files import load_yaml
from nemo_opd.logging.interface import Best, ClosingTable
from nemo_opd.logging.loggers import read
from nemo_opd.logging.metrics import BITS_PER_BYTE
from nemo_opd.logging.provenance import FINISHED, NOT_EXPORTED, PROVENANCE, read_provenance
from nemo_opd.logging.records import Records, differences, read_config, value_at
from nemo_opd.logging.terminal import print_line
from nemo_opd.training.closing import closing_table

_STARTS = ("output_dir", "resume")
"""Settings of `run` on how to start."""
_METRICS = "metrics.jsonl"
_KILLED = "killed"
_PARTS = ("checkpoints", "final", "best", "report", "tensorboard", "wandb")
"""Folders in a run's directory without runs in them."""


@dataclass(frozen=True)
class Finished:
    """Output files of a run."""

    output_dir: Path
    """The run's directory; not created with `run.dry_run`."""
    is_complete: bool = True
    """False if it saved and ended before its last step: after a signal, at `train.save_before`, by a callback or an
    alarm.
    """
    checks: Mapping[str, Any] | None = None
    """Result of a dry run or an evaluation, with values that JSON can hold; None for a run."""

    @property
    def model(self) -> Path | None:
        """Folder of the trained student in Hugging Face format, as last exported; None if it never was."""
        folder = self.output_dir / "final"
        return folder if folder.is_dir() else None

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One record per step, as in metrics.jsonl."""
        return read(self.output_dir / _METRICS)


def finished_before(config: RunConfig) -> Finished | None:
    """Return the run that `run.resume=auto` would continue if it has finished, after saying so; otherwise None.

    Also None if a setting has changed, if the trained student or a checkpoint is missing, and under torchrun, whose
    other processes may not see the folder.
    """
    folder = config.run.output_dir
    if config.run.resume != "auto" or config.run.dry_run or folder is None or Processes.started().size > 1:
        return None
    provenance, written = read_provenance(folder), read_config(folder)
    if provenance is None or provenance.end not in (FINISHED, NOT_EXPORTED) or not isinstance(written, dict):
        return None
    current = load_yaml(to_yaml(config))
    for settings in (current, written):
        settings["run"] = {key: value for key, value in settings.get("run", {}).items() if key not in _STARTS}
    finished, steps = Finished(folder), checkpoints_of(config, folder).steps()
    last = max((record["step"] for record in finished.metrics), default=0)
    is_exported = provenance.end == FINISHED
    if any(differences(current, written)) or not steps or steps[-1] < last or (is_exported and finished.model is None):
        return None
    model = f"its model is {finished.model}" if is_exported else "was not exported (run.export_worse)"
    print_line(
        f"finished  {folder} ended at step {steps[-1]:,} of {provenance.total_steps:,}, and {model}; to train it "
        "longer, raise train.max_steps or train.epochs; to start anew, name another run.output_dir"
    )
    return finished


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run, up to its last record."""

    folder: Path
    name: str
    status: str
    """`running`, an end as in provenance.json, or `killed` if neither is known."""
    step: int
    total_steps: int | None
    started: str | None
    """Date and time of the last start."""
    model: Path | None
    """Folder of the trained student."""
    report: Path | None
    """Page in HTML."""
    results: ClosingTable | None
    """Verdict and figures; None if the settings are of another version."""
    problem: str | None = None
    """Why the files of the run cannot be read."""


def read_facts(folder: Path) -> RunFacts:
    """Return the facts of a run; with `problem` if its files are damaged."""
    provenance = read_provenance(folder)
    end = None if provenance is None else provenance.end
    model, report = folder / "final", folder / "report" / "report.html"
    facts = RunFacts(
        folder=folder,
        name=folder.name,
        status=(end or _KILLED) if lock_holder(folder) is None else "running",
        step=0,
        total_steps=None if provenance is None else provenance.total_steps,
        started=None if provenance is None else provenance.started,
        model=model if model.is_dir() else None,
        report=report if report.is_file() else None,
        results=None,
    )
    try:
        facts = replace(facts, name=str(value_at(read_config(folder), "run.name") or folder.name))
        records = read(folder / _METRICS)
        step = int(records[-1]["step"]) if records else 0
        if facts.status == _KILLED and facts.model is not None and step == facts.total_steps:
            facts = replace(facts, status=FINISHED)  # by a version that recorded no end
        return replace(facts, step=step, results=closing_of(folder, records))
    except DataError as error:
        return replace(facts, problem=str(error))
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        # An untrusted folder must not hide the other runs.
        return replace(facts, problem=f"its files cannot be read ({type(error).__name__}: {error})")


def closing_of(folder: Path, records: Records) -> ClosingTable | None:
    """Return the closing table up to the run's last record; None if its settings are of another version."""
    try:
        config = from_yaml(folder / "config.yaml")
    except (OSError, OPDError, YAMLError):
        return None
    start = next((record for record in records if not record["step"]), {})
    validated = [record for record in records if record["step"] and BITS_PER_BYTE in record]
    last = validated[-1] if validated else {}
    table = closing_table(config, folder, start, last, int(last.get("step", 0)))
    provenance = read_provenance(folder)
    is_exported = provenance is None or provenance.end != NOT_EXPORTED
    return replace(table, best=_best_of(config, folder), is_exported=is_exported)


def _best_of(config: RunConfig, folder: Path) -> Best | None:
    """Return the checkpoint whose student is in best/, which only checkpoints record."""
    metric = config.train.keep_best and config.train.keep_best.metric
    with suppress(OPDError):
        newest = checkpoints_of(config, folder).newest(hashed=False)
        if newest and metric and newest.progress.best.values and (folder / "best").is_dir():
            step, value = next(iter(newest.progress.best.values.items()))
            return Best(metric, int(step), value)
    return None


def find_runs(root: Path) -> Iterator[Path]:
    """Yield the folders of runs in a folder, at any depth, and itself if it is one."""
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in _PARTS)
        if PROVENANCE in files or _METRICS in files:
            yield Path(folder)
