"""Replacement of token ids in a model's configuration files for another tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from nemo_opd.models.adapter_folder import resolve
from nemo_opd.transplant.row_map import EXACT, ROLE, RowMap

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_IDS = re.compile(r"(?:^|_)token_ids?$")
_OLD_TOKEN_KEYS = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "force_words_ids",
    "forced_decoder_ids",
    "sequence_bias",
    "suppress_tokens",
)
"""Generation config keys that list old tokens, and mean nothing in another vocabulary."""


class NewIds:
    """New token ids that replace old ones."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rows: RowMap) -> None:
        self._tokenizer_ids = {role: getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
        self._by_old_id: dict[int, list[int]] = {}
        for new in np.flatnonzero(np.isin(rows.kinds, (EXACT, ROLE))).tolist():
            self._by_old_id.setdefault(int(rows.columns[rows.starts[new]]), []).append(new)

    def replaced(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return new values for all keys that name tokens.

        The new tokenizer's bos, eos and pad take precedence; eos also includes all tokens with the role of an old eos.
        An id without a counterpart becomes None.
        """
        new = {key: self._counterparts(key, old) for key, old in values.items() if _IDS.search(key)}
        for role, tokenizer_id in self._tokenizer_ids.items():
            key = f"{role}_token_id"
            counterparts = new.get(key) or []
            ids = [] if tokenizer_id is None else [tokenizer_id]
            new[key] = list(dict.fromkeys([*ids, *counterparts] if role == "eos" else ids or counterparts))
        return {key: _in_form_of(ids, values.get(key)) for key, ids in new.items()}

    def _counterparts(self, key: str, old: object) -> list[int]:
        """Return the new ids of an old id or a list of them: for eos all counterparts, otherwise the first of each."""
        old_ids = old if isinstance(old, Iterable) else [old]
        new_ids = [self._by_old_id.get(i, []) if isinstance(i, int) else [] for i in old_ids]
        return [new for ids in new_ids for new in (ids if key == "eos_token_id" else ids[:1])]


def _in_form_of(ids: list[int], old: object) -> int | list[int] | None:
    """Return ids in the form of the old value, one id or a list; several ids are always a list."""
    if isinstance(old, list):
        return ids or None
    return ids[0] if len(ids) == 1 else ids or None


def set_ids(config: PretrainedConfig, new: NewIds) -> None:
    """Write the new ids into a model's configuration."""
    for key, value in new.replaced(config.to_dict()).items():
        setattr(config, key, value)


def write_generation_config(reference: str, folder: Path, new: NewIds) -> list[str]:
    """Write the model's generation config with the new ids; return the omitted keys, which list old tokens.

    All other values are copied. A model without a generation config gets one with ids only.
    """
    file = cached_file(resolve(reference), GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False)
    values = {} if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
    left_out = [key for key in _OLD_TOKEN_KEYS if values.pop(key, None) is not None]
    values |= new.replaced(values)
    values = {key: value for key, value in values.items() if value is not None}
    (folder / GENERATION_CONFIG_NAME).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return left_out
