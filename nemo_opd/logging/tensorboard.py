"""Scalars for TensorBoard."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_opd.logging.base import ClosingTable, Logger, RunSummary

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(Logger):
    """Event files in one folder; a run that continues hides the events after its checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: SummaryWriter | None = None
        self._step = 0

    def start(self, run: RunSummary, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._step = step
        self._writer = SummaryWriter(str(self.folder), purge_step=step + 1 if step else 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert self._writer is not None, "log before start"
        self._step = step
        for name, value in values.items():
            if name != "step":
                self._writer.add_scalar(name, value, step)

    def summary(self, closing: ClosingTable) -> None:
        assert self._writer is not None, "summary before start"
        lines = ["| model | bits per byte | note |", "|---|---|---|"]
        for row in closing.rows:
            value = "" if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}"
            lines.append(f"| {row.name} | {value} | {row.note} |")
        self._writer.add_text("result", "\n".join(lines), self._step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
