"""Adapter folders (PEFT) as models: each is merged once into its base model, in the cache."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.utils import find_adapter_config_file

from nemo_opd.errors import ModelError
from nemo_opd.extras import require_library
from nemo_opd.files import open_unlinked, replacing, settle, storage_errors
from nemo_opd.models.folder import adapter_base, demo_folder, has_tokenizer, is_adapter, reason, split_revision
from nemo_opd.models.quantised import dequantised, quantisation
from nemo_opd.paths import cache_dir
from nemo_opd.progress import working

_VERSION = 1
"""Part of the cache key; increase it if merging the same adapter gives another result."""
_ADAPTER = ("adapter_*",)
_MODEL = ("config.json", "generation_config.json", "model*", "pytorch_model*")
_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)
_CARD = ("README.md",)

_log = logging.getLogger(__name__)


def resolve(reference: str, *, key: str = "model") -> str:
    """Return the folder or hub name of a complete model that transformers can load.

    A folder or hub name is returned unchanged, `demo:NAME` as its folder in the package, and `NAME@REVISION` as the
    folder that it is downloaded to. An adapter is merged into its base model at the first call, and the merged model's
    folder in the cache is returned. key: setting to name in messages. Raises ModelError if the adapter does not fit its
    base model, or one of them cannot be read.
    """
    source = _at_revision(demo_folder(reference), (*_ADAPTER, *_MODEL, *_TOKENIZER, *_CARD), f"{key}={reference}")
    adapter = _adapter_folder(source)
    return source if adapter is None else str(_merged(adapter, named=f"{key}={reference}"))


def resolve_tokenizer(reference: str, *, key: str) -> str:
    """Return the folder or hub name to load a model's tokenizer from, without merging an adapter.

    Raises ModelError as `adapter_base` does, and for a revision that cannot be read.
    """
    source = _at_revision(demo_folder(reference), (*_ADAPTER, "config.json", *_TOKENIZER), f"{key}={reference}")
    adapter = _adapter_folder(source)
    if adapter is None:
        return source
    if has_tokenizer(adapter):
        return str(adapter)
    return resolve_tokenizer(adapter_base(adapter, named=f"{key}={reference}"), key=key)


@lru_cache
def _at_revision(source: str, files: Sequence[str], named: str) -> str:
    """Return the folder with a hub repository's files at a revision if `source` is NAME@REVISION, else `source`."""
    name, revision = split_revision(source)
    if revision is None:
        return source
    try:
        return snapshot_download(name, revision=revision, allow_patterns=list(files))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{named}: {name} could not be read from the hub at the revision {revision} ({reason(error)}); give a "
            "branch, tag or commit of it, and check the network"
        ) from error


def hub_commit(reference: str) -> str | None:
    """Return the commit of a model that was read from the hub; None for a folder or an unreadable name."""
    name, revision = split_revision(reference)
    if Path(reference).exists():
        return None
    with suppress(HFValidationError):
        config = try_to_load_from_cache(name, "config.json", revision=revision)
        return Path(config).parent.name if isinstance(config, str) else None
    return None


def _adapter_folder(source: str) -> Path | None:
    """Return an adapter's folder, downloaded if `source` is a hub name, or None if it is a complete model."""
    if Path(source).exists():
        return Path(source) if is_adapter(Path(source)) else None
    return _downloaded_adapter(source)


@lru_cache
def _downloaded_adapter(name: str) -> Path | None:
    """Download an adapter. Returns None if the name is not an adapter's or cannot be read from the hub."""
    try:
        if find_adapter_config_file(name) is None:
            return None
        return Path(snapshot_download(name, allow_patterns=[*_ADAPTER, *_TOKENIZER, *_CARD]))
    except (OSError, ValueError):
        return None


