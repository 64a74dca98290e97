"""Environment variables of the driver that workers in a running cluster get; those of a local one inherit all."""

import re
from collections.abc import Mapping

from nemo_opd.config import secrets

_PREFIXES = ("HF_", "HUGGING_FACE_", "TRANSFORMERS_", "NCCL_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_")
_SECRET = re.compile(secrets.NAME, re.IGNORECASE)
"""Names of those, such as HF_TOKEN, that are read when a file is fetched, and not before."""


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return those for Ray's runtime environment, which everyone in the cluster can read: no secrets."""
    return {name: value for name, value in _known(environ).items() if not _SECRET.fullmatch(name)}


def forwarded_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return those for the arguments of actors."""
    return {name: value for name, value in _known(environ).items() if _SECRET.fullmatch(name)}


def _known(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_PREFIXES)}
