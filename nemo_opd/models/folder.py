"""Checks of a model's folder that need no PyTorch."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from nemo_opd.demo import DEMO_PREFIX, is_demo, model_path
from nemo_opd.errors import ModelError
from nemo_opd.teacher_cache import manifest

_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def resolve(reference: str) -> str:
    """Return a folder or hub name as it is, and for `demo:NAME` the folder in the package."""
    return str(model_path(reference.removeprefix(DEMO_PREFIX))) if is_demo(reference) else reference


def read_template(path: str, *, key: str) -> str:
    """Read a chat template. Raises ModelError, naming `key`, for a file that cannot be read."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{key}={path}: {error}; name a file with a Jinja chat template") from error


def check_tokenizer(reference: str, *, key: str) -> None:
    """Raise ModelError, naming `key`, for a path without a tokenizer; a hub name passes."""
    folder = Path(resolve(reference))
    if folder.is_dir():
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise ModelError(
                f"{key}={reference}: the folder has no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); name one "
                f"that has, or leave out {key} to take the model's own"
            )
    elif folder.is_absolute() or reference.startswith("."):
        raise ModelError(
            f"{key}={reference}: there is no such folder; correct the path, or leave out {key} to take the model's own"
        )


def check_folder(reference: str, *, key: str) -> None:
    """Raise ModelError, naming `key`, for a path without a whole model; a hub name passes, and a teacher cache, which
    has all but the weights.
    """
    folder = Path(resolve(reference))
    if not folder.is_dir():
        if folder.is_absolute() or reference.startswith("."):
            raise ModelError(f"{key}={reference}: there is no such folder; check the path")
        return
    if not (folder / "config.json").is_file():
        raise ModelError(f"{key}={reference}: the folder has no config.json; give a folder in Hugging Face form")
    if not any((folder / name).is_file() for name in (*_WEIGHT_FILES, manifest.NAME)):
        raise ModelError(
            f"{key}={reference}: the folder has no weights (none of {', '.join(_WEIGHT_FILES)}); copy them there or "
            "name another folder"
        )
    for name in (name for name in _WEIGHT_FILES if name.endswith(".index.json")):
        try:
            if (folder / name).is_file():
                shards_in(folder / name)
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{key}={reference}: {name} is damaged ({reason(error)}); copy it there again") from error
    for file in safetensors_files(folder):
        if (found := damage(file)) is not None:
            raise ModelError(f"{key}={reference}: {file.name} is missing or damaged ({found}); copy it there again")


def damage(file: Path) -> str | None:
    """Return why a safetensors file cannot be read, by its header and length; None where it can."""
    try:
        with safe_open(file, framework="numpy"):  # reads the header, and compares the file's length with it
            return None
    except (OSError, SafetensorError) as error:
        return first_line(error)


def num_tensors(file: Path) -> int:
    """Return the number of tensors in a safetensors file."""
    with safe_open(file, framework="numpy") as tensors:
        return len(tensors.keys())


def safetensors_files(folder: Path) -> list[Path]:
    """Return the files that the weights are read from; none where they are in another format."""
    return files_in(folder, *_WEIGHT_FILES[:2])


def files_in(folder: Path, single: str, index: str) -> list[Path]:
    """Return a file of that name, or those that an index names; none without either."""
    if (folder / single).is_file():
        return [folder / single]
    return shards_in(folder / index) if (folder / index).is_file() else []


def shards_in(index: Path) -> list[Path]:
    """Return the files that an index names, which are in its folder.

    Raises OSError, and ValueError or RecursionError for what is no index, or names a file elsewhere.
    """
    content = json.loads(index.read_text(encoding="utf-8"))
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise ValueError("it has no weight_map")
    for name in names.values():
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(f"it names {name!r}, which is no file of the model's folder")
    return [index.parent / name for name in sorted(set(names.values()))]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def reason(error: BaseException) -> str:
    """Return the part of a library's error that fits into one line."""
    if "trust_remote_code" in str(error):
        return "it needs Python code that comes with it, which is never run"
    lines = [line.strip() for line in str(error).strip().splitlines()]
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else first_line(error)
    is_bare = isinstance(error, KeyError | AttributeError | TypeError | IndexError | ZeroDivisionError)
    return f"{type(error).__name__}: {text}" if is_bare else text
