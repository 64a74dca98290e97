"""Where the student samples: in its own workers, or on a server that is given its weights."""

import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol

from nemo_opd.config.rollout import ServerRollout
from nemo_opd.rollout.base import Completion, Generator, Request, Sampling
from nemo_opd.rollout.server import ServerEngine
from nemo_opd.training.models import Models, export_whole
from nemo_opd.training.plan import Plan
from nemo_opd.training.prompts import Prompts


class StudentEngine(Generator, Protocol):
    """An engine that samples with the student's weights, as of some optimizer step."""

    @property
    def version(self) -> int:
        """The optimizer steps that its weights have seen."""
        ...

    @property
    def retried(self) -> int:
        """Requests that had to be made again, since the start of the run."""
        ...

    def follow(self, version: int) -> None:
        """Sample from now on with the student's weights as they are, which have seen `version` optimizer steps."""
        ...


@contextmanager
def open_engine(plan: Plan, models: Models, version: int) -> Iterator[StudentEngine]:
    """The engine that `rollout` names, with the student's weights as they are, of `version`; closed at the end.

    Raises RolloutError where a server does not come up.
    """
    settings, prompts = plan.config.rollout, plan.data
    assert isinstance(prompts, Prompts)
    if not isinstance(settings, ServerRollout):
        yield OwnWorkers(models, version)
        return
    # A folder of its own, which can be removed whole, whatever else is beside it.
    folder = (settings.weights_folder or plan.output_dir) / "rollout_weights"
    first, dtype = version_folder(folder, version), "bfloat16" if plan.device == "cuda" else "float32"
    try:
        export_whole(models, first, dtype)
        engine = ServerEngine(
            settings,
            model=first,
            vocab_size=plan.student.vocab_size,
            end_ids=prompts.end_ids,
            dtype=dtype,
            workdir=plan.output_dir,
            version=version,
            max_length=plan.config.train.max_length,
            rounds_logits=plan.config.handoff.type == "logits",
            beside_training=True,
        )
        with closing(engine):
            yield Server(engine, models, folder, dtype)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def version_folder(folder: Path, version: int) -> Path:
    return folder / f"version_{version:06d}"


class OwnWorkers:
    """The student's workers sample themselves, so there is nothing to hand over."""

    retried = 0

    def __init__(self, models: Models, version: int) -> None:
        self._models = models
        self.version = version

    def follow(self, version: int) -> None:
        self.version = version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return self._models.generate(requests, sampling, self.version)


class Server:
    """An engine in a process of its own, which reads the student's weights in memory where it can, or in a folder."""

    def __init__(self, engine: ServerEngine, models: Models, folder: Path, dtype: str) -> None:
        """folder: for the weights; of two versions at most at a time. dtype: of the server's weights, by its name."""
        self._engine, self._models, self._folder, self._dtype = engine, models, folder, dtype
        self._reads_memory = engine.takes_memory

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def retried(self) -> int:
        return self._engine.retried

    def follow(self, version: int) -> None:
        if version == self.version:
            return
        former = version_folder(self._folder, self.version)
        self._reads_memory = self._reads_memory and self._through_memory(version)
        if not self._reads_memory:
            self._through_folder(version)
        shutil.rmtree(former, ignore_errors=True)

    def _through_memory(self, version: int) -> bool:
        """Whether the server could read it."""
        with self._models.held_weights(self._dtype) as file:
            return self._engine.update_from_memory(file, version)

    def _through_folder(self, version: int) -> None:
        folder = version_folder(self._folder, version)
        export_whole(self._models, folder, self._dtype)
        self._engine.update_weights(folder, version)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return self._engine.generate(requests, sampling)


class TeachersWorkers:
    """An active teacher in its own workers; its weights do not change."""

    def __init__(self, models: Models, teacher: int, end_ids: Collection[int], batch_size: int) -> None:
        """end_ids: tokens that end what it samples. batch_size: sequences a rank takes at a time."""
        self._models, self._teacher = models, teacher
        self._end_ids, self._batch_size = end_ids, batch_size

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return self._models.generate_by_teacher(self._teacher, requests, sampling, self._end_ids, self._batch_size)
