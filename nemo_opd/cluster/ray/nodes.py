"""Selection and reservation of a Ray cluster's nodes."""

from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from nemo_opd.errors import ClusterError

_NODE_ID = "ray.io/node-id"
"""Label that Ray puts on every node."""


def choose_nodes(num_nodes: int, need: dict[str, float], timeout_s: float) -> list[str]:
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


def reserve(bundles: Sequence[dict[str, float]], nodes: Sequence[str] | None, timeout_s: float) -> Any:
    """Return a placement group with bundle i on `nodes[i]`, or with all bundles on one node if `nodes` is None.

    Returns None if it is not free within `timeout_s`.
    """
    if nodes is None:
        group = placement_group(list(bundles), strategy="STRICT_PACK")
    else:
        group = placement_group(
            list(bundles), strategy="PACK", bundle_label_selector=[{_NODE_ID: node} for node in nodes]
        )
    if group.wait(timeout_s):
        return group
    remove_placement_group(group)
    return None


def _too_few_nodes(num_nodes: int, need: dict[str, float]) -> str:
    nodes = _living_nodes()
    enough = [node for node in nodes if all(node["Resources"].get(name, 0) >= count for name, count in need.items())]
    has = "; ".join(_describe(node["NodeManagerAddress"], node["Resources"], need) for node in nodes)
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


def _describe(address: str, resources: dict[str, float], need: dict[str, float]) -> str:
    return f"{address}: {_amount({name: resources.get(name, 0) for name in need})}"


def _amount(resources: dict[str, float]) -> str:
    """Format resources, such as `2 CPU, 1 GPU`."""
    return ", ".join(f"{count:g} {name}" for name, count in resources.items())
