"""How rows, positions and columns are cut among ranks: pure arithmetic, as half-open ranges."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from nemo_opd.errors import ConfigError

Ranges = tuple[range, ...]
"""Consecutive ranges that lie one after another in a buffer."""


def equal_parts(num_rows: int, dp: int) -> Ranges:
    """The padded global batch by data-parallel rank. Raises ConfigError where parts would differ in size."""
    if num_rows % dp:
        raise ConfigError(
            f"a global batch of {num_rows} rows cannot be cut into dp={dp} equal parts; pad it to a multiple of the dp "
            "of the student and of every teacher"
        )
    size = num_rows // dp
    return tuple(range(d * size, (d + 1) * size) for d in range(dp))


def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """As DTensor's Shard cuts a dimension: chunks of ⌈size / parts⌉, the last ones smaller or empty."""
    chunk = -(-size // parts)
    return tuple(max(0, min(chunk, size - i * chunk)) for i in range(parts))


def vocabulary_columns(sizes: Sequence[int], vocab_size: int) -> Ranges:
    """Columns by tensor-parallel rank, from the rows of each one's shard of the head.

    Cut at the tokenizer's vocabulary, beyond which a padded head has columns that are never handed over; a shard that
    lies beyond it is empty.
    """
    bounds = (min(bound, vocab_size) for bound in accumulate(sizes, initial=0))
    return tuple(range(begin, end) for begin, end in pairwise(bounds))


def contiguous(length: int, cp: int) -> tuple[Ranges, ...]:
    """Positions by context-parallel rank: one range each, as long as `chunk_sizes` says."""
    bounds = accumulate(chunk_sizes(length, cp), initial=0)
    return tuple((range(begin, end),) for begin, end in pairwise(bounds))


def head_tail(length: int, cp: int) -> tuple[Ranges, ...]:
    """Positions by context-parallel rank in torch's load-balanced order: rank c has pieces c and 2·cp − 1 − c of 2·cp.

    Under a causal mask every rank then attends to equally much. Raises ConfigError where pieces would differ in size.
    """
    if length % (2 * cp):
        raise ConfigError(f"{length} positions cannot be cut into 2·cp = {2 * cp} equal pieces; pad them to a multiple")
    size = length // (2 * cp)
    piece = [range(i * size, (i + 1) * size) for i in range(2 * cp)]
    return tuple(joined((piece[c], piece[2 * cp - 1 - c])) for c in range(cp))


def joined(ranges: Sequence[range]) -> Ranges:
    """The same numbers in the same order, in as few ranges as they fit; empty ones are left out."""
    result: list[range] = []
    for each in ranges:
        if not each:
            continue
        if result and result[-1].stop == each.start:
            result[-1] = range(result[-1].start, each.stop)
        else:
            result.append(each)
    return tuple(result)


def within_vocabulary(columns: range | None, vocab_size: int) -> range:
    """Columns of a head, None for all, without those that it has beyond the tokenizer's vocabulary."""
    return range(vocab_size) if columns is None else range(vocab_size)[columns.start : columns.stop]
