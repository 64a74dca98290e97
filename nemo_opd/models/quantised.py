"""Quantised models: whether they are dequantised when loaded, stay quantised, or are rejected."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig

from nemo_opd.errors import ModelError

_UNDONE_IN_LOADING = ("fp8", "mxfp4", "compressed-tensors")
"""Quantisation methods that transformers can dequantise while loading."""
_NEVER_KEPT = "compressed-tensors"
"""Method that would be dequantised in the first forward pass."""


def quantisation(config: PretrainedConfig) -> str | None:
    """Return transformers' name of the quantisation method, or None if the weights are not quantised."""
    settings: Any = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    return str(getattr(method, "value", method))


def stays_quantised(config: PretrainedConfig) -> str | None:
    """Return the quantisation method if it cannot be dequantised while loading, else None."""
    method = quantisation(config)
    return None if method in _UNDONE_IN_LOADING else method


def is_kept(
    config: PretrainedConfig, mesh: DeviceMesh, device: str, *, key: str, reference: str, trainable: bool
) -> bool:
    """Return whether weights stay quantised: only if the model is on one rank and not trained.

    device: location of the weights. Raises ModelError, naming `key`, if they would have to be dequantised and cannot
    be, or would have to be moved.
    """
    if (method := quantisation(config)) is None:
        return False
    if mesh.size() == 1 and not trainable and method != _NEVER_KEPT:
        if device != mesh.device_type:
            raise ModelError(
                f"{key}={reference}: its weights are quantised ({method}), and such are not moved between devices; "
                f"write {key.removesuffix('.model')}.offload=false"
            )
        return True
    if stays_quantised(config) is not None:
        why = "a student's are trained" if trainable else f"they would have to be cut over {mesh.size()} ranks"
        way_out = (
            "" if trainable else ", or give it one rank, with cluster.placement=separate and cluster.teacher_ranks"
        )
        raise ModelError(
            f"{key}={reference}: its weights are quantised ({method}), and {why}; name the unquantised model{way_out}"
        )
    return False


def dequantised(config: PretrainedConfig) -> PretrainedConfig:
    """Change a configuration so that transformers loads plain weights, and return it."""
    settings: Any = config.quantization_config
    config.quantization_config = {
        **(settings if isinstance(settings, dict) else settings.to_dict()),
        "dequantize": True,
    }
    return config
