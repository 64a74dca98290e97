"""The licence and the languages that a model's own card names."""

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
    """Fields of a model's card as the hub has them; None where the card does not say."""

    license: str | None = None
    """Identifier such as apache-2.0; `other` where the licence has another name."""
    license_name: str | None = None
    license_link: str | None = None
    language: tuple[str, ...] = ()

    def fields(self) -> dict[str, Any]:
        """Return what the card says, as the card of a model made of this one says it."""
        return {key: list(value) if key == "language" else value for key, value in asdict(self).items() if value}

    @property
    def terms(self) -> str | None:
        """Name of the licence, with its address where the card has one."""
        name = self.license_name or self.license
        return f"{name}, {self.license_link}" if name and self.license_link else name


def read_own_card(reference: str) -> OwnCard:
    """Return the fields of the card of a folder or hub name; none where there is no card, or no way to read it.

    An adapter without a licence has the card of its base model.
    """
    folder = Path(demo_folder(reference))
    card = _read_card(folder, reference)
    if card.terms is None and is_adapter(folder):
        return read_own_card(adapter_base(folder, named=f"model={reference}"))
    return card


def _read_card(folder: Path, reference: str) -> OwnCard:
    try:
        file = folder / _CARD if folder.is_dir() else Path(hf_hub_download(reference, _CARD, etag_timeout=5))
        found = metadata_load(file) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return OwnCard()
    return OwnCard(
        license=_text(found.get("license")),
        license_name=_text(found.get("license_name")),
        license_link=_text(found.get("license_link")),
        language=tuple(each for each in _listed(found.get("language")) if isinstance(each, str)),
    )


def _text(value: Any) -> str | None:
    """Return a value of a card, of which some have a list where one text is meant."""
    listed = [str(each) for each in _listed(value)]
    return ", ".join(listed) or None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
