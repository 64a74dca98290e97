"""Joining and leaving the world of one worker group."""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


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
