"""Process groups and device meshes of the ranks of one worker group, and signatures of objects between ranks."""

import hmac
import os
import pickle
import secrets
import shutil
import socket
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nemo_opd.distributed.layout import Layout
from nemo_opd.errors import ClusterError

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_FSDP_AXIS = "fsdp"
"""Data-parallel and context-parallel axes joined: parameters are sharded and gradients averaged over it."""
_REPLICATE_AXIS = "replicate"
_DIGEST = "sha256"
_DIGEST_BYTES = 32
_FILE = "nemo_opd_key"
_FOLDER, _READ = "folder", "read_by_{}"
"""Keys of the store: the folder with the key, and whether a rank has read it."""


def serve_store(host: str, timeout_s: float) -> dist.TCPStore:
    """Open rank 0's store on `host` only, at a port that the system picks, so that groups never collide."""
    # TCPStore would listen on all of the machine's addresses, regardless of `host`.
    listener = socket.create_server((host, 0), backlog=socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def connect_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Connect to a running store. Raises DistNetworkError if it has ended or does not answer."""
    try:
        # TCPStore would retry and print a C++ stack each time; it still does if the store ends after this line.
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        raise dist.DistNetworkError(f"no store answers at {host}:{port}: {error}") from error
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def join(store: dist.Store, rank: int, world_size: int, device: str, timeout_s: float) -> None:
    """Join the group's world, on GPUs with the current device. Collective."""
    dist.init_process_group(
        BACKENDS[device],
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        # Without it NCCL guesses the GPU from the rank, in the first collective.
        device_id=torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else None,
    )


def stay_on_this_machine() -> None:
    """Bind this process's groups to the loopback interface, which other machines cannot reach."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def reachable_host() -> str:
    """Return an address of this machine that the group's other ranks can connect to."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket only reads the routing table and sends nothing.
            probe.connect(("10.255.255.255", 1))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


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


def new_key() -> bytes:
    return secrets.token_bytes(_DIGEST_BYTES)


def sign_objects(key: bytes) -> None:
    """Sign the objects that this process sends in collectives, and accept only objects signed with the same key.

    PyTorch's collectives for objects, which checkpoints use too, unpickle what they receive, and whoever can connect to
    a rank's port can send something. A message without a valid signature is refused before it is unpickled.
    """

    class Pickler:
        def __init__(self, file: IO[bytes]) -> None:
            self.file = file

        def dump(self, value: Any) -> None:
            message = pickle.dumps(value)
            self.file.write(hmac.digest(key, message, _DIGEST) + message)

    class Unpickler:
        def __init__(self, file: IO[bytes]) -> None:
            self.file = file

        def load(self) -> Any:
            digest, message = self.file.read(_DIGEST_BYTES), self.file.read()
            if not hmac.compare_digest(digest, hmac.digest(key, message, _DIGEST)):
                raise ClusterError("a rank received an object without the signature of this run; it was not read")
            return pickle.loads(message)

    names = vars(distributed_c10d)
    if not {"_pickler", "_unpickler"} <= names.keys():
        raise ClusterError(f"objects between ranks cannot be signed with PyTorch {torch.__version__}; install 2.14")
    names.update(_pickler=Pickler, _unpickler=Unpickler)


def share_key(store: dist.Store, rank: int, world_size: int) -> bytes:
    """Return the same new key on all ranks of one machine. Collective.

    The store is not trusted: it names a folder, and the key is in a file there, which only this user can have written.
    Raises ClusterError for a folder of another user.
    """
    if rank > 0:
        key = _read_private(Path(store.get(_FOLDER).decode()))
        store.set(_READ.format(rank), "")
        return key
    folder, key = Path(tempfile.mkdtemp(prefix="nemo_opd_")), new_key()
    try:
        (folder / _FILE).write_bytes(key)
        store.set(_FOLDER, str(folder))
        store.wait([_READ.format(other) for other in range(1, world_size)])
    finally:
        shutil.rmtree(folder)
    return key


def _read_private(folder: Path) -> bytes:
    """Read the key from a folder of this user; the opened folder is checked, as its path may lead elsewhere later."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(opened)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ClusterError(f"{folder}: it was named as the folder of the run's key, but others may have written it")
        with open(_FILE, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, dir_fd=opened)) as file:
            return file.read()
    finally:
        os.close(opened)
