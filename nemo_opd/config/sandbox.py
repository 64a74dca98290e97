"""Limits of untrusted programs."""

from typing import Literal

from pydantic import Field

from nemo_opd.config.base import Settings

Isolation = Literal["bubblewrap", "namespaces", "process"]


class SandboxSettings(Settings):
    """Limits of the programs that a reward runs."""

    isolation: Literal["auto", "bubblewrap", "namespaces", "process"] = "auto"
    """Kind of sandbox: bubblewrap, or Linux namespaces without it; auto: the first of the two that works. process:
    limits only, for machines that forbid namespaces, as many containers do (docs/sandbox.md lists what remains
    possible).
    """
    timeout_s: float = Field(5, gt=0, le=3600)
    """Processor time of a program with all its processes, in seconds. A program that waits has four times as long."""
    memory_mb: int = Field(1024, ge=64)
    """MiB of memory for a program with all its processes."""
    processes: int = Field(16, ge=1)
    """Processes and threads of a program."""
    scratch_mb: int = Field(16, ge=1)
    """MiB of /tmp, the only folder that a program can write to, and of a single file."""
    output_kb: int = Field(1024, ge=1)
    """KiB that a program may print."""
    workers: int | None = Field(None, ge=1)
    """Programs that run at the same time; by default one for each core that this process may use."""
