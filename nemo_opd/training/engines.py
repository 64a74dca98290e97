"""Generation engines, keyed by the settings of `rollout`: the student's workers, and servers."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from nemo_opd.config.rollout import HFRollout, RolloutBase, Rollouts, ServerRollout
from nemo_opd.config.settings import choices, require_lines
from nemo_opd.preflight.plan import Plan
from nemo_opd.preflight.prompts import longest_question
from nemo_opd.rollout import transformers_engine
from nemo_opd.rollout.engine_interface import Engine, EngineSpec, Generator, StudentModel
from nemo_opd.rollout.server import engine
from nemo_opd.rollout.server.server_process import server_gpus
from nemo_opd.training.models import Models


@dataclass(frozen=True, slots=True)
class EngineType:
    """Functions that open an engine; the first argument is its settings."""

    for_student: Callable[[Any, EngineSpec, StudentModel, int], AbstractContextManager[Engine]]
    """Function that opens a run's engine with the student's current weights and their version. Raises RolloutError if a
    server does not start.
    """
    for_model: Callable[[Any, EngineSpec, str, str], AbstractContextManager[Generator]]
    """Function that opens the engine of a model with fixed weights: folder, hub name or `demo:NAME`, and device (auto,
    cuda or cpu).

    Raises ModelError if the model cannot be loaded, ConfigError if the GPU is missing, RolloutError if a server does
    not start.
    """


ENGINES: dict[type[RolloutBase], EngineType] = {
    HFRollout: EngineType(transformers_engine.for_student, transformers_engine.for_model),
    ServerRollout: EngineType(engine.for_student, engine.for_model),
}
"""Settings → engine."""
require_lines(choices(Rollouts), ENGINES, "ENGINES in nemo_opd/training/engines.py")


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
        # The longest rollout, or a benchmark's longest question with its answer.
        max_length=max(config.train.max_length, longest_question(plan.benchmarks)),
        rounds_logits=config.handoff.type == "logits",
        is_training=True,
        memory_share=plan.server_share,
        sleeps=plan.device == "cuda" and isinstance(settings, ServerRollout) and settings.sleeps_on_gpus,
        gpus=server_gpus(settings),
    )
    return ENGINES[type(settings)].for_student(settings, spec, models, version)
