"""Small valid settings, off-policy and on-policy, and the messages of invalid ones."""

import copy
from typing import Any

import pytest

from nemo_opd.config.run import from_dict
from nemo_opd.errors import ConfigError

CROSS = {"name": "cross", "type": "cross_tokenizer", "model": "/c"}
SAME = {"name": "same", "type": "same_tokenizer", "model": "/s"}
VALID: dict[str, Any] = {
    "train": {"max_steps": 3},
    "student": {"model": "/m"},
    "teachers": [CROSS, SAME],
    "loss": {"type": "p_kl"},
    "data": {"train": {"arrow_files": "/a.arrow"}},
}
HF = {"type": "hf", "n": 4, "max_new_tokens": 16}


def changed(key: str, value: Any) -> dict[str, Any]:
    """Return VALID with one key set as by an override."""
    data = copy.deepcopy(VALID)
    *path, last = key.split(".")
    node: Any = data
    for part in path:
        node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
    node[int(last) if isinstance(node, list) else last] = value
    return data


def on_policy(**sections: Any) -> dict[str, Any]:
    data = copy.deepcopy(VALID) | {"teachers": [SAME], "loss": {"type": "same_vocab"}, "rollout": HF}
    for name, section in sections.items():
        data[name] = data[name] | section if name in ("data", "train") else section
    return data


def message_of(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        from_dict(data)
    return str(caught.value)
