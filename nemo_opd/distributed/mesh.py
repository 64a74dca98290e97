"""Device meshes over the ranks of one worker group."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nemo_opd.distributed.layout import Layout

FSDP_AXIS = "fsdp"
"""Data parallel and context parallel as one: parameters are sharded over it, and gradients are averaged."""


def build_mesh(layout: Layout, device: str) -> DeviceMesh:
    """Build the mesh of all ranks: `dp` alone where neither context nor tensor is parallel, else `dp`, `cp`, `tp`.

    device: "cpu" or "cuda". Collective: it makes process groups.
    """
    if layout.cp == layout.tp == 1:
        return init_device_mesh(device, (layout.dp,), mesh_dim_names=("dp",))
    return init_device_mesh(device, (layout.dp, layout.cp, layout.tp), mesh_dim_names=("dp", "cp", "tp"))


def fsdp_axis(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axis that FSDP2 shards over; a loss that is summed over ranks is multiplied by its size.

    Collective at its first call for a mesh, when it makes a process group; later ones give the same.
    """
    return mesh if mesh.ndim == 1 else mesh["dp", "cp"]._flatten(FSDP_AXIS)


def tensor_axis(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the axis of ranks that share matrices; None where each has its own."""
    return _axis(mesh, "tp")


def context_axis(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the axis of ranks that share positions; None where each has all of a sequence."""
    return _axis(mesh, "cp")


def _axis(mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    if mesh.ndim == 1 or mesh[name].size() == 1:
        return None
    return mesh[name]
