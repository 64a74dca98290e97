"""The machines of a Ray cluster that a run gets."""

from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from nemo_opd.errors import ClusterError

NODE_ID = "ray.io/node-id"
"""The label that Ray gives every node."""


def choose_nodes(num_nodes: int, need: dict[str, float], timeout_s: float) -> list[str]:
    """Ids of different nodes that each have `need` free, by address.

    Ray itself finds them, by reserving all of that on each. Raises ClusterError where there are not as many.
    """
    whole = placement_group([need] * num_nodes, strategy="STRICT_SPREAD")
    try:
        if not whole.wait(timeout_s):
            raise ClusterError(too_few_nodes(num_nodes, need))
        chosen = set(placement_group_table(whole)["bundles_to_node_id"].values())
    finally:
        remove_placement_group(whole)
    return [node["NodeID"] for node in living_nodes() if node["NodeID"] in chosen]


def living_nodes() -> list[dict[str, Any]]:
    """By address, as Ray describes them."""
    alive = (node for node in ray.nodes() if node["Alive"])
    return sorted(alive, key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))


def reserve(bundles: Sequence[dict[str, float]], nodes: Sequence[str] | None, timeout_s: float) -> Any:
    """A placement group whose bundle i is on node i of `nodes`, or all on any one node where `nodes` is None.

    None where that is not free within `timeout_s`.
    """
    if nodes is None:
        group = placement_group(list(bundles), strategy="STRICT_PACK")
    else:
        group = placement_group(
            list(bundles), strategy="PACK", bundle_label_selector=[{NODE_ID: node} for node in nodes]
        )
    if group.wait(timeout_s):
        return group
    remove_placement_group(group)
    return None


def too_few_nodes(num_nodes: int, need: dict[str, float]) -> str:
    nodes = living_nodes()
    enough = [node for node in nodes if all(node["Resources"].get(name, 0) >= count for name, count in need.items())]
    has = "; ".join(described(node["NodeManagerAddress"], node["Resources"], need) for node in nodes)
    if len(enough) >= num_nodes:
        return (
            f"cluster.num_nodes={num_nodes} nodes with {amount(need)} each: the Ray cluster has them ({has}), but they "
            "are taken by others; wait until they are free, or lower cluster.num_nodes"
        )
    advice = f"write cluster.num_nodes={len(enough)}, or fewer ranks a node" if enough else "lower the ranks of a node"
    return (
        f"cluster.num_nodes={num_nodes} nodes with {amount(need)} each: the Ray cluster has {len(enough)} such "
        f"({has}); {advice} (cluster.gpus_per_node, cluster.cpu_ranks), or start Ray on more machines"
    )


def described(address: str, resources: dict[str, float], need: dict[str, float]) -> str:
    return f"{address}: {amount({name: resources.get(name, 0) for name in need})}"


def amount(resources: dict[str, float]) -> str:
    return ", ".join(f"{count:g} {name}" for name, count in resources.items())
