"""The engine of each `rollout.type`."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from nemo_opd.config.rollout import HFRollout, RolloutBase, Rollouts, ServerRollout
from nemo_opd.rollout import hf
from nemo_opd.rollout.base import Engine, EngineSpec, Generator, StudentModel
from nemo_opd.rollout.server import server


@dataclass(frozen=True, slots=True)
class _EngineType:
    for_student: Callable[[Any, EngineSpec, StudentModel, int], AbstractContextManager[Engine]]
    for_model: Callable[[Any, EngineSpec, str, str], AbstractContextManager[Generator]]


ENGINES: dict[type[RolloutBase], _EngineType] = {
    HFRollout: _EngineType(hf.for_student, hf.for_model),
    ServerRollout: _EngineType(server.for_student, server.for_model),
}
"""Settings → functions that open the engine. A test holds that every `rollout.type` is here."""


def open_for_student(
    settings: Rollouts, spec: EngineSpec, student: StudentModel, version: int
) -> AbstractContextManager[Engine]:
    """Open the engine of a run, with the student's present weights, of `version`.

    Raises RolloutError where a server does not start.
    """
    return ENGINES[type(settings)].for_student(settings, spec, student, version)


def open_for_model(settings: Rollouts, spec: EngineSpec, model: str, device: str) -> AbstractContextManager[Generator]:
    """Open an engine for a model whose weights do not change.

    model: a folder, hub name or `demo:NAME`. device: auto, cuda or cpu. Raises ModelError where the model cannot be
    loaded, ConfigError for a GPU that is not there, RolloutError where a server does not start.
    """
    return ENGINES[type(settings)].for_model(settings, spec, model, device)
