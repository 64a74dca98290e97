"""Loggers in addition to metrics.jsonl."""

from typing import Literal

from pydantic import Field

from nemo_opd.config.base import Settings


class Console(Settings):
    """Display of progress."""

    enabled: bool = True
    """Live progress in a terminal, a line now and then elsewhere."""
    interval_s: float = Field(10, ge=0)
    """Outside a terminal: seconds between lines, of steps that are done or of what takes longer. The first, last and
    validated steps are always printed.
    """
    memory_table: bool = False
    """Whether run.dry_run shows the whole memory estimate, part by phase."""


class TensorBoard(Settings):
    """TensorBoard as a destination."""

    enabled: bool = False
    """Write the metrics as events into the folder `tensorboard` of the run."""


class Wandb(Settings):
    """Weights & Biases as a destination."""

    enabled: bool = False
    """Log the metrics to Weights & Biases."""
    project: str = "nemo_opd"
    """Project that the run belongs to."""
    entity: str | None = None
    """User or team that owns the project; null: the default of the account."""
    mode: Literal["online", "offline"] = "online"
    """online: metrics are sent as they come. offline: they are written into the run's folder, for `wandb sync`."""


class Mlflow(Settings):
    """MLflow as a destination."""

    enabled: bool = False
    """Log the metrics, the settings and the results to MLflow."""
    tracking_uri: str | None = None
    """Address of a server, or a database such as `sqlite:////home/me/mlflow.db`; null: MLFLOW_TRACKING_URI, and where
    that is not set `mlflow.db` in the current directory.
    """
    experiment: str = "nemo_opd"
    """Experiment that the run belongs to; made where it does not exist."""


class Trackio(Settings):
    """Trackio as a destination."""

    enabled: bool = False
    """Log the metrics, the settings and the results to trackio."""
    project: str = "nemo_opd"
    """Project that the run belongs to."""
    space: str | None = Field(None, pattern=r"^[\w.-]+(/[\w.-]+)?$")
    """Space on the Hugging Face Hub, `user/name`, that shows the runs and is made where it does not exist; null: a
    database on this machine, which `trackio show` shows.
    """


class Logging(Settings):
    """Destinations of metrics in addition to metrics.jsonl."""

    console: Console = Field(default_factory=Console)
    """Progress for people."""
    tensorboard: TensorBoard = Field(default_factory=TensorBoard)
    """Metrics for TensorBoard."""
    wandb: Wandb = Field(default_factory=Wandb)
    """Metrics for Weights & Biases."""
    mlflow: Mlflow = Field(default_factory=Mlflow)
    """Metrics for MLflow."""
    trackio: Trackio = Field(default_factory=Trackio)
    """Metrics for trackio."""
    gradients_every: int | None = Field(None, ge=1)
    """Steps between comparisons of the KD gradient with the CE gradient: their norms and their cosine. Such a step has
    a forward and a backward pass for each of them, and holds one gradient more.
    """
