"""Model weights in shared memory, for a server on the same machine."""

import json
import os
from uuid import uuid4

import torch
from torch import Tensor

from nemo_opd.handoff.shared_memory import FileDescriptor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Safetensors names of dtypes."""


class HeldWeights:
    """A safetensors file in this process's memory, which other processes read through /proc.

    The file is anonymous: it disappears once it is closed, or this process has ended, and its last reader is done. It
    is written here because the safetensors library would copy all tensors first.
    """

    def __init__(self, state: dict[str, Tensor]) -> None:
        """state: CPU tensors by name; entries are removed as they are written."""
        name = f"nemo_opd-weights-{uuid4().hex}"
        self._stream = os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC), "wb")
        self.file = FileDescriptor(os.getpid(), self._stream.fileno(), name)
        # Widest dtype first, so that each tensor starts at a multiple of its element size.
        names = sorted(state, key=lambda tensor_name: -state[tensor_name].itemsize)
        self._stream.write(_header({tensor_name: state[tensor_name] for tensor_name in names}))
        for tensor_name in names:
            self._stream.write(state.pop(tensor_name).contiguous().view(-1).view(torch.uint8).numpy().data)
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def _header(tensors: dict[str, Tensor]) -> bytes:
    """Return the header of a safetensors file with these tensors, in this order."""
    entries, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
