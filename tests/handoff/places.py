"""Places of ranks on nodes."""

from nemo_opd.distributed.layout import Layout, Place
from nemo_opd.handoff.slices import LayoutPair


def filled(num_ranks: int, ranks_per_node: int, first: int = 0) -> tuple[Place, ...]:
    """Return the places of consecutive ranks, one a device, from the `first` device of the cluster on."""
    return tuple(Place(*divmod(device, ranks_per_node)) for device in range(first, first + num_ranks))


def colocated(student: Layout, teacher: Layout, ranks_per_node: int) -> LayoutPair:
    """Return both on the same devices, rank by rank, nodes filled one after another."""
    return LayoutPair(student, teacher, *(filled(layout.size, ranks_per_node) for layout in (student, teacher)))
