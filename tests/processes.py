"""Test processes, forked from a server that has already imported the libraries, which takes seconds."""

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import chdir, redirect_stdout
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory, mkstemp
from typing import Any

import torch.multiprocessing as mp

from nemo_opd.logging import report
from tests import costs

IMPORTED = [
    "nemo_opd.cluster.ray.ray_cluster",
    "nemo_opd.training.off_policy",
    "nemo_opd.preflight.plan",
    "nemo_opd.workers.student_worker",
    "nemo_opd.workers.teacher_worker",
    "torch.distributed.checkpoint",
    "peft",
    "transformers.models.llama.modeling_llama",
]
"""Modules that the server imports. None of the tests' own: the server does not have pytest's import path."""


def context() -> ForkServerContext:
    costs.refuse("starts a process", "world")
    multiprocessing.set_forkserver_preload(IMPORTED)
    return multiprocessing.get_context("forkserver")


def make(function: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Return a forked process, not yet started, with this process's environment."""
    return context().Process(target=_run, args=(dict(os.environ), function, arguments))


def start(function: Callable[..., None], arguments: tuple[Any, ...], number: int) -> None:
    """Run function(rank, *arguments) in `number` forked processes, and wait. Raises as torch's `spawn` does."""
    method = context().get_start_method()
    mp.start_processes(_run_rank, (dict(os.environ), function, arguments), number, start_method=method)


def _run_rank(
    rank: int, environment: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    _run(environment, function, (rank, *arguments))


def _run(environment: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Call a function in the given environment; the server still has the environment of the session's first call.

    CUDA reads it at its first use, which has not happened yet.
    """
    # A collection would write to, and so copy, the memory that is shared with the server.
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)


def program(module: str, *arguments: str) -> str:
    """Run a module in a forked process as `python -m` does and return its output. Raises the exceptions of `start`."""
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
    """Run a file in a forked process, from the file's folder. Raises the exceptions of `start`."""
    start(_as_script, (file,), 1)


def _as_script(_: int, file: Path) -> None:
    sys.path.insert(0, str(file.parent))
    with chdir(file.parent):
        runpy.run_path(file.name, run_name="__main__")
    os._exit(0)


class Command:
    """A forked process in a new session that runs `python FILE ARGUMENTS…`."""

    def __init__(self, file: Path, arguments: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        """folder: the working directory, which also gets a file with the output. Reports have no charts."""
        self._output = Path(mkstemp(dir=folder, prefix="output_")[1])
        call = (file, tuple(arguments), folder, self._output)
        self._process = context().Process(target=_run, args=(environment, _as_command, call))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def output(self) -> str:
        return self._output.read_text(encoding="utf-8")

    def wait(self, timeout: float | None = None) -> None:
        """Raise TimeoutExpired if it does not end within `timeout` seconds."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self._output), timeout or 0.0)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _as_command(file: Path, arguments: tuple[str, ...], folder: Path, output: Path) -> None:
    report.PLOTS = ()
    os.setsid()
    os.chdir(folder)
    # nohup would have SIGHUP ignored.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    written = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(written, 1)
    os.dup2(written, 2)
    sys.argv, sys.path[0] = [str(file), *arguments], str(file.parent)
    status: str | int | None = 0
    try:
        runpy.run_path(str(file), run_name="__main__")
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else status is not None)
