"""Worker groups on Ray: a bundle for each device of a placement, and an actor for each rank."""

import gc
import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_opd.cluster.group import Call, Cluster, Failure, Group, Rank
from nemo_opd.cluster.placement import Placement, Places, num_cores
from nemo_opd.cluster.ray.calls import ANSWER_S, ProgressMonitor, ProgressReporter, RayCall, gather
from nemo_opd.cluster.ray.ray_session import LOOPBACK, RaySession
from nemo_opd.cluster.ray.services import forwarded_secrets
from nemo_opd.config.cluster import Cluster as Settings
from nemo_opd.distributed import process_group
from nemo_opd.distributed.layout import Place
from nemo_opd.distributed.process_group import connect_store, new_key, sign_objects
from nemo_opd.errors import ClusterError

_NODE_ID = "ray.io/node-id"
"""Label that Ray puts on every node."""
_RESERVE_S = 120.0
"""Limit of the wait for devices, which other runs may still be releasing."""
LEAVE_S = 10.0
"""Limit of the wait for ranks to leave; a rank that hangs in a collective never does."""


class RayCluster(Cluster):
    """The devices of a placement, each a bundle with room for an actor of every group on it."""

    def __init__(self, settings: Settings, *, device: str, placement: Placement) -> None:
        """Start or join Ray and reserve the devices. Raises ClusterError if they are not free in time."""
        self.device = device
        self.placement = placement
        self.timeout_s = settings.timeout_s
        self.threads = placement.num_threads(num_cores()) if device == "cpu" else 1
        self.host = LOOPBACK if placement.num_nodes == 1 else None
        """Host of the groups' stores; None stands for a node address that the other nodes can reach."""
        self.monitors: list[ProgressMonitor] = []
        """Progress of each group, for the display."""
        self.under_way: dict[int, RayCall] = {}
        """Calls that have not been gathered yet, keyed by their `id`."""
        self.is_broken = False
        """Whether a call has failed, so that ranks may hang in a collective and never leave on request."""
        num_gpus = placement.devices_per_node if device == "cuda" else None
        self.session = RaySession(settings.address, num_cpus=placement.num_processes, num_gpus=num_gpus)
        self.services = self.session.services
        try:
            self._placement_group = self._reserve()
        except BaseException:
            self.close()
            raise

    def _reserve(self) -> Any:
        """Reserve one placement group; with several nodes, put each bundle on the node of its place."""
        per_device = self.placement.groups_per_device
        bundle: dict[str, float] = {"CPU": per_device}
        if self.device == "cuda":
            bundle["GPU"] = 1
        timeout_s = min(self.timeout_s, _RESERVE_S)
        nodes = None
        if self.placement.num_nodes > 1:
            per_node = {name: count * self.placement.devices_per_node for name, count in bundle.items()}
            ids = _choose_nodes(self.placement.num_nodes, per_node, timeout_s)
            nodes = [ids[place.node] for place in self.placement.devices]
        bundles = [bundle] * len(self.placement.devices)
        if nodes is None:
            group = placement_group(bundles, strategy="STRICT_PACK")
        else:
            selectors = [{_NODE_ID: node} for node in nodes]
            group = placement_group(bundles, strategy="PACK", bundle_label_selector=selectors)
        if not group.wait(timeout_s):
            remove_placement_group(group)
            raise ClusterError(
                f"{len(self.placement.devices)} ranks of {bundle} are not free on this cluster, which has "
                f"{ray.cluster_resources()}; lower cluster.num_nodes, cluster.gpus_per_node or cluster.cpu_ranks"
            )
        return group

    def options(self, place: Place) -> dict[str, Any]:
        """Return Ray's options for an actor at this place; actors on one device get equal shares of it."""
        bundle = self.placement.devices.index(place)
        strategy = PlacementGroupSchedulingStrategy(self._placement_group, placement_group_bundle_index=bundle)
        gpus = int(10_000 / self.placement.groups_per_device) / 10_000 if self.device == "cuda" else 0.0
        return {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": strategy}

    def group(self, name: str, worker: type, arguments: Mapping[str, Any], places: Places) -> "RayGroup":
        return RayGroup(self, name, worker, arguments, places)

    def gather(self, calls: Sequence[Call]) -> list[list[Any]]:
        for call in calls:
            self.under_way.pop(id(call), None)
        try:
            return gather(calls, self.timeout_s, self.services, self.monitors, list(self.under_way.values()))
        except BaseException:
            self.is_broken = True
            raise

    def close(self) -> None:
        self.session.close()


class RayGroup(Group):
    """A group whose ranks run a worker each, in one torch.distributed world."""

    cluster: RayCluster

    def __init__(
        self, cluster: RayCluster, name: str, worker: type, arguments: Mapping[str, Any], places: Places
    ) -> None:
        """Start the processes, rank r at `places[r]`; `ready` returns when all have built their workers."""
        super().__init__(cluster, name, places)
        key = new_key()
        self.actors = [self._actor(rank, place, key) for rank, place in enumerate(places)]
        self._address = self.actors[0].serve.remote()
        self._monitor = ProgressMonitor(name, self._store)
        cluster.monitors.append(self._monitor)
        shared = ray.put(dict(arguments))
        self.ready = RayCall(
            name, "start", "", [actor.create.remote(self._address, worker, shared) for actor in self.actors]
        )

    def _actor(self, rank: int, place: Place, key: bytes) -> Any:
        cluster = self.cluster
        remote = ray.remote(max_restarts=0, **cluster.options(place))(RankActor)
        secrets = forwarded_secrets(os.environ)
        return remote.remote(
            rank, self.size, cluster.device, cluster.threads, cluster.timeout_s, cluster.host, secrets, key
        )

    def submit(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None, *, about: str = "") -> RayCall:
        per_rank = [()] * self.size if arguments is None else arguments
        calls = zip(self.actors, per_rank, strict=True)
        references = [actor.call.remote(method, rank_arguments) for actor, rank_arguments in calls]
        call = RayCall(self.name, method, about, references)
        self.cluster.under_way[id(call)] = call
        return call

    def address(self) -> tuple[str, int]:
        """Return host and port of the store, which rank 0 serves as long as it is alive."""
        host, port = ray.get(self._address)
        return host, port

    def _store(self) -> dist.Store | None:
        """Connect to the store; return None if it is not served yet."""
        served, _ = ray.wait([self._address], timeout=0)
        return connect_store(*self.address(), ANSWER_S) if served else None

    def close(self) -> None:
        """End the processes; unless a call has failed, let them release their resources first."""
        self._monitor.close()
        if not self.cluster.services.are_alive:
            return  # workers have ended with Ray, and calls would hang
        try:
            if not self.cluster.is_broken:
                leaving = [actor.leave.remote() for actor in self.actors]
                ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_S)
        finally:
            for actor in self.actors:
                ray.kill(actor)


