"""Scalars for TensorBoard."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING

import yaml

from nemo_opd.logging.base import ClosingTable, Logger, RunSummary
from nemo_opd.logging.facts import read_config
from nemo_opd.logging.formats import score
from nemo_opd.logging.tracker import artefacts

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(Logger):
    """Event files in the run's folder `tensorboard`; a continued run hides the events after its checkpoint."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._writer: SummaryWriter | None = None
        self._step = 0

    def start(self, run: RunSummary, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._step = step
        folder = self._output_dir / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else 0)
        if config := read_config(self._output_dir):
            # Markdown shows indented text verbatim.
            self._writer.add_text("config", indent(yaml.safe_dump(config, sort_keys=False), "    "), step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert self._writer is not None, "log before start"
        self._step = step
        for name, value in values.items():
            if name != "step":
                self._writer.add_scalar(name, value, step)

    def summary(self, closing: ClosingTable) -> None:
        assert self._writer is not None, "summary before start"
        lines = ["| model | bits per byte | note |", "|---|---|---|"]
        for model in closing.rows:
            value = "" if model.bits_per_byte is None else f"{model.bits_per_byte:.4f}"
            lines.append(f"| {model.name} | {value} | {model.note} |")
        if closing.scores:
            lines += ["", "| measure | model | score |", "|---|---|---|"]
        for row in closing.scores:
            for name, estimate in row.by_model.items():
                lines.append(f"| {row.measure} | {name} | {score(*estimate, is_share=row.is_share)} |")
        lines += ["", *(f"- {name}: `{path}`" for name, path in artefacts(self._output_dir).items())]
        self._writer.add_text("result", "\n".join(lines), self._step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
