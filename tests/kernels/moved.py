"""Bytes that kernels read and write in Triton's interpreter."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from triton.runtime import interpreter


@contextmanager
def moved_bytes(maps: Sequence[tuple[int, int]] = ()) -> Iterator[list[int]]:
    """Yield a list of one number: bytes of vectors read or written inside, without addresses in `maps`."""
    moved = [0]
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def note(pointers: Any, mask: Any) -> None:
        places = pointers.data[mask.data.astype(bool)] if pointers.data.size > 1 else pointers.data[:0]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        is_map = sum(((places >= first) & (places < last)).sum() for first, last in maps)
        moved[0] += int(len(places) - is_map) * size

    def loaded(self: Any, pointers: Any, mask: Any, *options: Any) -> Any:
        note(pointers, mask)
        return load(self, pointers, mask, *options)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
        note(pointers, mask)
        return store(self, pointers, value, mask, *options)

    with (
        patch.object(builder, "create_masked_load", loaded),
        patch.object(builder, "create_masked_store", stored),
    ):
        yield moved
