"""Machines, devices and processes."""

from typing import Literal

from pydantic import Field

from nemo_opd.config.base import Settings


class Cluster(Settings):
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: cuda where a GPU is visible."""
    num_nodes: int = Field(1, ge=1)
    gpus_per_node: int | None = Field(None, ge=1)
    """GPUs used on each node; all of them when not given."""
    cpu_ranks: int = Field(1, ge=1)
    """Data-parallel ranks on CPU."""
    placement: Literal["colocated"] = "colocated"
    """Student and teachers take turns on the same devices."""
    address: str | None = None
    """A running Ray cluster (`auto`, `host:port`); a local one is started and stopped when not given."""
    timeout_s: float = Field(1800, gt=0)
    """Longest wait for workers to start and for a collective."""
