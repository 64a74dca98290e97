"""Trackers: services and files that keep many runs, for comparison; and what each of them gets of one."""

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

from nemo_opd.files import write_atomically
from nemo_opd.logging.base import ClosingTable, Logger, RunSummary

_ARTEFACTS = {"model": "final", "best_model": "best", "report": "report/report.html", "config": "config.yaml"}
"""Name → path in the run's directory."""


class Tracker(Logger):
    """A logger with one run in the tracker for each output directory, to which a run that continues reports again."""

    name: ClassVar[str]
    """Key below `logging`, and the folder in the run's directory that holds the id of the run."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._is_open = self._ended_well = False

    def start(self, run: RunSummary, step: int) -> None:
        path = self._output_dir / self.name / "run_id"
        known = path.read_text(encoding="utf-8") if step and path.exists() else None
        identity = self._open(run, known)
        self._is_open = True
        if identity != known:
            write_atomically(path, identity.encode())

    def summary(self, closing: ClosingTable) -> None:
        self._conclude(results(closing), artefacts(self._output_dir))
        self._ended_well = True

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._finish(ended_well=self._ended_well)

    @abstractmethod
    def _open(self, run: RunSummary, known: str | None) -> str:
        """Start a run with its configuration, or go on with the one of the id `known`; return the id.

        Raises ConfigError where the settings, or the network, do not let it.
        """

    @abstractmethod
    def _conclude(self, figures: dict[str, float], paths: dict[str, str]) -> None:
        """Record the results of the run and the paths of what it has written."""

    @abstractmethod
    def _finish(self, *, ended_well: bool) -> None:
        """Send what is not sent yet, and end the run."""


def results(closing: ClosingTable) -> dict[str, float]:
    """Return the figures of a closing table by name: bits per byte, scores, and the best checkpoint."""
    found = {f"bits_per_byte/{row.name}": row.bits_per_byte for row in closing.rows if row.bits_per_byte is not None}
    found |= {
        f"score/{row.measure}/{model}": each.value for row in closing.scores for model, each in row.by_model.items()
    }
    if closing.best is not None:
        found |= {f"best/{closing.best.metric}": closing.best.value, "best/step": closing.best.step}
    return found


def artefacts(output_dir: Path) -> dict[str, str]:
    """Return the absolute paths of what a run has written, by name; averages of the student by their folders' names."""
    paths = {name: output_dir / path for name, path in _ARTEFACTS.items()}
    paths |= {folder.name: folder for folder in sorted(output_dir.glob("final_*"))}
    return {name: str(path.absolute()) for name, path in paths.items() if path.exists()}
