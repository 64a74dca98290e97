"""The transports, keyed by name, and the choice of one."""

from collections.abc import Callable

from nemo_opd.config.handoff import HandoffBase
from nemo_opd.errors import ConfigError
from nemo_opd.handoff.base import Receiver, Sender
from nemo_opd.handoff.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from nemo_opd.handoff.pinned_memory import PinnedMemoryReceiver, PinnedMemorySender
from nemo_opd.handoff.shared_memory import SharedMemoryReceiver, SharedMemorySender

TRANSPORTS: dict[str, tuple[type[Sender], type[Receiver]]] = {
    "cuda_ipc": (CudaIpcSender, CudaIpcReceiver),
    "pinned_memory": (PinnedMemorySender, PinnedMemoryReceiver),
    "shared_memory": (SharedMemorySender, SharedMemoryReceiver),
}
"""Sender and receiver types; on GPUs `handoff.transport=shared_memory` means `pinned_memory`."""


def choose_transport(handoff: HandoffBase, device: str, obstacle: Callable[[], str | None]) -> tuple[str, list[str]]:
    """Return the transport's name, and a warning if `auto` cannot use the transport that it prefers.

    obstacle: tries CUDA IPC and returns why it cannot be used, or None; called only if the answer matters. Raises
    ConfigError if the configured transport cannot be used.
    """
    if device == "cpu":
        if handoff.transport == "cuda_ipc":
            raise ConfigError(
                "handoff.transport=cuda_ipc: the run is on cpu, where only shared_memory works; write "
                "handoff.transport=auto or shared_memory"
            )
        return "shared_memory", []
    if handoff.transport == "shared_memory":
        return "pinned_memory", []
    reason = obstacle()
    if reason is None:
        return "cuda_ipc", []
    if handoff.transport == "cuda_ipc":
        raise ConfigError(
            "handoff.transport=cuda_ipc: processes on this machine cannot read each other's GPU memory "
            f"({reason}); write handoff.transport=auto or shared_memory, which goes through main memory, or let the "
            "processes share PID and IPC namespaces (in Docker --pid=host --ipc=host)"
        )
    return "pinned_memory", [
        "handoff.transport=auto: teachers' output goes through pinned main memory, because processes on this machine "
        f"cannot read each other's GPU memory ({reason}); write handoff.transport=shared_memory to skip this check"
    ]
