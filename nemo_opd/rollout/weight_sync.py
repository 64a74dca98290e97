"""A model's weights in memory, for a server on the same machine."""

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
"""Names of dtypes in safetensors."""


class HeldWeights:
    """A safetensors file in this process's memory, which other processes read by its path in /proc.

    It is anonymous, so nothing is left of it when it is closed, or the process has ended, and its last reader is done.
    It is written here because the library would copy all tensors first.
    """

    def __init__(self, state: dict[str, Tensor]) -> None:
        """state: tensors on the CPU by name; emptied as they are written."""
        name = f"nemo_opd-weights-{uuid4().hex}"
        self._opened = os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC), "wb")
        self.file = FileDescriptor(os.getpid(), self._opened.fileno(), name)
        # The widest first, so that each begins at a multiple of its width.
        names = sorted(state, key=lambda each: -state[each].itemsize)
        self._opened.write(_header({each: state[each] for each in names}))
        for each in names:
            self._opened.write(state.pop(each).contiguous().view(-1).view(torch.uint8).numpy().data)
        self._opened.flush()

    def close(self) -> None:
        self._opened.close()


def _header(tensors: dict[str, Tensor]) -> bytes:
    """Return the header of a safetensors file with these tensors in this order."""
    entries, end = {}, 0
    for name, each in tensors.items():
        begin, end = end, end + each.nbytes
        entries[name] = {"dtype": DTYPES[each.dtype], "shape": list(each.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
