"""A model's folder, without PyTorch: checks, its card, and its upload to the hub."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError, safe_open

from nemo_opd.demo import DEMO_PREFIX, is_demo, model_path
from nemo_opd.errors import ConfigError, HubError, ModelError
from nemo_opd.files import load_front_matter, read_file
from nemo_opd.teacher_cache import shard

_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_CARD = "README.md"
_ANSWER_S = 10.0
"""Longest wait for the hub."""
PLAIN = "plain"
"""Name of the template below in settings."""
_PLAIN_TEMPLATE = """{{- bos_token if bos_token else '' }}
{%- for message in messages %}
{{- message.role | capitalize + ':\\n' + message.content }}
{{- (eos_token if message.role == 'assistant' and eos_token else '') + '\\n\\n' }}
{%- endfor %}
{{- 'Assistant:\\n' if add_generation_prompt else '' }}"""
"""A template for base models: roles in words, and the end-of-sequence token after an answer."""
_WHOLE_FOLDER = (
    "name the folder of the model in Hugging Face form (config.json, model.safetensors, tokenizer.json) or its hub name"
)


def demo_folder(reference: str) -> str:
    """Return a folder or hub name unchanged, and for `demo:NAME` the folder in the package."""
    return str(model_path(reference.removeprefix(DEMO_PREFIX))) if is_demo(reference) else reference


def split_revision(reference: str) -> tuple[str, str | None]:
    """Return name and revision of NAME@REVISION on the hub; no revision for a folder or a name alone."""
    name, _, revision = reference.rpartition("@")
    return (name, revision) if name and not Path(reference).exists() else (reference, None)


def check_folder(reference: str, *, key: str) -> None:
    """Raise ModelError, naming `key`, for a path without a complete model or adapter.

    A hub name passes if the hub can be reached or has been read before, and so does a teacher cache, which has no
    weights.
    """
    try:
        folder = Path(demo_folder(reference))
    except ModelError as error:
        raise ModelError(f"{key}={error}") from error
    if folder.is_file():
        raise ModelError(f"{key}={reference}: it is {_kind_of_file(folder)}, and not a folder; {_WHOLE_FOLDER}")
    if not folder.is_dir():
        if folder.is_absolute() or reference.startswith("."):
            raise ModelError(f"{key}={reference}: there is no such folder; check the path")
        _require_reachable(reference, "config.json", key=key)
        return
    if is_adapter(folder):
        _check_adapter(folder, reference, key=key)
        return
    if not (folder / "config.json").is_file() and (gguf := next(folder.glob("*.gguf"), None)) is not None:
        raise ModelError(f"{key}={reference}: the folder has {gguf.name}, {_kind_of_file(gguf)}; {_WHOLE_FOLDER}")
    if not (folder / "config.json").is_file():
        names = [name for name in _TOKENIZER_FILES if (folder / name).is_file()]
        content = f"a tokenizer ({', '.join(names)}) without its model's config.json" if names else "no config.json"
        way_out = f"its model is {below}" if (below := model_below(folder)) else _WHOLE_FOLDER
        raise ModelError(f"{key}={reference}: the folder has {content}; {way_out}")
    if not any((folder / name).is_file() for name in (*_WEIGHT_FILES, shard.MANIFEST)):
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
        if (why := damage(file)) is not None:
            raise ModelError(f"{key}={reference}: {file.name} is missing or damaged ({why}); copy it there again")


def require_weights(reference: str, *, key: str) -> None:
    """Raise ModelError, naming `key`, for the folder of a teacher's cache, which passes `check_folder`."""
    if (Path(reference) / shard.MANIFEST).is_file():
        raise ModelError(
            f"{key}={reference}: the folder is a teacher's cache, without weights; name a model, or in a run write the "
            f"teacher as {{type: cached, cache: {reference}}}"
        )


def model_below(folder: Path) -> Path | None:
    """Return the folder with the model in a folder of a run, of its checkpoints or of one; None if there is none."""
    checkpoints = [*folder.glob("step_*/student"), *folder.glob("checkpoints/step_*/student")]
    newest_first = sorted(checkpoints, key=lambda path: (len(path.parent.name), path), reverse=True)
    return next(filter(Path.is_dir, (folder / "final", folder / "student", *newest_first)), None)


