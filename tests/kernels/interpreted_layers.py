"""Kernels of layers in Triton's interpreter, a part of the program `interpreted`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from nemo_opd.kernels import launch
from nemo_opd.kernels import layers as kernels
from nemo_opd.models.fused_layers import GATE, ROTATION, norm_of, try_kernels
from tests.kernels import layers
from tests.kernels.moved import moved_bytes

FAMILIES = ("llama, tied", "qwen3, norms of heads", "gemma3, two rotary embeddings", "phi3, fused")


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Round to nearest (the interpreter truncates), and let programs take several steps."""
    convert = interpreter._convert_float

    def rounded(numbers: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(numbers, source, target, mode)
        values = torch.from_numpy(np.ascontiguousarray(numbers).view(np.float32))
        return values.bfloat16().view(torch.int16).numpy().view(np.uint16)

    with (
        patch.object(interpreter, "_convert_float", rounded),
        patch.object(launch, "num_multiprocessors", lambda device: 3),
        patch.object(launch, "BLOCK", 64),
        patch.object(kernels, "_NORM_TILE", 256),
        patch.object(kernels, "_ROTARY_TILE", 16),
    ):
        yield


def results() -> dict[str, Any]:
    """Return errors of functions and models, and for each kernel its declared and its actual bytes."""
    moves: list[tuple[str, int, int]] = []

    def run(name: str, num_bytes: int, kernel: Callable[[], object], **options: Any) -> None:
        moved_before = moved[0]
        kernel()
        moves.append((name, num_bytes, moved[0] - moved_before))

    with as_on_a_gpu():
        functions = {f"{name}, bfloat16": layers.compared(name, torch.bfloat16, "cpu") for name in layers.cases()}
        with moved_bytes() as moved, patch.object(launch, "launch", run):
            functions |= {f"{name}, float32": layers.compared(name, torch.float32, "cpu") for name in layers.cases()}
        models = {family: layers.compared_model(family, "cpu") for family in FAMILIES}
        for dtype in (torch.float32, torch.bfloat16):  # raises if a trial on a GPU would refuse them
            try_kernels((norm_of(70), norm_of(2048), GATE, ROTATION), dtype, "cpu")
        models["adapters"] = layers.compared_model(FAMILIES[0], "cpu", adapters=True)
        return {"functions": functions, "models": models, "bytes": moves}