def _merged(adapter: Path, *, named: str) -> Path:
    """Return the cache folder with an adapter merged into its base model; write it if it does not exist."""
    require_library("peft", named)
    base = adapter_base(adapter, named=named)
    source = resolve(base, key=f"{named}: base_model_name_or_path")
    try:
        base_folder = Path(source)
        if not base_folder.is_dir():
            base_folder = Path(snapshot_download(source, allow_patterns=["config.json", *_TOKENIZER]))
        merged = cache_dir("merged") / _identity(adapter, base_folder, is_local=Path(source).is_dir())
        with _locked(merged.with_suffix(".lock")):
            if not merged.is_dir():
                _log.info("merging the adapter %s into a copy of %s: %s", adapter, base, merged)
                with working(f"merging an adapter into {base}"), replacing(merged) as temporary:
                    _write_merged(adapter, base_folder, source, temporary)
    except ModelError:
        raise
    # peft, transformers, safetensors and the hub each raise their own errors.
    except Exception as error:
        raise ModelError(
            f"{named}: the folder has an adapter of the model {base}, and the two cannot be merged ({reason(error)}); "
            f"check that the adapter was trained on this model, and that both are complete"
        ) from error
    return merged


def _identity(adapter: Path, base: Path, *, is_local: bool) -> str:
    """Return a hash of an adapter's files and its base model; a local base model's files count by size and time.

    is_local: False for a download from the hub, which is identified by its folder, named after the revision.
    """
    digest = hashlib.sha256(repr((_VERSION, str(base))).encode())
    for path in _files(adapter, *_ADAPTER, *_TOKENIZER, *_CARD):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    for path in _files(base, *_MODEL, *_TOKENIZER) if is_local else ():
        status = path.stat()
        digest.update(repr((path.name, status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()[:32]


def _files(folder: Path, *patterns: str) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file. Has no effect on file systems without locks."""
    with open_unlinked(path, "a") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_merged(adapter: Path, base: Path, source: str, folder: Path) -> None:
    model = _load_merged(adapter, source)
    with storage_errors(folder):
        model.save_pretrained(folder)
        for path in _files(adapter if has_tokenizer(adapter) else base, *_TOKENIZER) + _files(adapter, *_CARD):
            shutil.copy(path, folder / path.name)
        settle(folder)


def _load_merged(adapter: Path, source: str) -> PreTrainedModel:
    """Load a model on the CPU, in the precision of its files, and merge an adapter into it.

    Raises ValueError if the adapter lacks weights or has weights that the model does not expect.
    """
    from peft import PeftConfig, PeftModel  # takes seconds

    config: Any = PeftConfig.from_pretrained(str(adapter))
    model: Any = _load_base(source)
    _resize(model, adapter)
    is_tied = _are_tied(model)
    if is_tied and not getattr(config, "ensure_weight_tying", False):
        # An adapter of the embeddings must not change the head, and vice versa.
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
    adapted = PeftModel(model, config)
    result = adapted.load_adapter(str(adapter), "default")
    # peft reports modules that are stored in full as unexpected, although it loads them.
    unexpected = [name for name in result.unexpected_keys if ".modules_to_save." not in name]
    if names := [*result.missing_keys, *unexpected]:
        raise ValueError(f"{len(names)} weights are in only one of them, such as {names[0]}")
    model = adapted.merge_and_unload()
    is_tied = is_tied and _are_tied(model)
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = is_tied
    model.tie_weights()
    return model


def _are_tied(model: PreTrainedModel) -> bool:
    """Return whether the head's weights equal the embeddings'."""
    embeddings: Any
    head: Any
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    return head is not None and torch.equal(embeddings.weight, head.weight)


def _load_base(source: str) -> PreTrainedModel:
    """Load a complete model, text-only or multimodal. Raises ValueError if weights are missing."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if quantisation(config) is not None:
        config = dequantised(config)
    loaded: Any = (AutoModelForCausalLM if is_causal else AutoModelForImageTextToText).from_pretrained(
        source,
        config=config,
        dtype="auto",
        attn_implementation="eager",  # the file may ask for code from the hub
        output_loading_info=True,
        trust_remote_code=False,
    )
    if missing := sorted(loaded[1]["missing_keys"]):
        raise ValueError(f"{len(missing)} weights of the model are missing, such as {missing[0]}")
    model: PreTrainedModel = loaded[0]
    return model


def _resize(model: PreTrainedModel, adapter: Path) -> None:
    """Resize a model's token embeddings to an adapter's, which may have been trained with added tokens."""
    from peft.utils import load_peft_weights

    embeddings: Any = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embeddings)
    stored = load_peft_weights(str(adapter), device="cpu")
    rows = next((len(weight) for key, weight in stored.items() if key.endswith(f"{name}.weight")), None)
    if rows is not None and rows != len(embeddings.weight):
        model.resize_token_embeddings(rows, mean_resizing=False)
