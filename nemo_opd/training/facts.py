"""State and result of runs, read from the files in their folders."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from yaml import YAMLError

from nemo_opd.checkpoint.run_directory import checkpoints_of, is_locked
from nemo_opd.config.load import from_yaml
from nemo_opd.config.run import RunConfig
from nemo_opd.errors import DataError, OPDError
from nemo_opd.logging.base import Best, ClosingTable
from nemo_opd.logging.loggers import read
from nemo_opd.logging.metrics import BITS_PER_BYTE
from nemo_opd.logging.provenance import FINISHED, NOT_EXPORTED, PROVENANCE, read_provenance
from nemo_opd.logging.records import Records, read_config, value_at
from nemo_opd.training.closing import closing_table

_METRICS = "metrics.jsonl"
_KILLED = "killed"
_PARTS = ("checkpoints", "final", "best", "report", "tensorboard", "wandb")
"""Folders in a run's directory without runs in them."""


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
        status="running" if is_locked(folder) else end or _KILLED,
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
