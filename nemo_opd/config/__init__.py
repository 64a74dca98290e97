"""Validated settings. Defaults live on the fields of these models and nowhere else."""

from nemo_opd.config.run import RunConfig

__all__ = ["RunConfig"]
