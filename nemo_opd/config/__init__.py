"""Validated settings. Defaults are on the fields of these models and nowhere else."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_opd.config.run import RunConfig

__all__ = ["RunConfig"]


def __getattr__(name: str) -> Any:
    """Import a run's settings on first use: building the models takes most of a second."""
    if name != "RunConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nemo_opd.config.run import RunConfig

    return RunConfig
