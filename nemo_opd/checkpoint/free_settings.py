"""The settings that may change when a run is continued: speed, placement, reporting, length, the way to obtain samples.

All others, which decide what is learned from what, are bound. `tests/checkpoint/test_free_settings.py` lists those, and
fails for a field that is in neither list.
"""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from nemo_opd.config import environment, handoff, reward, rollout
from nemo_opd.config.cluster import Cluster
from nemo_opd.config.data import Data
from nemo_opd.config.health import Health
from nemo_opd.config.logging import Console, Logging, TensorBoard, Wandb
from nemo_opd.config.lora import Lora
from nemo_opd.config.model import Student
from nemo_opd.config.parallelism import Parallelism
from nemo_opd.config.run import RunConfig
from nemo_opd.config.run_fields import Run
from nemo_opd.config.teacher import TeacherBase
from nemo_opd.config.train import Train

FREE: dict[type[BaseModel], str] = {
    # These sections are free as a whole: they share classes with sections that are bound.
    RunConfig: "evaluation",
    Data: "validation num_workers cache",
    Run: "name output_dir resume dry_run",
    Train: "max_steps epochs micro_batch_size validate_every save_every keep_last max_skipped_steps",
    Student: "offload activation_checkpointing compile",
    TeacherBase: "offload",
    Lora: "export",
    Parallelism: "tp cp sequence_parallel",
    handoff.HandoffBase: "transport",
    rollout.HFRollout: "batch_size",
    # Where a server is and how it is reached. Its program is bound: each has its own numerics.
    rollout.ServerRollout: (
        "url command options environment memory_share start_timeout_s request_timeout_s retries concurrency "
        "weights_folder"
    ),
    reward.FunctionReward: "call_timeout_s",
    environment.EnvironmentBase: "call_timeout_s",
    Health: "action patience max_length_growth max_truncation_rate min_entropy max_repetition max_mismatch",
    Cluster: ("device launcher num_nodes gpus_per_node cpu_ranks placement teacher_ranks prefetch address timeout_s"),
    Console: "enabled interval_s memory_table",
    TensorBoard: "enabled",
    Wandb: "enabled project entity mode",
    Logging: "gradients_every",
}


def decided_in(table: dict[type[BaseModel], str], model: type[BaseModel], name: str) -> bool:
    """Return whether the table names the field for the model or a class that it inherits from."""
    return any(name in table.get(base, "").split() for base in model.__mro__)


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel], str]]:
    """Yield dotted key, class and name of every field that needs a decision: values, and sections that are free whole.

    An element of a list has the key `*`.
    """
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        inner, is_list = _sections(field.annotation)
        if not inner or decided_in(FREE, model, name):
            yield key, model, name
            continue
        for section in inner:
            yield from fields(section, f"{key}.*." if is_list else f"{key}.")


def _sections(annotation: Any) -> tuple[list[type[BaseModel]], bool]:
    """Return the classes that a field may hold, and whether it holds a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation], False
    inner = [_sections(argument) for argument in get_args(annotation)]
    is_list = getattr(annotation, "__origin__", None) is tuple
    return [model for models, _ in inner for model in models], is_list or any(many for _, many in inner)


FREE_KEYS = frozenset(key for key, model, name in fields(RunConfig) if decided_in(FREE, model, name))
"""Dotted keys of free settings, with `*` for the index in a list."""
