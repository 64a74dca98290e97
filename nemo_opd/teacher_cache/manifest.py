"""Format and origin of a cache: one small file for all of its shards."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from nemo_opd.errors import DataError
from nemo_opd.files import write_atomically

_VERSION = 1
"""Increased when the same manifest would describe other bytes."""
NAME = "cache.yaml"
_BUILD = "nemo-opd cache build"
_MAY_DIFFER = ("teacher", "positions")
"""Fields that do not affect the stored numbers."""
_FINGERPRINT = 64
"""Characters of a SHA-256 hash."""


@dataclass(frozen=True, slots=True)
class CacheManifest:
    """Format and origin of a cache: everything that its numbers depend on, except the texts."""

    form: Literal["top_k", "hidden_states"]
    teacher: str
    """Name of the model, for messages."""
    weights: str
    """Fingerprint of the teacher's weights and configuration."""
    tokenizer: str
    """Fingerprint of its tokens' bytes."""
    template: str
    """Fingerprint of its chat template and the template's arguments, which do not matter for plain texts."""
    vocab_size: int
    """W: number of ids that both tokenizer and model have."""
    dtype: str
    """Precision of the teacher's computation and of hidden states."""
    top_k: int = 0
    """form=top_k: tokens stored per position."""
    value_bytes: int = 0
    """form=top_k: bytes of a log-probability."""
    handoff: str = "hidden_states"
    """`handoff.type` of the teacher's answers. With `logits`, they were rounded to `dtype`."""
    hidden_size: int = 0
    """form=hidden_states: E."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    is_served: bool = False
    """Whether servers answered. If so, `weights` is a fingerprint of the model's name, and entropies are unknown."""
    positions: int | None = None
    """is_served: longest sequence that the servers accepted, if they reported one."""
    version: int = _VERSION

    @property
    def is_whole(self) -> bool:
        """Whether it holds full distributions."""
        return self.form == "hidden_states" or self.top_k >= self.vocab_size


def has_manifest(folder: Path) -> bool:
    """Return whether a folder is a cache, by its manifest."""
    return (folder / NAME).is_file()


def read_manifest(folder: str | Path) -> CacheManifest:
    """Read a cache's manifest. Raises DataError if it is missing, unreadable or of another version."""
    path = Path(folder) / NAME
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        manifest = CacheManifest(**content)
    except FileNotFoundError as error:
        raise DataError(f"{folder} is not a teacher cache: it has no {NAME}; build one with {_BUILD}") from error
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} cannot be read ({reason}); build the cache again with {_BUILD}") from error
    if manifest.version != _VERSION:
        raise DataError(
            f"{path} has version {manifest.version}, but this program reads version {_VERSION}; build the cache again"
        )
    return manifest


def write_manifest(folder: Path, manifest: CacheManifest) -> None:
    """Write the manifest of a new cache, or compare it with the existing one.

    Raises DataError with the differences if the existing cache is of another teacher or format, and StorageError.
    """
    if not has_manifest(folder):
        write_atomically(folder / NAME, yaml.safe_dump(asdict(manifest), sort_keys=False).encode())
    existing, new = asdict(read_manifest(folder)), asdict(manifest)
    differences = [
        f"{name} is {_abbreviated(existing[name])} there and {_abbreviated(new[name])} here"
        for name in new
        if name not in _MAY_DIFFER and existing[name] != new[name]
    ]
    if differences:
        raise DataError(
            f"{folder} is a cache of other answers: {'; '.join(differences)}; name another folder, since a cache "
            "cannot mix teachers or formats"
        )


def _abbreviated(value: object) -> str:
    """Return the value for a message; fingerprints are shortened."""
    text = str(value)
    return f"{text[:12]}…" if len(text) == _FINGERPRINT else text
