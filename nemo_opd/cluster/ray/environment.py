"""Environment variables of the driver that workers in a running cluster get; those of a local one inherit all."""

from collections.abc import Mapping

_PREFIXES = ("HF_", "HUGGING_FACE_", "TRANSFORMERS_", "NCCL_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_")
_SECRETS = {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}
"""Names of those that are read when a file is fetched, and not before."""


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return those for Ray's runtime environment, which everyone in the cluster can read: no secrets."""
    return {name: value for name, value in environ.items() if name.startswith(_PREFIXES) and name not in _SECRETS}


def forwarded_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return those for the arguments of actors."""
    return {name: environ[name] for name in _SECRETS & environ.keys()}
