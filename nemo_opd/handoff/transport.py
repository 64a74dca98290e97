"""The transports by name, and the choice of one."""

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
"""`pinned_memory` is what `handoff.transport=shared_memory` means on GPUs."""


def choose_transport(handoff: HandoffBase, device: str, obstacle: Callable[[], str | None]) -> tuple[str, list[str]]:
    """Return the transport's name, and a warning where it is not the one that `auto` prefers.

    obstacle: tries CUDA IPC and returns why it cannot be used, or None; called where the answer matters. Raises
    ConfigError for a transport that was asked for and cannot be used.
    """
    asked = handoff.transport
    if device == "cpu":
        if asked == "cuda_ipc":
            raise ConfigError(
                f"handoff.transport={asked}: the run is on {device}, which hands over by shared_memory; write "
                "handoff.transport=auto or shared_memory"
            )
        return "shared_memory", []
    if asked == "shared_memory":
        return "pinned_memory", []
    reason = obstacle()
    if reason is None:
        return "cuda_ipc", []
    if asked == "cuda_ipc":
        raise ConfigError(
            f"handoff.transport=cuda_ipc: a process on this machine cannot read another's GPU memory ({reason}); write "
            "handoff.transport=auto or shared_memory, which goes through main memory, or give the processes common "
            "PID and IPC namespaces (in Docker --pid=host --ipc=host)"
        )
    return "pinned_memory", [
        f"handoff.transport=auto: teachers' output goes through pinned main memory, since a process on this machine "
        f"cannot read another's GPU memory ({reason}); handoff.transport=shared_memory chooses this without a try"
    ]