def _choose_nodes(num_nodes: int, need: dict[str, float], timeout_s: float) -> list[str]:
    """Return the ids of `num_nodes` nodes that each have `need` free, ordered by address.

    Ray finds them by a temporary reservation. Raises ClusterError if there are too few.
    """
    reservation = placement_group([need] * num_nodes, strategy="STRICT_SPREAD")
    try:
        if not reservation.wait(timeout_s):
            raise ClusterError(_too_few_nodes(num_nodes, need))
        ids = set(placement_group_table(reservation)["bundles_to_node_id"].values())
    finally:
        remove_placement_group(reservation)
    return [node["NodeID"] for node in _living_nodes() if node["NodeID"] in ids]


def _living_nodes() -> list[dict[str, Any]]:
    """Return Ray's descriptions of the nodes that are alive, ordered by address."""
    alive = (node for node in ray.nodes() if node["Alive"])
    return sorted(alive, key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))


def _too_few_nodes(num_nodes: int, need: dict[str, float]) -> str:
    nodes = _living_nodes()
    enough = [node for node in nodes if all(node["Resources"].get(name, 0) >= count for name, count in need.items())]
    free = ({name: node["Resources"].get(name, 0) for name in need} for node in nodes)
    has = "; ".join(
        f"{node['NodeManagerAddress']}: {_amount(counts)}" for node, counts in zip(nodes, free, strict=True)
    )
    if len(enough) >= num_nodes:
        return (
            f"cluster.num_nodes={num_nodes} nodes with {_amount(need)} each: the Ray cluster has them ({has}), but "
            "other jobs use them; wait until they are free, or lower cluster.num_nodes"
        )
    advice = f"write cluster.num_nodes={len(enough)}, or fewer ranks a node" if enough else "lower the ranks of a node"
    return (
        f"cluster.num_nodes={num_nodes} nodes with {_amount(need)} each: the Ray cluster has {len(enough)} such "
        f"({has}); {advice} (cluster.gpus_per_node, cluster.cpu_ranks), or start Ray on more machines"
    )


def _amount(resources: dict[str, float]) -> str:
    """Format resources, such as `2 CPU, 1 GPU`."""
    return ", ".join(f"{count:g} {name}" for name, count in resources.items())


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
        # Until `create`, whose arguments import the worker's libraries: the collector would scan these again and again.
        gc.disable()
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
        gc.freeze()
        gc.enable()
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

    def leave(self) -> None:
        if self.reporter is not None:
            self.reporter.close()
        if self.rank is not None:
            self.rank.close()
            self.rank = None
        process_group.leave()
