"""Formulas for bytes: optimizer state and key-value caches are exact, activations are estimated."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from nemo_opd.config import optim
from nemo_opd.distributed.layout import Layout
from nemo_opd.training.model_size import LayerSize, ModelSize, Shape, shard_numel

FP32 = 4
"""Bytes per number."""
_MOMENTS = 2 * FP32
"""Bytes per parameter of AdamW's state; assumed for the user's optimizers, too."""
_SMALL, _BLOCK = 4096, 256
"""bitsandbytes: size below which a tensor's moments stay in fp32, and elements per quantisation scale."""


def state_bytes(settings: optim.Optimizer, size: ModelSize, layout: Layout) -> int:
    """Return the bytes of the optimizer's state on rank 0, without step counters."""
    shapes = size.trained_shapes
    if isinstance(settings, optim.Adafactor):
        return sum(_mean_squares(shape) for shape in shapes)
    if isinstance(settings, optim.AdamW8bit):
        return sum(_quantised(prod(shape)) for shape in shapes)
    moments = _MOMENTS * shard_numel(shapes, layout)
    if not isinstance(settings, optim.Muon):
        return moments
    with_muon = tuple(shape for layer in size.layers for shape in layer.trained_shapes if len(shape) == 2)
    return moments - FP32 * shard_numel(with_muon, layout)  # Muon has one moment, the other parameters two


def _mean_squares(shape: Shape) -> int:
    """Return the bytes of Adafactor's state: one number per row and column of the last two dimensions."""
    if len(shape) < 2:
        return FP32 * prod(shape)
    *stack, rows, columns = shape
    return FP32 * prod(stack) * (rows + columns)


def _quantised(numel: int) -> int:
    return _MOMENTS * numel if numel < _SMALL else 2 * numel + _MOMENTS * -(-numel // _BLOCK)


def cache_bytes(size: ModelSize, tp: int, itemsize: int, rows: int, length: int, *, is_read: bool = True) -> int:
    """Return the bytes of all layers' keys and values on a tensor-parallel rank; exact for plain attention.

    is_read: the prompt has been read; until then sliding-window layers keep all of it. Layers that keep less (linear
    attention, compressed keys) count like plain attention.
    """
    numel = sum(
        2 * layer.key_width * (min(length, layer.window or length) if is_read else length) for layer in size.layers
    )
    return rows * numel * itemsize // tp


@dataclass(frozen=True, slots=True)
class Work:
    """Forward pass of a microbatch on one rank."""

    tokens: int
    """Positions on this rank."""
    length: int
    """Positions of a sequence, over all context-parallel ranks."""
    itemsize: int
    """Bytes per element of the compute dtype."""
    tp: int = 1
    stream_share: int = 1
    """Number of ranks over which sequence parallelism cuts the hidden states between layers."""
    is_fused: bool = False
    """Whether known layers are computed by the kernels of `fused_layers`."""


def layer_bytes(layer: LayerSize, work: Work) -> int:
    """Return the bytes that one layer saves for backward on one rank.

    With c bytes per element, hidden size D, W active weights per token, N elements through norms, E experts per token,
    S positions and H heads with materialised scores, a token saves

        8 · N / sp  +  2 · c · D · (1 + E)  +  (5/4 · c · W / D + 8 · S · H) / tp

    A norm saves input and output in fp32; the matrices after norms, and each expert, read D elements and write D. W / D
    elements enter or leave matrices inside the layer, and the MLP's activation function outputs about a quarter as
    many. With fused kernels a norm saves only its input, in the compute dtype, and the activation function nothing: c
    and 1 replace 8 and 5/4. Only eager attention materialises scores. Adapter dropout saves a copy of its input and the
    mask.
    """
    c = work.itemsize
    of_norm, quarters = (c, 4) if work.is_fused and layer.is_known else (2 * FP32, 5)
    stream = of_norm * layer.norms // work.stream_share + 2 * c * layer.hidden_size * (1 + layer.num_experts)
    inner = quarters * c * layer.active_weights // (4 * layer.hidden_size) + 2 * FP32 * work.length * layer.score_heads
    return work.tokens * (stream + inner // work.tp + (c + 1) * layer.dropped)


def saved_activations(size: ModelSize, work: Work, *, checkpointing: bool) -> int:
    """Return the bytes that the backbone saves for backward on one rank; with checkpointing, the layers' inputs."""
    inputs = work.tokens * size.hidden_size * work.itemsize // work.stream_share
    final = work.tokens * size.hidden_size * (2 * FP32 + work.itemsize)
    return final + sum(inputs if checkpointing else layer_bytes(layer, work) for layer in size.layers)


def temporaries(size: ModelSize, work: Work) -> int:
    """Return the bytes of one layer's temporaries, forward or backward: about 3/4 of its saved activations."""
    return 3 * max(layer_bytes(layer, work) for layer in size.layers) // 4
