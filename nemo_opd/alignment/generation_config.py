"""Special ids that a model's generation config names."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_FILE_NAME = "generation_config.json"


@dataclass(frozen=True, slots=True)
class _GenerationIds:
    bos: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()
    """All ids that end a generation: often the ends of a turn, a message and a text."""
    pad: tuple[int, ...] = ()


def generation_ids(tokenizer: PreTrainedTokenizerBase) -> _GenerationIds:
    """Read ids from the file next to the tokenizer's, or in the local cache of a hub model; never from the network.

    Return no ids without such a file. A file that cannot be read is ignored, with a warning.
    """
    file = _file(str(getattr(tokenizer, "name_or_path", "") or ""))
    if file is None:
        return _GenerationIds()
    status = file.stat()
    return _read(file, status.st_mtime_ns, status.st_size)


def _file(name: str) -> Path | None:
    if not name:
        return None
    if Path(name).is_dir():
        file = Path(name) / _FILE_NAME
        return file if file.is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, _FILE_NAME)
    except HFValidationError:  # not a folder, and not a possible name on the hub
        return None
    return Path(cached) if isinstance(cached, str) else None


@lru_cache(maxsize=32)
def _read(file: Path, _mtime_ns: int, _size: int) -> _GenerationIds:
    """Read a file. Cached by the file's state, so that a broken one causes a single warning."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return _GenerationIds(**{role: _ids(data.get(f"{role}_token_id")) for role in ("bos", "eos", "pad")})
    except (OSError, ValueError, AttributeError, TypeError) as error:
        logger.warning("the special tokens that %s names are ignored, because it cannot be read: %s", file, error)
        return _GenerationIds()


def _ids(value: object) -> tuple[int, ...]:
    """Parse an id, a list of ids or None. Raises TypeError for anything else."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in ids):
        raise TypeError(f"a token id is an integer, not {value!r}")
    return tuple(ids)
