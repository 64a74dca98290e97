"""Base of trackers, which keep many runs for comparison, and the results that they receive."""

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

from nemo_opd.files import write_atomically
from nemo_opd.logging.base import ClosingTable, Logger, RunSummary

_ARTEFACTS = {"model": "final", "best_model": "best", "report": "report/report.html", "config": "config.yaml"}
"""Paths in the run's directory, by name."""


class Tracker(Logger):
    """A logger with one tracked run per output directory, which a continued run reports to again."""

    name: ClassVar[str]
    """Key below `logging`, and folder in the run's directory with the id of the tracked run."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._is_open = self._ended_well = False

    def start(self, run: RunSummary, step: int) -> None:
        path = self._output_dir / self.name / "run_id"
        previous = path.read_text(encoding="utf-8") if step and path.exists() else None
        identity = self._open(run, previous)
        self._is_open = True
        if identity != previous:
            write_atomically(path, identity.encode())

    def summary(self, closing: ClosingTable) -> None:
        self._conclude(results(closing), artefacts(self._output_dir))
        self._ended_well = True

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._finish(ended_well=self._ended_well)

    @abstractmethod
    def _open(self, run: RunSummary, previous: str | None) -> str:
        """Start a run with its configuration, or continue the one with the id `previous`; return the id.

        Raises ConfigError if the settings or the network prevent it.
        """

    @abstractmethod
    def _conclude(self, figures: dict[str, float], paths: dict[str, str]) -> None:
        """Record the results of the run and the paths of its files."""

    @abstractmethod
    def _finish(self, *, ended_well: bool) -> None:
        """Send unsent data, and end the run."""


def results(closing: ClosingTable) -> dict[str, float]:
    """Return the figures of a closing table by name: bits per byte, scores, and the best checkpoint."""
    figures = {f"bits_per_byte/{row.name}": row.bits_per_byte for row in closing.rows if row.bits_per_byte is not None}
    figures |= {
        f"score/{row.measure}/{model}": score.value for row in closing.scores for model, score in row.by_model.items()
    }
    if closing.best is not None:
        figures |= {f"best/{closing.best.metric}": closing.best.value, "best/step": closing.best.step}
    return figures


def artefacts(output_dir: Path) -> dict[str, str]:
    """Return the absolute paths of a run's existing outputs by name; the student's averages by their folders' names."""
    paths = {name: output_dir / path for name, path in _ARTEFACTS.items()}
    paths |= {folder.name: folder for folder in sorted(output_dir.glob("final_*"))}
    return {name: str(path.absolute()) for name, path in paths.items() if path.exists()}