def _require_reachable(reference: str, file: str, *, key: str) -> None:
    """Raise ModelError, naming `key`, for a hub name if the hub does not answer and `file` of it is not cached.

    transformers asks for each file, and the hub's client tries each five times, before it says so.
    """
    from huggingface_hub import constants, get_session, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    name, revision = split_revision(reference)
    try:
        is_cached = isinstance(try_to_load_from_cache(name, file, revision=revision), str)
    except HFValidationError as error:
        raise ModelError(f"{key}={reference}: there is no such folder, and it is not a name of the hub") from error
    if constants.HF_HUB_OFFLINE or is_cached:
        return
    try:
        get_session().head(hf_hub_url(name, file, revision=revision), timeout=_ANSWER_S)
    except Exception as error:  # the errors of the client's HTTP library, which depends on its version
        raise ModelError(
            f"{key}={reference}: there is no such folder, and the hub {constants.ENDPOINT} does not answer "
            f"({reason(error)}); correct the path, or download the model where there is a network and name its folder"
        ) from error


def _kind_of_file(file: Path) -> str:
    return "a GGUF file, as llama.cpp reads" if file.suffix == ".gguf" else "a file"


def check_tokenizer(reference: str, *, key: str) -> None:
    """Raise ModelError, naming `key`, for a path without a tokenizer; a hub name passes as in `check_folder`."""
    folder = Path(demo_folder(reference))
    if folder.is_dir():
        if not has_tokenizer(folder):
            raise ModelError(
                f"{key}={reference}: the folder has no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); name one "
                f"that has, or leave out {key} to use the model's"
            )
    elif folder.is_absolute() or reference.startswith("."):
        raise ModelError(
            f"{key}={reference}: there is no such folder; correct the path, or leave out {key} to use the model's"
        )
    else:
        _require_reachable(reference, "tokenizer_config.json", key=key)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a tokenizer file."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def needs_sentencepiece(folder: Path) -> bool:
    """Return whether a folder's only tokenizer is a SentencePiece model, and the package for it is not installed."""
    if not (folder / "tokenizer.model").is_file() or (folder / "tokenizer.json").is_file():
        return False
    with (folder / "tokenizer.model").open("rb") as file:
        is_sentencepiece = file.read(1) == b"\n"  # the tag of its first field; a tiktoken file begins with letters
    return is_sentencepiece and find_spec("sentencepiece") is None


def read_template(path: str, *, key: str) -> str:
    """Read a chat template from a file or a model's folder; `plain` is the one below.

    Raises ModelError, naming `key`, for a file that cannot be read and for a folder without a template.
    """
    if path == PLAIN:
        return _PLAIN_TEMPLATE
    file = Path(demo_folder(path)).expanduser()
    try:
        template = _template_in(file) if file.is_dir() else file.read_text(encoding="utf-8")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{key}={path}: {error}; name a file with a Jinja chat template, a model's folder, or {PLAIN}"
        ) from error
    if template is None:
        raise ModelError(f"{key}={path}: the model in this folder has no chat template; name another, or {PLAIN}")
    return template


def template_setting(source: str) -> str:
    """Return a value of `chat_template`: the source if it has a template on this machine, otherwise `plain`."""
    try:
        read_template(source, key="chat_template")
    except ModelError:
        return PLAIN
    return source


def _template_in(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    template = settings.get("chat_template") if isinstance(settings, dict) else None
    if isinstance(template, list):  # named templates
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def is_adapter(folder: Path) -> bool:
    """Return whether a folder has an adapter (PEFT) and not the weights of a complete model."""
    return (folder / _ADAPTER_CONFIG).is_file() and not any((folder / name).is_file() for name in _WEIGHT_FILES)


def adapter_base(folder: Path, *, named: str) -> str:
    """Return the folder or hub name of the model that an adapter in `folder` was trained on.

    A relative path in the adapter's configuration is tried from the working directory, then from the adapter's folder.
    named: setting and value of the adapter, for messages. Raises ModelError if the base model's folder does not exist.
    """
    base = _named_base(folder, named)
    place, seen = Path(base), {folder.resolve()}
    while place.is_dir():
        if place.resolve() in seen:
            raise ModelError(
                f"{named}: the folder has an adapter whose {_ADAPTER_CONFIG} names this folder as its model, itself or "
                "by another adapter; write the folder or hub name of the model that it was trained on as "
                "base_model_name_or_path"
            )
        if not is_adapter(place):
            break
        seen.add(place.resolve())
        place = Path(_named_base(place, named))
    return base


def _named_base(folder: Path, named: str) -> str:
    """Return the folder or hub name in an adapter's configuration. Raises ModelError as `adapter_base` does."""
    try:
        config = json.loads((folder / _ADAPTER_CONFIG).read_text(encoding="utf-8"))
        base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{named}: its {_ADAPTER_CONFIG} is damaged ({reason(error)}); copy it there again") from error
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"{named}: the folder has an adapter, and its {_ADAPTER_CONFIG} does not say of which model; write the "
            "model's folder or hub name there as base_model_name_or_path"
        )
    if is_demo(base):
        return demo_folder(base)
    path = Path(base).expanduser()
    base_folder = next((candidate.absolute() for candidate in (path, folder / path) if candidate.is_dir()), None)
    if base_folder is None:
        if not path.is_absolute() and not base.startswith("."):
            return base  # a hub name
        raise ModelError(
            f"{named}: the folder has an adapter of the model {base}, and there is no such folder; copy the model "
            f"there, or correct base_model_name_or_path in the adapter's {_ADAPTER_CONFIG}"
        )
    return str(base_folder)


