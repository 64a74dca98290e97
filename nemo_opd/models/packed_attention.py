"""Attention within each sequence of a packed row, and over positions that are sharded between ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel

from nemo_opd.distributed.transfer import on_host
from nemo_opd.errors import ConfigError, ModelError

_PACKED, _PROBE = "nemo_opd_packed", "nemo_opd_probe"
"""Names registered in transformers for attention within sequences, and for a probe that only records calls."""
_REPLACED = "sdpa"
"""transformers' name of the attention that is replaced."""
_TAKE_BOUNDS = {"flash_attention_2", "flash_attention_3"}
"""transformers' names of attentions that take sequence bounds themselves."""
_KINDS = {"full_attention", "sliding_attention"}
"""Kinds of layers that mix tokens by attention only."""
_WITHOUT_EFFECT = {"position_ids", "cu_seq_lens_k", "max_length_k"}
"""Arguments of attention that have no effect here."""
_FLASH_HEAD_DIM = 256
"""Maximum head width of flash attention."""
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""Argument to allow fewer key heads than query heads; versions of torch without it always allow that."""
RING = "nemo_opd_ring"
"""Name registered in transformers for the attention that torch's context parallelism can replace."""
_RING_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
"""Kernels with a ring version in torch."""
_tried: dict[tuple[type[PreTrainedModel], str], list[int | None]] = {}
"""Sliding windows of attention calls by class and configuration of a model that was tried. A run opens equal models."""
_CHUNKS_PER_RANK = 2
"""Chunks of positions per rank: one from the front and one from the back, to balance causal attention over ranks."""


def is_packable(model: PreTrainedModel) -> bool:
    """Return whether the model gives packed sequences the same logits as each sequence by itself.

    It must take positions that count from 0. Its layers must pass the sequence bounds on to an attention that takes
    them or can be replaced, with only a scale, dropout and a sliding window, and must not mix tokens in other ways. A
    copy without weights is called, and its calls are kept for models of equal configuration.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters or _counts_from_padding(model):
        return False
    config = model.config.get_text_config()
    kinds: list[str] | None = getattr(config, "layer_types", None)
    window: int | None = getattr(config, "sliding_window", None)
    if model.config._attn_implementation not in {_REPLACED, *_TAKE_BOUNDS} or not _KINDS.issuperset(kinds or ()):
        return False
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        return False
    windows = [window] * config.num_hidden_layers
    if kinds is not None:
        windows = [window if kind == "sliding_attention" else None for kind in kinds]
    try:
        key = type(model), model.config.to_json_string(use_diff=False)
        if key not in _tried:
            _tried[key] = _windows_of_calls(model)
        return _tried[key] == windows
    except (TypeError, ValueError):  # it takes no bounds, or attends in a way that cannot be replaced
        return False
    except Exception as error:  # architectures raise errors of their own on the meta device
        warnings.warn(
            f"{type(model).__name__} reads padded rows, more slowly, because packed rows could not be tried: "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )
        return False


def _counts_from_padding(model: PreTrainedModel) -> bool:
    """Return whether positions begin after the padding id, as in RoBERTa."""
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    return any(isinstance(table, nn.Embedding) and table.padding_idx is not None for table in tables)


def _windows_of_calls(model: PreTrainedModel) -> list[int | None]:
    """Return the sliding window of each attention call in a forward pass.

    Raises ValueError for a call that packed attention cannot replace.
    """
    windows: list[int | None] = []

    def record(
        module: nn.Module,
        query: Tensor,
        _: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        cu_seq_lens_q: Tensor,
        max_length_q: int,
        scaling: float,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        **more: object,
    ) -> tuple[Tensor, None]:
        arguments = {name for name, value in more.items() if value is not None and value is not False}
        unsupported = arguments - _WITHOUT_EFFECT
        if unsupported or mask is not None or not getattr(module, "is_causal", True):
            raise ValueError(f"attention with {sorted(unsupported)}, with a mask, or not causal")
        windows.append(sliding_window)
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(_PROBE, record)
    config = deepcopy(model.config)
    config._attn_implementation = _PROBE
    _fix_rotary_factors(config)
    with torch.device("meta"):
        # Experts of mixtures can only be called on meta in bfloat16.
        copy: Any = type(model)(config).eval()
        copy.to(torch.bfloat16)
        ids = torch.zeros(1, 3, dtype=torch.int64)
        ends = torch.tensor([0, 2, 3], dtype=torch.int32)
        copy(input_ids=ids, position_ids=ids, use_cache=False, **bounds(ends, longest=2))
    return windows


def _fix_rotary_factors(config: PretrainedConfig) -> None:
    """Replace rotary factors that depend on the positions: up to transformers 5.17 they cannot be computed on meta."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):
        if isinstance(parameters, dict) and parameters.get("rope_type") in ("longrope", "dynamic"):
            parameters["rope_type"] = "default"


