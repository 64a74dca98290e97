"""The process of one rank, which joins its group's world and runs its worker's methods."""

import os
from collections.abc import Mapping
from typing import Any

import ray
import torch

from nemo_opd.cluster.base import Failure, Rank
from nemo_opd.cluster.ray.calls import ANSWER_S, ProgressReporter
from nemo_opd.distributed import process_group
from nemo_opd.distributed.signed_objects import sign_objects


class RankActor:
    """The Ray actor of one rank."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: str,
        threads: int,
        timeout_s: float,
        host: str | None,
        secrets: Mapping[str, str],
        key: bytes,
    ) -> None:
        """Set up the process.

        host: address of the group's store if all ranks are on this machine, else None. secrets: environment variables
        of the driver. key: signs the objects that the group's ranks send each other.
        """
        os.environ.update(secrets)
        sign_objects(key)
        # Only the actor's own GPU is visible to it.
        os.environ["LOCAL_RANK"] = "0"
        if device == "cuda":
            torch.cuda.set_device(0)
        torch.set_num_threads(threads)
        if host is not None:
            process_group.stay_on_this_machine()
        self.index = rank
        self.world_size = world_size
        self.device = device
        self.timeout_s = timeout_s
        self.host = host
        self.store: torch.distributed.TCPStore | None = None
        self.reporter: ProgressReporter | None = None
        self.rank: Rank | None = None

    def serve(self) -> tuple[str, int]:
        """Serve the group's store, on rank 0 only, and return its host and port."""
        host = self.host or process_group.reachable_host()
        self.store = process_group.serve_store(host, self.timeout_s)
        return host, self.store.port

    def create(self, address: tuple[str, int], worker: type, arguments: dict[str, Any]) -> Failure | None:
        """Join the world and build the worker; return the failure, if any."""
        try:
            if self.index == 0:
                self.reporter = ProgressReporter(lambda: process_group.connect_store(*address, ANSWER_S))
            store = self.store or process_group.connect_store(*address, self.timeout_s)
            process_group.join(store, self.index, self.world_size, self.device, self.timeout_s)
            self.rank = Rank(worker, arguments)
        except Exception as error:
            return Failure.of(error)
        return None

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Return the method's result, or a Failure."""
        assert self.rank is not None
        try:
            return self.rank.call(method, arguments)
        except Exception as error:
            return Failure.of(error)

    def whereabouts(self) -> tuple[str, tuple[str, ...]]:
        """Return Ray's id of the node, and the names of this rank's GPUs."""
        context = ray.get_runtime_context()
        return context.get_node_id(), tuple(context.get_accelerator_ids().get("GPU", ()))

    def leave(self) -> None:
        if self.reporter is not None:
            self.reporter.close()
        if self.rank is not None:
            self.rank.close()
            self.rank = None
        process_group.leave()
