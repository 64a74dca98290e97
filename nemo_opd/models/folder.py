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

INDICES = tuple(name for name in WEIGHT_FILES if name.endswith(".index.json"))


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
    for name in INDICES:
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
    with safe_open(file, framework="numpy") as tensors:
        return len(tensors.keys())


def safetensors_files(folder: Path) -> list[Path]:
    """The files that the weights are read from; none where they are in another format."""
    if (folder / WEIGHT_FILES[0]).is_file():
        return [folder / WEIGHT_FILES[0]]
    index = folder / WEIGHT_FILES[1]
    if not index.is_file():
        return []
    return shards_in(index)


def shards_in(index: Path) -> list[Path]:
    """The files that an index names, which are beside it.

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
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def reason(error: BaseException) -> str:
    """What of a library's error goes into one line of ours."""
    if "trust_remote_code" in str(error):
        return "it needs Python code that comes with it, which is never run"
    lines = [line.strip() for line in str(error).strip().splitlines()]
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else first_line(error)
    is_bare = isinstance(error, KeyError | AttributeError | TypeError | IndexError | ZeroDivisionError)
    return f"{type(error).__name__}: {text}" if is_bare else text
