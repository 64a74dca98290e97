"""The transports by name."""

from nemo_opd.config.handoff import HandoffBase
from nemo_opd.errors import ConfigError
from nemo_opd.handoff.base import Receiver, Sender
from nemo_opd.handoff.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from nemo_opd.handoff.shared_memory import SharedMemoryReceiver, SharedMemorySender

TRANSPORTS: dict[str, tuple[type[Sender], type[Receiver]]] = {
    "cuda_ipc": (CudaIpcSender, CudaIpcReceiver),
    "shared_memory": (SharedMemorySender, SharedMemoryReceiver),
}


def transport_for(handoff: HandoffBase, device: str) -> str:
    """Return the transport's name; `auto` follows the device. Raises ConfigError for one of another device."""
    natural = "cuda_ipc" if device == "cuda" else "shared_memory"
    if handoff.transport not in ("auto", natural):
        raise ConfigError(
            f"handoff.transport={handoff.transport}: the run is on {device}, which hands over by {natural}; "
            f"write handoff.transport=auto or {natural}"
        )
    return natural
