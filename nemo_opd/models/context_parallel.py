"""Context parallelism: torch's ring attention over sharded positions, and gathering the positions afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from nemo_opd.errors import ConfigError, ModelError

RING = "nemo_opd_ring"
"""Name registered in transformers for the attention that torch's context parallelism can replace."""
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
"""Kernels with a ring version in torch."""
_CHUNKS = 2
"""Chunks of positions per rank: one from the front and one from the back, to balance causal attention over ranks."""


def check_context_parallel(cp: int, device: str, *, key: str) -> None:
    """Raise ConfigError if torch has no ring attention for the device. key: setting of cp, for the message."""
    if cp > 1 and device != "cuda":
        raise ConfigError(
            f"{key}={cp}: needs a GPU, since torch has ring attention for CUDA only; set it to 1 for device={device}"
        )


def use_ring_attention(model: PreTrainedModel, cp: int, *, key: str) -> None:
    """Set the model's attention to the one that `RingAttention` replaces.

    key: setting of cp, for messages. Raises ModelError for attention without a ring version in torch.
    """
    config: Any = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if getattr(config, "attn_logit_softcapping", None):
        reason = "a soft-cap in its attention"
    elif kinds:
        reason = f"layers with {' and '.join(sorted(kinds))}"
    elif window is not None and not hasattr(config, "layer_types") and window < config.max_position_embeddings:
        reason = f"a sliding window of {window} positions"
    else:
        AttentionInterface.register(RING, _causal_attention)
        AttentionMaskInterface.register(RING, _no_mask)
        model.set_attn_implementation(RING)
        return
    raise ModelError(
        f"{key}={cp}: {type(model).__name__} has {reason}, which torch's ring attention does not support; set it to 1"
    )


def _causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute causal attention: queries [b, H, S, d], keys and values [b, H/n, S, d] → [b, S, H, d]."""
    if (repeated := query.shape[1] // key.shape[1]) > 1:
        # torch's ring attention needs as many key heads as query heads.
        key, value = key.repeat_interleave(repeated, 1), value.repeat_interleave(repeated, 1)
    output = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scaling, is_causal=True)
    return output.transpose(1, 2).contiguous(), None


def _no_mask(*_: object, **__: object) -> None:
    """Return no mask: attention is causal over the positions of all ranks, which a local mask cannot express."""


class RingAttention:
    """Ring attention over a context-parallel group, for a model that runs on this rank's positions of every sequence.

    Communicates keys and values of every layer around the group, forward and backward.
    """

    def __init__(self, axis: DeviceMesh) -> None:
        self.axis = axis
        self.multiple = _CHUNKS * axis.size()
        """Sequences must be padded to a multiple of this length."""

    @contextmanager
    def positions(self, length: int, device: torch.device) -> Iterator[Tensor]:
        """Yield this rank's positions; inside, forward and backward passes attend over the positions of all ranks.

        Both passes must run inside, with the same `length`.
        """
        local_positions = torch.arange(length, device=device)
        with (
            sdpa_kernel(_KERNELS),
            context_parallel(
                self.axis,
                buffers=[local_positions],
                buffer_seq_dims=[0],
                no_restore_buffers={local_positions},
            ),
        ):
            yield local_positions


def gather_positions(local: Tensor, positions: Tensor, axis: DeviceMesh) -> Tensor:
    """Gather [b, S/n, ·] at positions [S/n] from the n ranks of `axis` as [b, S, ·] in natural order, on each rank.

    The gradients of the result are summed over the ranks, and each rank gets the part of its positions. Communicates an
    all-gather forward and a reduce-scatter backward.
    """
    gathered = DTensor.from_local(local, axis, [Shard(1)], run_check=False).full_tensor(grad_placements=[Partial()])
    order = DTensor.from_local(positions, axis, [Shard(0)], run_check=False).full_tensor()
    return gathered.index_select(1, order.argsort())
