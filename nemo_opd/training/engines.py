"""Generation engines of a run: the student's, selected by `rollout`, and a teacher's workers."""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from nemo_opd.config.rollout import HFRollout, ServerRollout
from nemo_opd.handoff.shared_memory import FileDescriptor
from nemo_opd.rollout.base import Completion, Engine, EngineSpec, Generator, Request, Sampling, StudentModel
from nemo_opd.rollout.engines import ENGINES
from nemo_opd.rollout.server.gpus import server_gpus
from nemo_opd.training.benchmarks import longest_question
from nemo_opd.training.models import Models, export_whole
from nemo_opd.training.plan import Plan


@dataclass(frozen=True, slots=True)
class _Student(StudentModel):
    """Adapter of the student's workers to an engine."""

    models: Models

    def generate(self, requests: Sequence[Request], sampling: Sampling, version: int) -> list[Completion]:
        return self.models.generate(requests, sampling, version)

    def export(self, folder: Path, dtype: str) -> None:
        export_whole(self.models, folder, dtype)

    def held_weights(self, dtype: str) -> AbstractContextManager[FileDescriptor]:
        return self.models.held_weights(dtype)


def open_engine(plan: Plan, models: Models, version: int) -> AbstractContextManager[Engine]:
    """Open the engine that `rollout` selects, or the student's workers without rollouts.

    version: version of the student's current weights. Raises RolloutError if a server does not start.
    """
    config = plan.config
    settings = HFRollout() if config.rollout is None else config.rollout
    spec = EngineSpec(
        plan.student_vocab_size,
        plan.sampled_end_ids,
        "bfloat16" if plan.device == "cuda" else "float32",
        plan.output_dir,
        max_length=_max_length(plan),
        rounds_logits=config.handoff.type == "logits",
        is_training=True,
        memory_share=plan.server_share,
        sleeps=plan.device == "cuda" and isinstance(settings, ServerRollout) and settings.sleeps_on_gpus,
        gpus=server_gpus(settings),
    )
    return ENGINES[type(settings)].for_student(settings, spec, _Student(models), version)


def _max_length(plan: Plan) -> int:
    """Return the maximum tokens of a rollout or of a benchmark's question with its answer."""
    return max(plan.config.train.max_length, longest_question(plan.benchmarks))


class TeacherWorkers(Generator):
    """Generator over an active teacher's workers, used before the first step."""

    def __init__(self, models: Models, teacher: int, end_ids: Collection[int]) -> None:
        """Store the arguments. end_ids: tokens that end a sequence."""
        self._models, self._teacher, self._end_ids = models, teacher, end_ids

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return self._models.generate_by_teacher(self._teacher, requests, sampling, self._end_ids)
