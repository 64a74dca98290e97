"""The worker of a group in one process: building it, calling it, closing it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_opd.cluster.activity import activity
from nemo_opd.workers.memory import Task, needs_memory

KNOBS = ("lower train.micro_batch_size or train.max_length", "use more ranks")
"""Advice where a worker does not know better itself."""


class Rank:
    """One rank of one group. Its process must have joined the group's world."""

    def __init__(self, worker: type, arguments: Mapping[str, Any]) -> None:
        """Build the worker. Raises what it raises, and ClusterError where memory runs out."""
        with needs_memory(Task(activity("start"), KNOBS)):
            self.worker: Any = worker(**arguments)

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of the worker. Raises what it raises, and ClusterError where memory runs out."""
        with needs_memory(Task(activity(method), KNOBS)):
            return getattr(self.worker, method)(*arguments)

    def close(self) -> None:
        self.worker.close()
