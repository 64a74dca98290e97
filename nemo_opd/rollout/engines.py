"""Engines by `rollout.type`."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from nemo_opd.config.choices import choices, require_lines
from nemo_opd.config.rollout import HFRollout, RolloutBase, Rollouts, ServerRollout
from nemo_opd.rollout import hf
from nemo_opd.rollout.base import Engine, EngineSpec, Generator, StudentModel


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


def _server_for_student(*arguments: Any) -> AbstractContextManager[Engine]:
    from nemo_opd.rollout.server import server  # only for runs that use one

    return server.for_student(*arguments)


def _server_for_model(*arguments: Any) -> AbstractContextManager[Generator]:
    from nemo_opd.rollout.server import server

    return server.for_model(*arguments)


ENGINES: dict[type[RolloutBase], EngineType] = {
    HFRollout: EngineType(hf.for_student, hf.for_model),
    ServerRollout: EngineType(_server_for_student, _server_for_model),
}
"""Settings → engine."""
require_lines(choices(Rollouts), ENGINES, "ENGINES in nemo_opd/rollout/engines.py")
