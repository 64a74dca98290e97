"""Device meshes over the ranks of one worker group."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nemo_opd.distributed.layout import Layout

_FSDP_AXIS = "fsdp"
"""Data-parallel and context-parallel axes joined: parameters are sharded and gradients averaged over it."""


def build_mesh(layout: Layout, device: str) -> DeviceMesh:
    """Return a mesh of all ranks of the group with axis `dp`, or axes `dp`, `cp`, `tp` where cp or tp is above 1.

    device: "cpu" or "cuda". Collective: creates process groups.
    """
    if layout.cp == layout.tp == 1:
        return init_device_mesh(device, (layout.dp,), mesh_dim_names=("dp",))
    return init_device_mesh(device, (layout.dp, layout.cp, layout.tp), mesh_dim_names=("dp", "cp", "tp"))


def fsdp_axis(mesh: DeviceMesh) -> DeviceMesh:
    """Return the one-dimensional mesh that FSDP2 shards over; a loss that is summed over ranks is scaled by its size.

    Collective at the first call for a mesh, which creates a process group; later calls return the same mesh.
    """
    return mesh if mesh.ndim == 1 else mesh["dp", "cp"]._flatten(_FSDP_AXIS)


def tensor_axis(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the ranks that share matrices; None where each has whole ones."""
    return _axis(mesh, "tp")


def context_axis(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the ranks that share sequences; None where each has whole ones."""
    return _axis(mesh, "cp")


def _axis(mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    if mesh.ndim == 1 or mesh[name].size() == 1:
        return None
    return mesh[name]
