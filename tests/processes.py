"""Processes of tests, forked from one that has imported what they need: each would take seconds of its own for that."""

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
    # The collector would scan, and so copy, the memory that is shared with the server.
    gc.freeze()
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


class Command:
    """Such a process that does what `python FILE ARGUMENTS…` does, in a session of its own."""

    def __init__(self, file: Path, arguments: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        """folder: where it runs, and where its output is kept in a file. Reports have no charts."""
        self._output = Path(mkstemp(dir=folder, prefix="output_")[1])
        given = (file, tuple(arguments), folder, self._output)
        self._process = context().Process(target=_run, args=(environment, _as_command, given))
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
    # Also where the tests run under nohup.
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
