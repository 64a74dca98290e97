"""Licence and languages from a model's card."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import hf_hub_download
from huggingface_hub.repocard import metadata_load

from nemo_opd.models.folder import adapter_base, demo_folder, is_adapter

_CARD = "README.md"


@dataclass(frozen=True, slots=True)
class OwnCard:
    """Fields of a model's card as on the hub; None or empty if the card does not state them."""

    license: str | None = None
    """Identifier such as apache-2.0; `other` for a licence that has only a `license_name`."""
    license_name: str | None = None
    license_link: str | None = None
    language: tuple[str, ...] = ()

    def fields(self) -> dict[str, Any]:
        """Return the stated fields, in the form of a card's metadata."""
        return {key: list(value) if key == "language" else value for key, value in asdict(self).items() if value}

    @property
    def terms(self) -> str | None:
        """Name of the licence, with its link if the card has one."""
        name = self.license_name or self.license
        return f"{name}, {self.license_link}" if name and self.license_link else name


def read_own_card(reference: str) -> OwnCard:
    """Read the card of a folder or hub name; empty if it does not exist or cannot be read.

    For an adapter without a licence, read its base model's card.
    """
    folder = Path(demo_folder(reference))
    card = _read_card(folder, reference)
    if card.terms is None and is_adapter(folder):
        return read_own_card(adapter_base(folder, named=f"model={reference}"))
    return card


def _read_card(folder: Path, reference: str) -> OwnCard:
    try:
        file = folder / _CARD if folder.is_dir() else Path(hf_hub_download(reference, _CARD, etag_timeout=5))
        metadata = metadata_load(file) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return OwnCard()
    return OwnCard(
        license=_text(metadata.get("license")),
        license_name=_text(metadata.get("license_name")),
        license_link=_text(metadata.get("license_link")),
        language=tuple(language for language in _as_list(metadata.get("language")) if isinstance(language, str)),
    )


def _text(value: Any) -> str | None:
    """Return a value as text; some cards have a list instead."""
    return ", ".join(str(item) for item in _as_list(value)) or None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
