"""Device meshes over the ranks of one worker group."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nemo_opd.distributed.layout import Layout

_FSDP_AXIS = "fsdp"
"""Data-parallel and context-parallel axes joined: parameters are sharded and gradients averaged over it."""
_REPLICATE_AXIS = "replicate"


def build_mesh(layout: Layout, device: str) -> DeviceMesh:
    """Return a mesh of all ranks of the group with axis `dp`, or axes `dp`, `cp`, `tp` if cp or tp is above 1.

    With several copies of the model there is a first axis `replicate`, and `dp` counts the data-parallel ranks of one
    copy. device: "cpu" or "cuda". Collective: creates process groups.
    """
    axes = {"dp": layout.dp // layout.replicas}
    if layout.replicas > 1:
        axes = {_REPLICATE_AXIS: layout.replicas, **axes}
    if layout.cp > 1 or layout.tp > 1:
        axes |= {"cp": layout.cp, "tp": layout.tp}
    return init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))


def fsdp_axis(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh for FSDP2; a loss that is summed over ranks is scaled by the mesh's size.

    It has one axis, or an axis of copies before the sharding axis. Collective at the first call for a mesh, which
    creates a process group; later calls return an equal mesh.
    """
    names = mesh.mesh_dim_names or ()
    if "cp" not in names:
        return mesh
    shards = mesh["dp", "cp"]._flatten(_FSDP_AXIS)
    return DeviceMesh._concatenate([mesh[_REPLICATE_AXIS], shards]) if _REPLICATE_AXIS in names else shards


def tensor_axis(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the axis of ranks that share matrices, or None without tensor parallelism."""
    return _axis(mesh, "tp")


def context_axis(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the axis of ranks that share sequences, or None without context parallelism."""
    return _axis(mesh, "cp")


def _axis(mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    if name not in (mesh.mesh_dim_names or ()) or mesh[name].size() == 1:
        return None
    return mesh[name]
