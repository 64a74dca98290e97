"""What a model's folder says without its weights being read."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open

from nemo_opd.errors import RolloutError

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    path: Path
    shapes: dict[str, tuple[int, ...]]
    """Of its tensors, by their names."""
    head_size: int
    """Rows of the head; 0 where the configuration does not say."""
    max_positions: int | None
    """Tokens a sequence can have; None where the configuration does not say."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises RolloutError where the folder has no whole model in Hugging Face form."""
        try:
            config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
            shapes = {name: shape for file in weight_files(path) for name, shape in tensors_of(file)}
        except (OSError, ValueError, SafetensorError) as error:
            raise RolloutError(f"{path} has no whole model to sample with: {error}") from error
        if not shapes:
            raise RolloutError(f"{path} has no weights to sample with (*.safetensors)")
        text = config.get("text_config", config)
        return cls(path, shapes, int(text.get("vocab_size") or 0), text.get("max_position_embeddings"))

    def check_same_model(self, other: Self) -> None:
        """Raises RolloutError where tensors of the other have other shapes; what is tied may be named in one alone."""
        common = self.shapes.keys() & other.shapes.keys()
        wrong = sorted(name for name in common if self.shapes[name] != other.shapes[name])
        if wrong or not common:
            which = (
                f"{wrong[0]} is {other.shapes[wrong[0]]}, not {self.shapes[wrong[0]]}" if wrong else "no tensor fits"
            )
            raise RolloutError(f"{other.path} has another model than {self.path}: {which}")


def weight_files(path: Path) -> list[Path]:
    """Those of the index where there is one, so that a missing one is noticed."""
    if (path / INDEX).is_file():
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        return [path / name for name in sorted(set(index["weight_map"].values()))]
    return sorted(path.glob("*.safetensors"))


def tensors_of(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes. Raises SafetensorError for a file that is not whole."""
    with safe_open(file, framework="np") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - it has no __iter__
            yield name, tuple(tensors.get_slice(name).get_shape())
