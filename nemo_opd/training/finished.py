"""Result of a run, and runs that had finished before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_opd.checkpoint.run_directory import checkpoints_of
from nemo_opd.cluster.placement import Processes
from nemo_opd.config.load import to_yaml
from nemo_opd.config.run import RunConfig
from nemo_opd.logging.activity import print_line
from nemo_opd.logging.loggers import read
from nemo_opd.logging.provenance import FINISHED, NOT_EXPORTED, read_provenance
from nemo_opd.logging.records import read_config
from nemo_opd.plain_yaml import load_yaml

_STARTS = ("output_dir", "resume")
"""Settings of `run` on how to start."""


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
        return read(self.output_dir / "metrics.jsonl")


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
    is_exported = provenance.end == FINISHED
    if not _are_same(current, written) or not steps or (is_exported and finished.model is None):
        return None
    model = f"its model is {finished.model}" if is_exported else "was not exported (run.export_worse)"
    print_line(
        f"finished  {folder} ended at step {steps[-1]:,} of {provenance.total_steps:,}, and {model}; to train it "
        "longer, raise train.max_steps or train.epochs; to start anew, name another run.output_dir"
    )
    return finished


def _are_same(current: dict[str, Any], written: dict[str, Any]) -> bool:
    """Return whether settings are equal; teachers of type auto may have been found to be of another type."""
    teachers, before = current.get("teachers") or [], written.get("teachers") or []
    if {**current, "teachers": None} != {**written, "teachers": None} or len(teachers) != len(before):
        return False
    return all(
        teacher == other
        or (teacher.get("type") == "auto" and all(other.get(key) == teacher[key] for key in teacher if key != "type"))
        for teacher, other in zip(teachers, before, strict=True)
    )
