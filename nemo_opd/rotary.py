"""Rotary embeddings with factors that depend on the longest text of a forward pass (methods.md §8.4)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RotaryLimit:
    """Longest text that a model reads with its original rotary factors."""

    length: int
    """Tokens."""
    grows: bool
    """Whether the factors of longer texts depend on their length (`dynamic`) or are the same for all of them
    (`longrope`).
    """

    def is_beyond(self, length: int) -> bool:
        return length > self.length

    def reads_alike(self, length: int, other_length: int) -> bool:
        """Return whether texts of both lengths are read with the same factors."""
        longer = self.is_beyond(length)
        return length == other_length or (longer == self.is_beyond(other_length) and not (longer and self.grows))


def rotary_limit(config: Mapping[str, Any]) -> RotaryLimit | None:
    """Return the limit of a model from its configuration as saved by transformers; None if all factors are fixed.

    For layers with different embeddings, the smallest limit.
    """
    rope = config.get("rope_parameters") or {}
    by_layer = [value for value in rope.values() if isinstance(value, Mapping)] or [rope]
    longest = config.get("max_position_embeddings") or 0
    limits = [
        RotaryLimit(int(parameters.get("original_max_position_embeddings") or longest), grows=False)
        if kind == "longrope"
        else RotaryLimit(int(longest), grows=True)
        for parameters in by_layer
        if (kind := parameters.get("rope_type")) in ("longrope", "dynamic")
    ]
    return min(limits, key=lambda limit: (not limit.grows, limit.length), default=None)
