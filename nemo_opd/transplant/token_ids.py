"""Ids of special tokens in a model's configurations, for another tokenizer."""

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
_OF_OLD_TOKENS = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "force_words_ids",
    "forced_decoder_ids",
    "sequence_bias",
    "suppress_tokens",
)
"""Keys of generation configs that list tokens of the old vocabulary, and mean nothing in another."""


class NewIds:
    """Ids of the new tokenizer that take the places of old ones."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rows: RowMap) -> None:
        self._named = {role: getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
        self._of_old: dict[int, list[int]] = {}
        for new in np.flatnonzero(np.isin(rows.kinds, (EXACT, ROLE))).tolist():
            self._of_old.setdefault(int(rows.columns[rows.starts[new]]), []).append(new)

    def replaced(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return new values for all keys that name tokens.

        The tokenizer's own bos, eos and pad go first; eos are also all tokens with the role of an old eos. An id
        without a counterpart becomes None.
        """
        new = {key: self._counterparts(key, old) for key, old in values.items() if _IDS.search(key)}
        for role, own in self._named.items():
            key = f"{role}_token_id"
            others = new.get(key) or []
            ids = [] if own is None else [own]
            new[key] = list(dict.fromkeys([*ids, *others] if role == "eos" else ids or others))
        return {key: _as_before(ids, values.get(key)) for key, ids in new.items()}

    def _counterparts(self, key: str, old: object) -> list[int]:
        """Return the new ids of an old one or of a list; of the one end that a text has, all tokens of its role."""
        ids = old if isinstance(old, Iterable) else [old]
        found = [self._of_old.get(i, []) if isinstance(i, int) else [] for i in ids]
        return [new for each in found for new in (each if key == "eos_token_id" else each[:1])]


def _as_before(ids: list[int], before: object) -> int | list[int] | None:
    """Return ids as the key had them: one, or a list; several are a list in either case."""
    if isinstance(before, list):
        return ids or None
    return ids[0] if len(ids) == 1 else ids or None


def set_ids(config: PretrainedConfig, new: NewIds) -> None:
    """Write the new ids into a model's configuration."""
    for key, value in new.replaced(config.to_dict()).items():
        setattr(config, key, value)


def write_generation_config(reference: str, folder: Path, new: NewIds) -> list[str]:
    """Write the model's generation config with the new ids; return the keys left out, which list old tokens.

    It is as the model's file has it otherwise; a model without one gets one of ids alone.
    """
    file = cached_file(resolve(reference), GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False)
    values = {} if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
    left_out = [key for key in _OF_OLD_TOKENS if values.pop(key, None) is not None]
    values |= new.replaced(values)
    kept = {key: value for key, value in values.items() if value is not None}
    (folder / GENERATION_CONFIG_NAME).write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    return left_out
