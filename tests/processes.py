"""Processes of tests, forked from one that has imported what they need: each would take seconds of its own for that."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

IMPORTED = [
    "nemo_opd.training.preflight",
    "nemo_opd.workers.student",
    "nemo_opd.workers.teacher",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
]
"""Nothing of the tests themselves: where these are found, only the process that asks for others knows."""


def start(function: Callable[..., None], arguments: tuple[Any, ...], number: int) -> None:
    """function(rank, *arguments) in `number` processes, to their end.

    They have the environment that the first call of all found. Raises what torch's own `spawn` raises.
    """
    multiprocessing.set_forkserver_preload(IMPORTED)
    mp.start_processes(function, arguments, number, start_method="forkserver")
