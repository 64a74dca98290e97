"""Where metrics go besides metrics.jsonl."""

from typing import Literal

from pydantic import Field

from nemo_opd.config.base import Settings


class Console(Settings):
    enabled: bool = True
    """Live progress in a terminal, a line now and then elsewhere."""
    interval_s: float = Field(10, ge=0)
    """Outside a terminal: seconds between lines, of steps that are done or of what takes longer. The first, last and
    validated steps are always printed.
    """
    memory_table: bool = False
    """With run.dry_run: the whole memory estimate, part by phase."""


class TensorBoard(Settings):
    enabled: bool = False


class Wandb(Settings):
    enabled: bool = False
    project: str = "nemo_opd"
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"


class Logging(Settings):
    console: Console = Field(default_factory=Console)
    tensorboard: TensorBoard = Field(default_factory=TensorBoard)
    wandb: Wandb = Field(default_factory=Wandb)
    gradients_every: int | None = Field(None, ge=1)
    """Steps between comparisons of the KD gradient with the CE gradient: their norms and their cosine. Such a step has
    a forward and a backward pass for each of them, and holds one gradient more.
    """
