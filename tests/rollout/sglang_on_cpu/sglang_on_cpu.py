"""Plugin of SGLang that lets it draw by seed on CPUs."""

from typing import Any

import numpy as np
import torch


def register() -> None:
    """Replace what deterministic inference needs CUDA for."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    replaced: dict[str, Any] = {
        # PyTorch's own kernels stay.
        "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode": lambda: None,
        "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32": murmur_hash32,
    }
    for name, function in replaced.items():
        HookRegistry.register(name, function, HookType.REPLACE)


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Hash seeds and positions [n] with columns [m] to uint32 [n, m], as SGLang's kernel of this name does."""
    seeds = seed.numpy().astype(np.uint64)[:, None]
    blocks = (seeds, seeds >> np.uint64(32), positions.numpy()[:, None], col_indices.numpy()[None])
    state = np.zeros((len(seeds), len(col_indices)), np.uint32)
    for block in blocks:
        key = _rotated(block.astype(np.uint32) * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
        state = _rotated(state ^ key, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    state ^= np.uint32(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        state = (state ^ (state >> np.uint32(shift))) * np.uint32(factor)
    return torch.from_numpy(state)


def _rotated(values: Any, bits: int) -> Any:
    return (values << np.uint32(bits)) | (values >> np.uint32(32 - bits))
