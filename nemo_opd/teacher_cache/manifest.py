"""Form and origin of a cache: one small file, the same for all of its shards."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from nemo_opd.errors import DataError
from nemo_opd.files import write_atomically

_VERSION = 1
"""Raised when the same manifest would mean other bytes."""
NAME = "cache.yaml"
_BUILD = "nemo-opd cache build"
_MAY_DIFFER = ("teacher", "positions")
"""Fields on which no number depends."""
_FINGERPRINT = 64
"""Characters of a SHA-256."""


@dataclass(frozen=True, slots=True)
class CacheManifest:
    """Form and origin of a cache. Everything that its numbers depend on is in here, but for the texts."""

    form: Literal["top_k", "hidden_states"]
    teacher: str
    """Model as it was named; for messages."""
    weights: str
    """Fingerprint of the teacher's weights and configuration."""
    tokenizer: str
    """Fingerprint of its tokens' bytes."""
    template: str
    """Fingerprint of its chat template and the arguments of that; of texts none of it matters."""
    vocab_size: int
    """W: ids that both tokenizer and model have."""
    dtype: str
    """Precision in which the teacher computed, and of hidden states."""
    top_k: int = 0
    """form=top_k: tokens kept at a position."""
    value_bytes: int = 0
    """form=top_k: bytes of a log-probability."""
    handoff: str = "hidden_states"
    """`handoff.type` with which it was asked: logits were rounded to `dtype` on the way."""
    hidden_size: int = 0
    """form=hidden_states: E."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    is_served: bool = False
    """Whether servers have answered: `weights` is then of the model's name, and entropies are not known."""
    positions: int | None = None
    """is_served: longest sequence that the servers accepted, if they reported one."""
    version: int = _VERSION

    @property
    def is_whole(self) -> bool:
        """Whether it holds whole distributions."""
        return self.form == "hidden_states" or self.top_k >= self.vocab_size


def has_manifest(folder: Path) -> bool:
    """Return whether a folder is a cache."""
    return (folder / NAME).is_file()


def read_manifest(folder: str | Path) -> CacheManifest:
    """Read a cache's manifest. Raises DataError where there is none, or one of another version."""
    path = Path(folder) / NAME
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        manifest = CacheManifest(**content)
    except FileNotFoundError as error:
        raise DataError(f"{folder} is no teacher cache: it has no {NAME}; build one with {_BUILD}") from error
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} cannot be read ({reason}); build the cache again with {_BUILD}") from error
    if manifest.version != _VERSION:
        raise DataError(
            f"{path} is of version {manifest.version}, and this program reads version {_VERSION}; build the cache again"
        )
    return manifest


def write_manifest(folder: Path, manifest: CacheManifest) -> None:
    """Write the manifest of a new cache, or compare it with the one there.

    Raises DataError, naming what differs, for a cache of another teacher or form, and StorageError.
    """
    if not has_manifest(folder):
        write_atomically(folder / NAME, yaml.safe_dump(asdict(manifest), sort_keys=False).encode())
    there = read_manifest(folder)
    differing = [
        f"{each.name} is {_shown(getattr(there, each.name))} there and {_shown(getattr(manifest, each.name))} here"
        for each in fields(manifest)
        if each.name not in _MAY_DIFFER and getattr(there, each.name) != getattr(manifest, each.name)
    ]
    if differing:
        raise DataError(
            f"{folder} is a cache of other answers: {'; '.join(differing)}; name another folder, since answers of two "
            "teachers or forms are not mixed"
        )


def _shown(value: object) -> str:
    """Return the value for a message, of a fingerprint the beginning."""
    written = str(value)
    return f"{written[:12]}…" if len(written) == _FINGERPRINT else written
