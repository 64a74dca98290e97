"""Processes of tests, forked from one that has imported what they need: each would take seconds of its own for that."""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
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
    costs.refuse("starts a process", "world")
    multiprocessing.set_forkserver_preload(IMPORTED)
    return multiprocessing.get_context("forkserver")


def make(function: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Make such a process, with this one's environment."""
    return context().Process(target=_run, args=(dict(os.environ), function, arguments))


def start(function: Callable[..., None], arguments: tuple[Any, ...], number: int) -> None:
    """function(rank, *arguments) in `number` such processes, to their end. Raises what torch's own `spawn` raises."""
    method = context().get_start_method()
    mp.start_processes(_run_rank, (dict(os.environ), function, arguments), number, start_method=method)


def _run_rank(
    rank: int, environment: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    _run(environment, function, (rank, *arguments))


def _run(environment: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Call a function with another environment than the server's, which is that of the first call of all.

    CUDA, which reads it when it is first used, has not been used yet.
    """
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)


def program(module: str, *arguments: str) -> str:
    """Run a module in such a process as `python -m` does; return what it prints. Raises what `start` raises."""
    with TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        start(_as_program, (module, arguments, output), 1)
        return output.read_text(encoding="utf-8")


def _as_program(_: int, module: str, arguments: tuple[str, ...], output: Path) -> None:
    sys.argv = [module, *arguments]
    with output.open("w", encoding="utf-8") as file, redirect_stdout(file):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    # The interpreter's teardown takes seconds with everything that was imported.
    os._exit(0)


def script(file: Path) -> None:
    """Run a file in such a process, from its folder. Raises what `start` raises."""
    start(_as_script, (file,), 1)


def _as_script(_: int, file: Path) -> None:
    sys.path.insert(0, str(file.parent))
    with chdir(file.parent):
        runpy.run_path(file.name, run_name="__main__")
    os._exit(0)
