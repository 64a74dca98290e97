"""What a forward pass keeps for backward (Korthikanti et al. 2022, §4, for today's layers and no dropout)."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_opd.training.memory.size import LayerSize, ModelSize

MASKED_HEAD_WIDTH = 256
"""Widest head for which transformers lets attention read keys and values without repeating them for each query."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a rank computes at a time."""

    rows: int
    """Sequences of a microbatch."""
    length: int
    """Positions of a sequence, over all context-parallel ranks."""
    cp: int
    tp: int
    sequence_parallel: bool
    compute_bytes: int
    """Of one number."""

    @property
    def tokens(self) -> int:
        """Of this rank."""
        return self.rows * -(-self.length // self.cp)

    @property
    def stream_share(self) -> int:
        """Into how many parts hidden states between layers are cut."""
        return self.tp if self.sequence_parallel else 1


def layer_bytes(layer: LayerSize, work: Work) -> int:
    """What one layer keeps for backward, on one rank.

    With D the hidden size, Q and K the widths of all query and all key-value heads, H heads, F the MLP's width and c
    bytes a number, a token leaves behind
    - what the linear layers after a norm read, of attention and of the MLP: 2 · D · c;
    - what each norm keeps: in bf16 its input in fp32 and its output before the weight, 4 + c a number, or 4 + 4 where
      the weight is applied in fp32 (Gemma); over D, or over Q and K where heads have norms;
    - what fused attention keeps: rotated queries, rotated keys, values and its output, (2 · Q + 2 · K) · c, and the
      logarithm of each softmax's sum in fp32, 4 · H. Rotary position embeddings themselves keep only their cosines and
      sines. Keys and values are repeated for each query (K becomes Q) where there is a mask;
    - what eager attention keeps instead of the sums: for each of S scores a head its softmax in fp32 and, in bf16,
      rounded, and where scores are capped the tanh;
    - what the MLP keeps: gate, up, activated gate and their product, 4 · F · c, or 2 · F · c without a gate; with
      experts also what goes into and comes out of each;
    - what adapters keep, which no tensor parallelism cuts.
    Tensor parallelism cuts heads and F, but not where a fused matrix's output is made whole again before it is taken
    apart; sequence parallelism cuts what norms keep; context parallelism cuts tokens, and repeats keys and values.
    """
    c = work.compute_bytes
    norms_of_heads = sum(norm.saved(c) for norm in layer.norms if not norm.on_stream)
    norms_of_stream = sum(norm.saved(c) for norm in layer.norms if norm.on_stream)
    attention = (attention_bytes(layer, work) + norms_of_heads) // attention_share(layer, work)
    mlp = mlp_bytes(layer, c) // mlp_share(layer, work)
    adapters = sum(adapter.saved(c) for adapter in layer.adapters)
    return work.tokens * (2 * layer.hidden_size * c + norms_of_stream // work.stream_share + attention + mlp + adapters)


def attention_share(layer: LayerSize, work: Work) -> int:
    return 1 if layer.fused_keys else work.tp


def mlp_share(layer: LayerSize, work: Work) -> int:
    return 1 if layer.fused_gate else work.tp


def attention_bytes(layer: LayerSize, work: Work) -> int:
    """A token, over all heads."""
    c, keys = work.compute_bytes, layer.key_width
    too_wide = layer.query_width > MASKED_HEAD_WIDTH * layer.num_heads
    repeats = is_masked(layer, work) or layer.has_scores or too_wide or work.cp > 1
    if repeats:
        keys = layer.query_width
    kept = (2 * layer.query_width + 2 * keys) * c
    if layer.fused_keys and (not repeats or layer.key_width == layer.query_width):
        # Values are a view of the matrix's whole output.
        kept += (layer.query_width + layer.key_width) * c
    return kept + (layer.num_heads * work.length * score_bytes(layer, c) if layer.has_scores else 4 * layer.num_heads)


def score_bytes(layer: LayerSize, compute_bytes: int) -> int:
    rounded = 0 if compute_bytes == 4 else compute_bytes
    return 4 + rounded + (compute_bytes if layer.caps_scores else 0)


def is_masked(layer: LayerSize, work: Work) -> bool:
    return layer.window is not None and work.length > layer.window


def mlp_bytes(layer: LayerSize, compute_bytes: int) -> int:
    """A token."""
    inner = (4 if layer.is_gated else 2) * layer.mlp_width
    return (inner + 2 * layer.num_experts * layer.hidden_size) * compute_bytes


def saved_activations(size: ModelSize, work: Work, *, checkpointing: bool) -> int:
    """What the whole backbone keeps until backward, on one rank.

    Without checkpointing the sum of `layer_bytes`; with it each layer's input, D · c a token. Besides: the ids, the
    cosines and sines, and what the final norm keeps with the hidden states that it makes.
    """
    c = work.compute_bytes
    outside = 8 * work.tokens + 2 * size.head_width * c * (work.tokens // work.rows)
    if size.final_norm is not None:
        outside += work.tokens * size.final_norm.saved(c) // work.stream_share
    outside += work.tokens * size.hidden_size * c
    if checkpointing:
        return outside + len(size.layers) * work.tokens * size.hidden_size * c // work.stream_share
    return outside + sum(layer_bytes(layer, work) for layer in size.layers)


def backward_bytes(size: ModelSize, work: Work, *, checkpointing: bool) -> int:
    """The most that the backward pass of one layer needs besides: its gradients, and itself if it is computed again."""
    temporary = max(backward_temporaries(layer, work) for layer in size.layers)
    return temporary + (max(layer_bytes(layer, work) for layer in size.layers) if checkpointing else 0)


def backward_temporaries(layer: LayerSize, work: Work) -> int:
    """Gradients alive at once: of product, gate and up in the MLP, or of queries, keys, values and scores.

    Besides, of hidden states, what a norm computes in fp32: its input's gradient and the two terms that make it.
    """
    return work.tokens * (widest(layer, work) + 3 * 4 * layer.hidden_size)


def forward_temporaries(size: ModelSize, work: Work) -> int:
    """The most that a layer needs at once where nothing is kept for backward, with hidden states in fp32 in a norm."""
    beside = 2 * size.hidden_size * max(work.compute_bytes, 4)
    return work.tokens * (beside + max(widest(layer, work) for layer in size.layers))


def widest(layer: LayerSize, work: Work) -> int:
    """A token's numbers inside of a layer: three of the MLP's width, or queries, keys, values, output and scores."""
    c = work.compute_bytes
    attention = (2 * layer.query_width + 2 * layer.key_width) * c
    if layer.has_scores:
        attention += 2 * layer.num_heads * work.length * 4
    mlp = 3 * layer.mlp_width * c
    return max(attention // attention_share(layer, work), mlp // mlp_share(layer, work))