def _check_adapter(folder: Path, reference: str, *, key: str) -> None:
    """Raise ModelError, naming `key`, if an adapter or its base model cannot be read."""
    weights = next((folder / name for name in _ADAPTER_WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise ModelError(
            f"{key}={reference}: the folder has an adapter's {_ADAPTER_CONFIG} without its weights (none of "
            f"{', '.join(_ADAPTER_WEIGHTS)}); copy them there or name another folder"
        )
    if weights.suffix == ".safetensors" and (why := damage(weights)) is not None:
        raise ModelError(f"{key}={reference}: {weights.name} is damaged ({why}); copy it there again")
    base = adapter_base(folder, named=f"{key}={reference}")
    check_folder(base, key=f"{key}={reference}: base_model_name_or_path")


def damage(file: Path) -> str | None:
    """Return why a safetensors file cannot be read, judged by its header and length; None if it can be read."""
    if file.exists() and not file.is_file():
        return "it is not a file"
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
    """Return a folder's safetensors weight files; an empty list if the weights are in another format."""
    return files_in(folder, *_WEIGHT_FILES[:2])


def files_in(folder: Path, single: str, index: str) -> list[Path]:
    """Return the file `single`, or the files listed in `index`; an empty list if both are missing."""
    if (folder / single).is_file():
        return [folder / single]
    return shards_in(folder / index) if (folder / index).is_file() else []


def shards_in(index: Path) -> list[Path]:
    """Return the files that an index lists, all in its folder.

    Raises OSError, and ValueError or RecursionError for a file that is not an index or lists a file elsewhere.
    """
    content = json.loads(index.read_text(encoding="utf-8"))
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise ValueError("it has no weight_map")
    for name in names.values():
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(f"it names {name!r}, which is not a file of the model's folder")
    return [index.parent / name for name in sorted(set(names.values()))]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def reason(error: BaseException) -> str:
    """Return a one-line summary of a library's error."""
    if "trust_remote_code" in str(error):
        return "it needs Python code that comes with it, which is never run"
    lines = [line.strip() for line in str(error).strip().splitlines()]
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else first_line(error)
    is_bare = isinstance(error, KeyError | AttributeError | TypeError | IndexError | ZeroDivisionError)
    return f"{type(error).__name__}: {text}" if is_bare else text


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
        with suppress(ModelError):
            return read_own_card(adapter_base(folder, named=f"model={reference}"))
    return card


def _read_card(folder: Path, reference: str) -> OwnCard:
    # Imported here, since the import takes as long as all others of a command.
    from huggingface_hub import hf_hub_download

    name, revision = split_revision(reference)
    try:
        file = folder / _CARD
        if not folder.is_dir():
            file = Path(hf_hub_download(name, _CARD, revision=revision, etag_timeout=5))
        metadata = load_front_matter(read_file(file, follow_link=True).decode())
    except (OSError, ValueError, yaml.YAMLError):
        return OwnCard()
    if not isinstance(metadata, dict):
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


def require_hub(key: str) -> None:
    """Raise ConfigError, naming `key`, if nothing can be pushed: without a token, or offline."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"{key}: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so nothing is sent to the hub; unset it, or leave "
            "this out and push later with `nemo-opd checkpoint push`"
        )
    if get_token() is None:
        raise ConfigError(f"{key}: no token for the hub; set HF_TOKEN, or run `hf auth login`")


def push(folder: Path, repo: str, *, private: bool) -> str:
    """Upload a folder as one commit and return the repository's address. Creates the repository if it does not exist.

    private: whether a new repository is private. Raises HubError, with the command to push later, if the upload fails.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload of a model trained with nemo_opd")
    # The library raises many types: for the network, the hub, and rejected files.
    except Exception as error:
        command = [
            "nemo-opd",
            "checkpoint",
            "push",
            "--model",
            str(folder),
            "--repo",
            repo,
            *["--public"] * (not private),
        ]
        raise HubError(
            f"{folder} was not pushed to {repo} ({first_line(error)}); the folder is complete, so push it later with "
            f"`{shlex.join(command)}`"
        ) from error
    return str(url)