def bounds(ends: Tensor, longest: int) -> dict[str, Any]:
    """Return the bounds of packed sequences as keyword arguments that transformers' models pass on to attention.

    ends: int32 [B + 1], as in `Packing.bounds`. longest: number of tokens of the longest sequence.
    """
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


@contextmanager
def packed_attention(model: PreTrainedModel) -> Iterator[None]:
    """Make a packable model attend within the sequences of `bounds` inside, forward and backward."""
    attention = model.config._attn_implementation
    if attention not in _TAKE_BOUNDS:
        model.config._attn_implementation = _PACKED
    try:
        yield
    finally:
        model.config._attn_implementation = attention


def _within_sequences(
    _: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    __: None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **___: object,
) -> tuple[Tensor, None]:
    """Compute causal attention: queries [1, H, N, d], keys and values [1, H/n, N, ·] → [1, N, H, ·].

    sliding_window: number of positions that a token sees, including itself.
    """
    ends, window = cu_seq_lens_q, sliding_window
    if not _has_flash(query, value, dropout):
        return _by_length(query, key, value, ends, scaling, dropout, window), None
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    lengths, window_size = (max_length_q, max_length_q), (-1 if window is None else window - 1, 0)
    attend: Any = varlen_attn
    output: Tensor = attend(query, key, value, ends, ends, *lengths, scale=scaling, window_size=window_size, **_GROUPED)
    return output.unsqueeze(0), None


AttentionInterface.register(_PACKED, _within_sequences)


def _has_flash(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Return whether torch's flash attention supports the call: not in fp32, with dropout, or on older GPUs."""
    width = query.shape[3]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and not dropout
        and width == value.shape[3] <= _FLASH_HEAD_DIM
        and width % 8 == 0
        and torch.cuda.get_device_properties(query.device).major >= 8
    )


@torch.compiler.disable
def _by_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    scale: float,
    dropout: float,
    window: int | None,
) -> Tensor:
    """Compute attention with one call for each run of consecutive sequences of equal length."""
    if (repeated := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(repeated, 1), value.repeat_interleave(repeated, 1)
    host_ends = on_host(ends)
    lengths = (ends if host_ends is None else host_ends).diff().tolist()
    runs = [(length, len(list(equal))) for length, equal in groupby(lengths)]
    sizes = [length * number for length, number in runs]
    parts = zip(*(tensor.squeeze(0).split(sizes, 1) for tensor in (query, key, value)), strict=True)
    outputs = []
    for (length, _), part in zip(runs, parts, strict=True):
        q, k, v = (tensor.unflatten(1, (-1, length)).transpose(0, 1) for tensor in part)
        mask = None if window is None or length <= window else _band(length, window, q.device)
        output = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None, scale=scale)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).unsqueeze(0)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """Return the mask [length, length] of positions that each position sees (methods.md §8.4, formula 8.1)."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


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
        self.multiple = _CHUNKS_PER_RANK * axis.size()
        """Sequences must be padded to a multiple of this length."""

    @contextmanager
    def positions(self, length: int, device: torch.device) -> Iterator[Tensor]:
        """Yield this rank's positions; inside, forward and backward passes attend over the positions of all ranks.

        Both passes must run inside, with the same `length`.
        """
        local_positions = torch.arange(length, device=device)
        with (
            sdpa_kernel(_RING_KERNELS),
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
