"""The processes of a run that Ray has not started."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Processes:
    """This process alone, or those of torchrun, of which rank 0 drives the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def started(cls) -> Processes:
        """Read what torchrun has written into the environment."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return cls()
        return cls(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
