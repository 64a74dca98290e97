"""Engines on a server, for the student or an evaluated model."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nemo_opd.config.rollout import ServerRollout
from nemo_opd.models.adapter_folder import resolve
from nemo_opd.rollout.base import Completion, Engine, EngineSpec, Generator, Request, Sampling, StudentModel
from nemo_opd.rollout.server.engine import ServerEngine


class _StudentServer(Engine):
    """A server that reads the student's weights from memory if it can, else from a folder."""

    def __init__(self, server: ServerEngine, student: StudentModel, folder: Path, dtype: str) -> None:
        """folder: holds the weights of at most two versions. dtype: name of the dtype of the server's weights."""
        self._server, self._student, self._folder, self._dtype = server, student, folder, dtype
        self._reads_memory = server.takes_memory

    @property
    def version(self) -> int:
        return self._server.version

    @property
    def retried(self) -> int:
        return self._server.retried

    def follow(self, version: int) -> None:
        if version == self.version:
            return
        previous = _version_folder(self._folder, self.version)
        if self._reads_memory:
            with self._student.held_weights(self._dtype) as file:
                self._reads_memory = self._server.update_from_memory(file, version)
        if not self._reads_memory:
            folder = _version_folder(self._folder, version)
            self._student.export(folder, self._dtype)
            self._server.update_weights(folder, version)
        shutil.rmtree(previous, ignore_errors=True)

    def rest(self) -> None:
        self._server.rest()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return self._server.generate(requests, sampling)


@contextmanager
def for_student(settings: ServerRollout, spec: EngineSpec, student: StudentModel, version: int) -> Iterator[Engine]:
    """Open the engine of a run. Raises RolloutError if the server does not start."""
    # A subfolder, so that nothing else is removed with it.
    folder = (settings.weights_folder or spec.workdir) / "rollout_weights"
    first = _version_folder(folder, version)
    try:
        student.export(first, spec.dtype)
        with ServerEngine(settings, spec, first, version) as server:
            server.rest()
            yield _StudentServer(server, student, folder, spec.dtype)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def for_model(settings: ServerRollout, spec: EngineSpec, model: str, _: str) -> Iterator[Generator]:
    """Open the engine of an evaluated model. Raises RolloutError if the server does not start."""
    with ServerEngine(settings, spec, resolve(model)) as server:
        yield server


def _version_folder(folder: Path, version: int) -> Path:
    return folder / f"version_{version:06d}"
