"""Sequences whose positions lie on several ranks: torch's ring attention, and whole sequences again after it."""

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
"""The name under which transformers has the attention that torch's context parallelism can take over."""
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
"""Those that torch has a ring of."""
CHUNKS = 2
"""A rank's positions are two runs, one from the front and one from the back, so that all have the same work."""


def check_context_parallel(cp: int, device: str, *, key: str) -> None:
    """Raises ConfigError, naming `key` (that of cp), where there is no ring attention for the device."""
    if cp > 1 and device != "cuda":
        raise ConfigError(
            f"{key}={cp}: needs a GPU, since torch has ring attention for CUDA only; set it to 1 where device={device}"
        )


def use_ring_attention(model: PreTrainedModel, cp: int, *, key: str) -> None:
    """Give the model the attention that `RingAttention` runs.

    Raises ModelError, naming `key` (that of cp), for attention that torch has no ring of.
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
        AttentionInterface.register(RING, causal_attention)
        AttentionMaskInterface.register(RING, no_mask)
        model.set_attn_implementation(RING)
        return
    raise ModelError(f"{key}={cp}: {type(model).__name__} has {reason}, of which torch has no ring; set it to 1")


def causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, None]:
    """Heads [b, H, S, d], of keys and values [b, H/n, S, d] → [b, S, H, d]."""
    if (repeated := query.shape[1] // key.shape[1]) > 1:
        # torch's rings take as many heads of keys as of queries.
        key, value = key.repeat_interleave(repeated, 1), value.repeat_interleave(repeated, 1)
    output = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scaling, is_causal=True)
    return output.transpose(1, 2).contiguous(), None


def no_mask(*_: object, **__: object) -> None:
    """Attention is causal over the positions of all ranks, which no mask of this rank's could say."""


class RingAttention:
    """Runs a model on this rank's positions of every sequence.

    Communicates keys and values of every layer around the group, forward and backward.
    """

    def __init__(self, axis: DeviceMesh) -> None:
        self.axis = axis
        self.multiple = CHUNKS * axis.size()
        """Sequences must be padded to a multiple of it."""

    @contextmanager
    def positions(self, length: int, device: torch.device) -> Iterator[Tensor]:
        """Inside, forward and backward passes attend over all ranks' positions, of which this rank has those given.

        Both passes, and what is computed again in the second, must run inside, each with the same `length`.
        """
        own = torch.arange(length, device=device)
        with (
            sdpa_kernel(KERNELS),
            context_parallel(self.axis, buffers=[own], buffer_seq_dims=[0], no_restore_buffers={own}),
        ):
            yield own

    def whole(self, local: Tensor, positions: Tensor) -> Tensor:
        """[b, S/cp, ·] at this rank's positions → [b, S, ·] in natural order; see `gather_positions`."""
        return gather_positions(local, positions, self.axis)


def gather_positions(local: Tensor, positions: Tensor, axis: DeviceMesh) -> Tensor:
    """[b, S/n, ·], at positions [S/n], of the n ranks of `axis` → [b, S, ·] in natural order, on each of them.

    The gradients that the ranks have with respect to the result are summed, and each takes that of its own positions.
    Communicates an all-gather forward and a reduce-scatter backward.
    """
    together = DTensor.from_local(local, axis, [Shard(1)], run_check=False).full_tensor(grad_placements=[Partial()])
    order = DTensor.from_local(positions, axis, [Shard(0)], run_check=False).full_tensor()
    return together.index_select(1, order.argsort())
