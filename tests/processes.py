"""Processes of tests, forked from one that has imported what they need: each would take seconds of its own for that."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

import torch.multiprocessing as mp

from tests import costs

IMPORTED = [
    "nemo_opd.training.preflight",
    "nemo_opd.workers.student",
    "nemo_opd.workers.teacher",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
]
"""Nothing of the tests themselves: where these are found, only the process that asks for others knows."""


def context() -> ForkServerContext:
    """For processes that have the environment which the first call of all found."""
    costs.refuse("starts a process", "world")
    multiprocessing.set_forkserver_preload(IMPORTED)
    return multiprocessing.get_context("forkserver")


def start(function: Callable[..., None], arguments: tuple[Any, ...], number: int) -> None:
    """function(rank, *arguments) in `number` such processes, to their end. Raises what torch's own `spawn` raises."""
    mp.start_processes(function, arguments, number, start_method=context().get_start_method())
