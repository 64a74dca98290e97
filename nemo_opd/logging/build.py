"""All loggers of a run as one."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console

from nemo_opd.config.logging import Logging
from nemo_opd.config.secrets import without_secrets
from nemo_opd.logging.base import ClosingTable, Logger, RunSummary
from nemo_opd.logging.console import ConsoleLogger
from nemo_opd.logging.jsonl import JsonlLogger
from nemo_opd.logging.tensorboard import TensorBoardLogger
from nemo_opd.logging.tolerated import Tolerated
from nemo_opd.logging.wandb import WandbLogger


def build(settings: Logging, output_dir: Path, *, console: Console | None = None) -> "Loggers":
    """metrics.jsonl and whatever `settings` enables, which the run can do without.

    Opens no file; raises ConfigError where wandb cannot log in.
    """
    optional: list[Logger] = []
    if settings.tensorboard.enabled:
        optional.append(TensorBoardLogger(output_dir / "tensorboard"))
    if settings.wandb.enabled:
        optional.append(WandbLogger(settings.wandb, output_dir))
    if settings.console.enabled:
        # Last, below what others print.
        optional.append(ConsoleLogger(settings.console, console or Console()))
    return Loggers([JsonlLogger(output_dir / "metrics.jsonl"), *map(Tolerated, optional)])


class Loggers(Logger):
    """A logger that tells several, and on leaving the `with` closes each of them, also when one raises."""

    def __init__(self, members: Sequence[Logger]) -> None:
        self.members = tuple(members)

    def start(self, run: RunSummary, step: int = 0) -> None:
        for member in self.members:
            member.start(run, step)

    def phase(self, name: str) -> None:
        for member in self.members:
            member.phase(without_secrets(name))

    def end_display(self) -> None:
        for member in self.members:
            member.end_display()

    def warn(self, message: str) -> None:
        for member in self.members:
            member.warn(without_secrets(message))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for member in self.members:
            member.log(step, values)

    def summary(self, closing: ClosingTable) -> None:
        for member in self.members:
            member.summary(closing)

    def close(self) -> None:
        with ExitStack() as stack:
            for member in self.members:
                stack.callback(member.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
