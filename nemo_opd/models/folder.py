"""A model's folder, as far as it can be checked without PyTorch."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from nemo_opd.demo import DEMO_PREFIX, is_demo, model_path
from nemo_opd.errors import ModelError

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def resolve(reference: str) -> str:
    """A folder or hub name; `demo:NAME` becomes the folder that comes with the package."""
    return str(model_path(reference.removeprefix(DEMO_PREFIX))) if is_demo(reference) else reference


def read_template(path: str, *, key: str) -> str:
    """Raises ModelError, naming `key`, for a file that cannot be read."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{key}={path}: {error}; name a file with a Jinja chat template") from error


def check_tokenizer(reference: str, *, key: str) -> None:
    """Raises ModelError, naming `key`, for a path without a tokenizer; a hub name passes."""
    folder = Path(resolve(reference))
    if folder.is_dir():
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise ModelError(
                f"{key}={reference}: the folder has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); name one that "
                f"has, or leave out {key} to take the model's own"
            )
    elif folder.is_absolute() or reference.startswith("."):
        raise ModelError(
            f"{key}={reference}: there is no such folder; correct the path, or leave out {key} to take the model's own"
        )


def check_folder(reference: str, *, key: str) -> None:
    folder = Path(resolve(reference))
    if not folder.is_dir():
        if folder.is_absolute() or reference.startswith("."):
            raise ModelError(f"{key}={reference}: there is no such folder; check the path")
        return
    if not (folder / "config.json").is_file():
        raise ModelError(f"{key}={reference}: the folder has no config.json; give a folder in Hugging Face form")
    if not any((folder / name).is_file() for name in WEIGHT_FILES):
        raise ModelError(
            f"{key}={reference}: the folder has no weights (none of {', '.join(WEIGHT_FILES)}); copy them there or "
            "name another folder"
        )
    try:
        files = safetensors_files(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{key}={reference}: {WEIGHT_FILES[1]} is damaged ({first_line(error)}); copy it there again"
        ) from error
    for file in files:
        if (reason := damage(file)) is not None:
            raise ModelError(f"{key}={reference}: {file.name} is missing or damaged ({reason}); copy it there again")


def damage(file: Path) -> str | None:
    """Return why a safetensors file cannot be read, by its header and length; None where it can."""
    try:
        with safe_open(file, framework="numpy"):  # reads the header, and compares the file's length with it
            return None
    except (OSError, SafetensorError) as error:
        return first_line(error)


def safetensors_files(folder: Path) -> list[Path]:
    """The files that the weights are read from; none where they are in another format."""
    if (folder / WEIGHT_FILES[0]).is_file():
        return [folder / WEIGHT_FILES[0]]
    index = folder / WEIGHT_FILES[1]
    if not index.is_file():
        return []
    shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [folder / shard for shard in sorted(set(shards))]


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
