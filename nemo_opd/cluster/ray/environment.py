"""The driver's environment variables for workers in a running cluster; workers of a local one inherit all."""

import re
from collections.abc import Mapping

from nemo_opd.config import secrets

_PREFIXES = ("HF_", "HUGGING_FACE_", "TRANSFORMERS_", "NCCL_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_")
_SECRET = re.compile(secrets.NAME, re.IGNORECASE)
"""Names of secrets such as HF_TOKEN, which are first read when a file is fetched."""


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for Ray's runtime environment: no secrets, because everyone in the cluster can read it."""
    return {name: value for name, value in _with_prefix(environ).items() if not _SECRET.fullmatch(name)}


def forwarded_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets, which are passed as arguments of actors."""
    return {name: value for name, value in _with_prefix(environ).items() if _SECRET.fullmatch(name)}


def _with_prefix(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_PREFIXES)}
