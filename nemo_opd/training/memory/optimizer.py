"""Memory of the optimizer."""

from __future__ import annotations

from math import prod

from nemo_opd.config import optim
from nemo_opd.distributed.layout import Layout
from nemo_opd.training.memory.size import FP32, ModelSize, Shape, shard_numel

_MOMENTS = 2 * FP32
"""Bytes per parameter of AdamW's state, which a class of the user's is taken to have too."""
_SMALL, _BLOCK = 4096, 256
"""Numbers below which bitsandbytes keeps moments in fp32, and numbers of a block with one scale."""


def state_bytes(settings: optim.Optimizer, size: ModelSize, layout: Layout) -> int:
    """Return the bytes of the state that rank 0 keeps, without counters."""
    shapes = size.trained_shapes
    if isinstance(settings, optim.Adafactor):
        return sum(_mean_squares(shape) for shape in shapes)
    if isinstance(settings, optim.AdamW8bit):
        return sum(_quantised(prod(shape)) for shape in shapes)
    moments = _MOMENTS * shard_numel(shapes, layout)
    return moments - FP32 * shard_numel(_matrices(size), layout) if isinstance(settings, optim.Muon) else moments


def temporary_bytes(settings: optim.Optimizer, size: ModelSize, layout: Layout, device: str) -> int:
    """Return the bytes of temporaries during the step, which are largest for the largest parameter."""
    largest = max(shard_numel((shape,), layout) for shape in size.trained_shapes)
    if isinstance(settings, optim.Muon):
        # The update in fp32, and in bf16 the whole matrix, its transpose and product with itself, and the next one.
        whole = max((prod(shape) for shape in _matrices(size)), default=0)
        return max(FP32 * whole + 4 * FP32 // 2 * whole, FP32 * largest)
    if isinstance(settings, optim.Adafactor):
        return 3 * FP32 * largest  # the square, the mean square put together, and the update
    # On a CPU AdamW takes the root of the second moment of one parameter at a time; fused, on a GPU, of a number.
    return 0 if device == "cuda" else FP32 * largest


def _matrices(size: ModelSize) -> tuple[Shape, ...]:
    """Return the shapes of what Muon trains."""
    return tuple(shape for layer in size.layers for shape in layer.trained_shapes if len(shape) == 2)


def _mean_squares(shape: Shape) -> int:
    """Return the bytes of Adafactor's state: of a matrix, the last two dimensions, a number for each row and column."""
    if len(shape) < 2:
        return FP32 * prod(shape)
    *stack, rows, columns = shape
    return FP32 * prod(stack) * (rows + columns)


def _quantised(number: int) -> int:
    return _MOMENTS * number if number < _SMALL else 2 * number + _MOMENTS * -(-number // _BLOCK)
