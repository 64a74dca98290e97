"""Properties of a model folder that can be read without loading its weights."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open

from nemo_opd.errors import RolloutError

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor shapes by name."""
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A complete model in Hugging Face format."""

    path: Path
    shapes: Shapes
    head_size: int
    """Head rows; 0 if the configuration does not say."""
    max_positions: int | None
    """Longest sequence in tokens; None if the configuration does not say."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a folder. Raises RolloutError unless it holds a complete model in Hugging Face format."""
        try:
            config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
            shapes = shapes_in(weight_files(path))
        except (OSError, ValueError, SafetensorError) as error:
            raise RolloutError(f"{path} does not hold a complete model to sample with: {error}") from error
        if not shapes:
            raise RolloutError(f"{path} has no weights to sample with (*.safetensors)")
        text = config.get("text_config", config)
        return cls(path, shapes, int(text.get("vocab_size") or 0), text.get("max_position_embeddings"))

    def check_same_model(self, shapes: Shapes, where: object) -> None:
        """Raise RolloutError if a tensor is missing or has another shape."""
        for name, shape in self.shapes.items():
            if shapes.get(name) != shape:
                difference = f"{name} is {shapes[name]}, not {shape}" if name in shapes else f"it has no {name}"
                raise RolloutError(f"{where} has another model than {self.path}: {difference}")


def weight_files(path: Path) -> list[Path]:
    """Return the folder's weight files, from the index if there is one, so that a missing file is noticed."""
    if (path / _INDEX).is_file():
        index = json.loads((path / _INDEX).read_text(encoding="utf-8"))
        return [path / name for name in sorted(set(index["weight_map"].values()))]
    return sorted(path.glob("*.safetensors"))


def shapes_in(files: Iterable[Path]) -> Shapes:
    """Read the shapes of all tensors. Raises OSError, and SafetensorError for an incomplete file."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="np") as tensors:
            # It has no __iter__.
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes
