"""Weights in a process's memory, read by safetensors and by other processes."""

import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

from nemo_opd.handoff.shared_memory import DTYPES, FileDescriptor, HeldWeights


def test_safetensors_reads_every_dtype_and_shape() -> None:
    """Catches wrong offsets: one-byte dtypes before wider ones, an empty tensor, and one that is not contiguous."""
    expected = {f"{dtype}": torch.arange(7).to(dtype) for dtype in reversed(DTYPES)}
    expected |= {"none": torch.zeros(0, 3), "one": torch.tensor(5.0), "across": torch.arange(6.0).view(2, 3).T}
    state = dict(expected)

    weights = HeldWeights(state)

    assert state == {}
    with safe_open(weights.file.path, framework="pt") as tensors:
        assert set(tensors.keys()) == expected.keys()
        for name, value in expected.items():
            read = tensors.get_tensor(name)
            assert read.dtype == value.dtype
            assert read.data_ptr() % value.itemsize == 0
            assert torch.equal(read, value), name
    weights.close()
    with pytest.raises(FileNotFoundError):
        weights.file.check()


@pytest.mark.world
def test_the_memory_ends_with_its_process() -> None:
    script = (
        "import os, torch; from nemo_opd.handoff.shared_memory import HeldWeights\n"
        "weights = HeldWeights({'weight': torch.ones(3)}); print(weights.file.number, weights.file.name, flush=True)\n"
        "os.read(0, 1)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        number, name = process.stdout.readline().decode().split()
        file = FileDescriptor(process.pid, int(number), name)
        with safe_open(file.path, framework="pt") as tensors:
            assert tensors.get_tensor("weight").sum() == 3
        process.kill()

    with pytest.raises(FileNotFoundError):
        file.check()
