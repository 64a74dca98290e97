"""Loggers besides metrics.jsonl."""

from typing import Literal

from pydantic import Field

from nemo_opd.config.base import Settings


class Console(Settings):
    """Display of progress."""

    enabled: bool = True
    """Live progress in a terminal, and occasional lines elsewhere."""
    interval_s: float = Field(10, ge=0)
    """Outside a terminal: seconds between lines about finished steps or longer work. The first, last and validated
    steps are always printed.
    """
    memory_table: bool = False
    """With run.dry_run, show the whole memory estimate, part by phase."""


class TensorBoard(Settings):
    """TensorBoard as a destination."""

    enabled: bool = False
    """Write the metrics as events to the run's folder `tensorboard`."""


class Wandb(Settings):
    """Weights & Biases as a destination."""

    enabled: bool = False
    """Log the metrics to Weights & Biases."""
    project: str = "nemo_opd"
    """Project of the run."""
    entity: str | None = None
    """User or team that owns the project; by default the account's."""
    mode: Literal["online", "offline"] = "online"
    """online: send metrics as they come. offline: write them to the run's folder, for `wandb sync`."""


class RolloutFiles(Settings):
    """Files with the student's training samples: rollouts.jsonl."""

    every: int | None = Field(None, ge=1)
    """Steps between batches whose rollouts are written (texts, ids, masks, log-probabilities and rewards), or null to
    write none.
    """
    file_mb: float = Field(100, gt=0)
    """Size in megabytes at which a file is full and a new one is started."""
    keep_files: int = Field(10, ge=1)
    """Full files to keep; older ones are removed."""


class Mlflow(Settings):
    """MLflow as a destination."""

    enabled: bool = False
    """Log the metrics, the settings and the results to MLflow."""
    tracking_uri: str | None = None
    """Address of a server, or a database such as `sqlite:////home/me/mlflow.db`; by default MLFLOW_TRACKING_URI, or
    `mlflow.db` in the current directory if it is not set.
    """
    experiment: str = "nemo_opd"
    """Experiment of the run; created if it does not exist."""


class Trackio(Settings):
    """Trackio as a destination."""

    enabled: bool = False
    """Log the metrics, the settings and the results to trackio."""
    project: str = "nemo_opd"
    """Project of the run."""
    space: str | None = Field(None, pattern=r"^[\w.-]+(/[\w.-]+)?$")
    """Space on the Hugging Face Hub, `user/name`, that shows the runs, created if it does not exist; by default a
    database on this machine, which `trackio show` shows.
    """


class Logging(Settings):
    """Destinations of metrics besides metrics.jsonl."""

    console: Console = Field(default_factory=Console)
    """Progress on the console."""
    tensorboard: TensorBoard = Field(default_factory=TensorBoard)
    """Metrics for TensorBoard."""
    wandb: Wandb = Field(default_factory=Wandb)
    """Metrics for Weights & Biases."""
    rollouts: RolloutFiles = Field(default_factory=RolloutFiles)
    """On-policy: files with the training's rollouts."""
    token_groups: bool = True
    """Also report validation figures by domain, class of token and kind of aligned chunk."""
    mlflow: Mlflow = Field(default_factory=Mlflow)
    """Metrics for MLflow."""
    trackio: Trackio = Field(default_factory=Trackio)
    """Metrics for trackio."""
    gradients_every: int | None = Field(None, ge=1)
    """Steps between comparisons of the KD gradient with the CE gradient: their norms and their cosine. Such a step runs
    a forward and a backward pass for each, and holds one more gradient.
    """
