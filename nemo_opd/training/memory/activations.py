"""Activations of a decoder (after Korthikanti et al. 2022, §4): an estimate, within 20 % on CPU, unproven on GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_opd.training.memory.size import FP32, LayerSize, ModelSize


@dataclass(frozen=True, slots=True)
class Work:
    """A microbatch on one rank."""

    rows: int
    """Sequences."""
    length: int
    """Positions of a sequence, over all context-parallel ranks."""
    cp: int
    tp: int
    sequence_parallel: bool
    compute_bytes: int
    """Bytes of a number."""
    is_fused: bool = False
    """Layers are computed by the kernels of `fused_layers`, where they are known."""

    @property
    def tokens(self) -> int:
        """Positions on this rank."""
        return self.rows * -(-self.length // self.cp)

    @property
    def stream_share(self) -> int:
        """Number of parts into which sequence parallelism cuts hidden states between layers."""
        return self.tp if self.sequence_parallel else 1


def layer_bytes(layer: LayerSize, work: Work) -> int:
    """Return what one layer keeps for backward on one rank.

    With c bytes per number, N the norms of hidden states (numbers per token) and D the hidden size, a token keeps

        8 · N / sp  +  2 · D · c  +  (c · (W / D + F) + 8 · Nh + (4 + c) · S · H) / tp

    A norm keeps its input and its output in fp32 (some models round the output); the matrices after the two norms read
    D numbers each. W are the weights that a token is multiplied by, so W / D numbers go in or out of them inside the
    layer, F more come out of the MLP's activation function, and Nh go through norms of queries and keys. With kernels
    no number is kept that comes out of the activation function, and a norm keeps its input alone, as it is:

        c · N / sp  +  2 · D · c  +  (c · W / D + c · Nh + (4 + c) · S · H) / tp

    Eager attention keeps S scores for each of H heads. Experts read and write D numbers each. An adapter keeps A's
    output and, with dropout, a copy of its input and the mask.
    """
    c = work.compute_bytes
    of_norm, activated = (c, 0) if work.is_fused and layer.is_known else (2 * FP32, layer.mlp_width)
    stream = of_norm * layer.stream_norms // work.stream_share
    scores = layer.num_heads * work.length if layer.is_eager else 0
    inner = c * (layer.inner_width + activated) + of_norm * layer.head_norms + (FP32 + c) * scores
    linear = 2 * c * layer.hidden_size * (1 + layer.num_experts)
    adapters = sum(rank * c + inputs * (c + 1) * layer.has_dropout for rank, inputs in layer.adapters[::2])
    return work.tokens * (stream + linear + inner // work.tp + adapters)


def saved_activations(size: ModelSize, work: Work, *, checkpointing: bool) -> int:
    """Return what the backbone keeps for backward on one rank: all layers, or with checkpointing the layers' inputs."""
    c, hidden = work.compute_bytes, work.tokens * size.hidden_size
    of_norm = c if work.is_fused and all(layer.is_known for layer in size.layers) else 2 * FP32
    final = hidden * (of_norm // work.stream_share + c)
    if checkpointing:
        return final + len(size.layers) * hidden * c // work.stream_share
    return final + sum(layer_bytes(layer, work) for layer in size.layers)


def working_bytes(size: ModelSize, work: Work) -> int:
    """Return the temporaries of one layer, forward or backward: what is inside, and three hidden states in fp32."""
    return work.tokens * max(_inside(layer, work) // work.tp + 3 * FP32 * layer.hidden_size for layer in size.layers)


def _inside(layer: LayerSize, work: Work) -> int:
    scores = 2 * FP32 * layer.num_heads * work.length if layer.is_eager else 0
    return work.compute_bytes * layer.inner_width + scores
