"""Bytes by formula: the optimizer's state and key-value caches exactly, activations as an estimate."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from nemo_opd.config import optim
from nemo_opd.distributed.layout import Layout
from nemo_opd.training.model_size import LayerSize, ModelSize, Shape, shard_numel

FP32 = 4
"""Bytes per number."""
_MOMENTS = 2 * FP32
"""Bytes per parameter of AdamW's state, which a class of the user's is taken to have too."""
_SMALL, _BLOCK = 4096, 256
"""Numbers below which bitsandbytes keeps moments in fp32, and numbers of a block with one scale."""


def state_bytes(settings: optim.Optimizer, size: ModelSize, layout: Layout) -> int:
    """Return the bytes of the optimizer's state that rank 0 keeps, without counters."""
    shapes = size.trained_shapes
    if isinstance(settings, optim.Adafactor):
        return sum(_mean_squares(shape) for shape in shapes)
    if isinstance(settings, optim.AdamW8bit):
        return sum(_quantised(prod(shape)) for shape in shapes)
    moments = _MOMENTS * shard_numel(shapes, layout)
    if not isinstance(settings, optim.Muon):
        return moments
    with_one = tuple(shape for layer in size.layers for shape in layer.trained_shapes if len(shape) == 2)
    return moments - FP32 * shard_numel(with_one, layout)


def _mean_squares(shape: Shape) -> int:
    """Return the bytes of Adafactor's state: of a matrix, the last two dimensions, a number for each row and column."""
    if len(shape) < 2:
        return FP32 * prod(shape)
    *stack, rows, columns = shape
    return FP32 * prod(stack) * (rows + columns)


def _quantised(number: int) -> int:
    return _MOMENTS * number if number < _SMALL else 2 * number + _MOMENTS * -(-number // _BLOCK)


def cache_bytes(size: ModelSize, tp: int, itemsize: int, rows: int, length: int, *, is_read: bool = True) -> int:
    """Return the keys and values of all layers on a tensor-parallel rank, exact to the byte for plain attention.

    is_read: the prompt has been read; until then layers with a sliding window keep it whole. Layers that keep less
    (linear attention, compressed keys) count like all others.
    """
    kept = (min(length, layer.window or length) if is_read else length for layer in size.layers)
    numbers = sum(2 * layer.key_width * each for layer, each in zip(size.layers, kept, strict=True))
    return rows * numbers * itemsize // tp


@dataclass(frozen=True, slots=True)
class Work:
    """A microbatch on one rank."""

    tokens: int
    """Positions on this rank."""
    length: int
    """Positions of a sequence, over all context-parallel ranks."""
    itemsize: int
    """Bytes of a number."""
    tp: int = 1
    stream_share: int = 1
    """Number of parts into which sequence parallelism cuts hidden states between layers."""
    is_fused: bool = False
    """Layers are computed by the kernels of `fused_layers`, where they are known."""


def layer_bytes(layer: LayerSize, work: Work) -> int:
    """Return what one layer keeps for backward on one rank.

    With c bytes per number, D the hidden size, W the weights that a token is multiplied by, N the numbers that pass
    through norms, E experts per token and S positions, a token keeps

        8 · N / sp  +  2 · c · D · (1 + E)  +  (5/4 · c · W / D + 8 · S · H) / tp

    A norm keeps its input and its output in fp32; the matrices after norms, and each expert, read D numbers and write
    D. W / D numbers go in or out of matrices inside the layer, and about a quarter as many come out of the MLP's
    activation function. With kernels a norm keeps its input alone, as it is, and the activation function nothing: c and
    1 in place of 8 and 5/4. H heads keep their scores: none but with eager attention. Dropout of adapters keeps a copy
    of its input and the mask.
    """
    c = work.itemsize
    of_norm, quarters = (c, 4) if work.is_fused and layer.is_known else (2 * FP32, 5)
    stream = of_norm * layer.norms // work.stream_share + 2 * c * layer.hidden_size * (1 + layer.num_experts)
    inner = quarters * c * layer.active_weights // (4 * layer.hidden_size) + 2 * FP32 * work.length * layer.score_heads
    return work.tokens * (stream + inner // work.tp + (c + 1) * layer.dropped)


def saved_activations(size: ModelSize, work: Work, *, checkpointing: bool) -> int:
    """Return what the backbone keeps for backward on one rank: all layers, or with checkpointing the layers' inputs."""
    inputs = work.tokens * size.hidden_size * work.itemsize // work.stream_share
    final = work.tokens * size.hidden_size * (2 * FP32 + work.itemsize)
    return final + sum(inputs if checkpointing else layer_bytes(layer, work) for layer in size.layers)


def temporaries(size: ModelSize, work: Work) -> int:
    """Return the temporaries of one layer, forward or backward: about three quarters of what it keeps for backward."""
    return 3 * max(layer_bytes(layer, work) for layer in size.layers) // 4
