"""Equal runs of two byte streams that differ in places (methods.md §1.3).

The equal prefix comes first; then anchors, 16-byte windows that occur once in either stream; between them, a dynamic
program over UTF-8 characters in blocks of fixed size. Time is linear in the lengths for any bytes: windows are matched
in a table without probing, and a block always commits most of one of its sides.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment.merge import jit

ANCHOR = 16
"""Bytes of a window. An equal run this long is not a coincidence if it occurs once in either stream."""
BLOCK = 512
"""Characters of either stream in one dynamic program; its back pointers, 256 KiB, stay in the cache."""
_COMMITTED = BLOCK * 3 // 4
"""Characters of a block that are committed. Later ones have seen too little of the following text."""

MATCH, START, SHIFT = 8, 12, 1
"""Gain per equal byte, cost per run, and cost per character that one stream runs ahead of the other.

A run of one byte does not pay. A run of two does, unless it lies more than a few characters off the diagonal. Marks are
free: decomposed text runs ahead of composed text by its marks, Hangul by two characters in three.
"""
_NEVER = -(1 << 30)
_RUN_FOLLOWS_GAP = 1
_ENDS_RUN, _BOTH, _LEFT, _RIGHT = 0, 2, 4, 6
"""Last steps of a differing region, by the characters they consume. `_ENDS_RUN` consumes none: the region opens here.
"""

_Bytes = NDArray[np.uint8]
_Places = NDArray[np.int32]
_Runs = list[tuple[int, int, int]]
"""(start in a, start in b, length)"""


class _Characters(NamedTuple):
    codes: NDArray[np.uint32]
    """[n]: each character's bytes as one number. A byte that is not UTF-8 counts as a character."""
    shifts: NDArray[np.int32]
    """[n]: cost of having no counterpart."""
    edges: NDArray[np.int64]
    """[n + 1]: starts of the characters in the stream, and the end of the last."""


class _Block(NamedTuple):
    moves: NDArray[np.int8]
    """[characters of a + 1, of b + 1]: last step of the best path to a cell that ends in a run | in a differing region.
    """
    end: tuple[int, int, bool]
    """Last cell of the best path, and whether the path ends in a run."""


@jit
def equal_runs(a: _Bytes, b: _Bytes) -> NDArray[np.int64]:
    """Find runs [R, 3] of equal bytes: start in a, start in b, length; increasing and disjoint in both streams.

    The first run is the equal prefix, possibly empty, up to the first differing byte. Later runs hold complete UTF-8
    characters. The last run reaches the end of at least one stream; if the other goes on, the first was cut. If both
    end differently, an empty run at both ends comes last. O(n + m) time and memory on any bytes.
    """
    runs = [(0, 0, _equal_ahead(a, 0, b, 0))]
    if runs[0][2] < min(len(a), len(b)):
        for anchor in _anchors(a, b, runs[0][2]):
            i, j, length = _extend(a, anchor[0], b, anchor[1], runs[-1])
            if length:
                _fill(a, i, b, j, runs, True)
                _append(runs, i, j, length)
        _fill(a, len(a), b, len(b), runs, False)
        _close(a, b, runs)
    return np.array(runs, np.int64)


@jit
def _equal_ahead(a: _Bytes, i: int, b: _Bytes, j: int) -> int:
    """Count the equal bytes from i, j on."""
    limit = min(len(a) - i, len(b) - j)
    n = 0
    while n < limit and a[i + n] == b[j + n]:
        n += 1
    return n


@jit
def _append(runs: _Runs, i: int, j: int, length: int) -> None:
    a_start, b_start, num_equal = runs[-1]
    if a_start + num_equal == i and b_start + num_equal == j:
        runs[-1] = (a_start, b_start, num_equal + length)
    else:
        runs.append((i, j, length))


@jit
def _close(a: _Bytes, b: _Bytes, runs: _Runs) -> None:
    """Close the last region: one stream ends inside a character of the other and was cut, or both end differently."""
    i, j, length = runs[-1]
    ahead = _equal_ahead(a, i + length, b, j + length)
    if len(a) - i - length == ahead or len(b) - j - length == ahead:
        runs[-1] = (i, j, length + ahead)
    else:
        runs.append((len(a), len(b), 0))


@jit
def _continues(data: _Bytes, at: int) -> bool:
    """Return whether the byte at `at` continues a UTF-8 character."""
    return at < len(data) and data[at] & 0xC0 == 0x80


@jit
def _equal_characters(a: _Bytes, i: int, b: _Bytes, j: int) -> int:
    """Count the equal bytes from i, j on, excluding a last character that continues differently."""
    n = _equal_ahead(a, i, b, j)
    if i + n == len(a) or j + n == len(b) or not (_continues(a, i + n) or _continues(b, j + n)):
        return n
    length = n
    while length > 0 and n - length < 3 and _continues(a, i + length - 1):
        length -= 1
    return max(length - 1, 0)


@jit
def _rest_of_character(data: _Bytes, at: int) -> int:
    """Count the bytes from `at` to the next character."""
    n = 0
    while n < 3 and _continues(data, at + n):
        n += 1
    return n


@jit
def _extend(a: _Bytes, i: int, b: _Bytes, j: int, last: tuple[int, int, int]) -> tuple[int, int, int]:
    """Extend an equal window at i, j to the longest run of complete characters after the run `last`, or to none."""
    a_floor, b_floor = last[0] + last[2], last[1] + last[2]
    if i < a_floor or j < b_floor:
        return i, j, 0
    while i > a_floor and j > b_floor and a[i - 1] == b[j - 1]:
        i, j = i - 1, j - 1
    skipped = _rest_of_character(a, i)
    return i + skipped, j + skipped, _equal_characters(a, i + skipped, b, j + skipped)


@jit
def _anchors(a: _Bytes, b: _Bytes, start: int) -> NDArray[np.int64]:
    """Find anchors [N, 2]: starts of windows from `start` on, occurring once in either stream, increasing in both."""
    size = 1
    while size < max(len(a), len(b)) - start:
        size *= 2
    a_starts, a_slots = _windows(a, start, size)
    b_starts, b_slots = _windows(b, start, size)
    a_owner, b_owner = _owners(a_starts, a_slots, size), _owners(b_starts, b_slots, size)
    pairs = np.empty((len(a_starts), 2), np.int64)
    count = 0
    for slot in a_slots:
        i, j = a_owner[slot], b_owner[slot]
        if i >= 0 and j >= 0 and np.array_equal(a[i : i + ANCHOR], b[j : j + ANCHOR]):
            pairs[count, 0], pairs[count, 1] = i, j
            count += 1
    return _longest_increasing(pairs[:count])


@jit
def _windows(data: _Bytes, start: int, size: int) -> tuple[_Places, _Places]:
    """Return the starts of windows, sampled by hash (one in four), and their slots in a table of `size`."""
    starts = np.empty(max(len(data) - start, 0), np.int32)
    slots = np.empty(len(starts), np.int32)
    base, oldest, value, count = 1_099_511_628_211, 1, 0, 0
    for _ in range(ANCHOR):
        oldest *= base
    for at in range(start, len(data)):
        value = value * base + data[at] + 1
        begin = at + 1 - ANCHOR
        if begin > start:
            value -= oldest * (data[begin - 1] + 1)
        mixed = value * -7_046_029_254_386_353_131
        if begin >= start and (mixed >> 61) & 3 == 0:
            starts[count], slots[count] = begin, (mixed >> 20) & (size - 1)
            count += 1
    return starts[:count], slots[:count]


@jit
def _owners(starts: _Places, slots: _Places, size: int) -> _Places:
    """Return the start of the only window in each slot, [size]; −1: no window, −2: several."""
    owners = np.full(size, -1, np.int32)
    for k in range(len(starts)):
        owners[slots[k]] = starts[k] if owners[slots[k]] == -1 else -2
    return owners


@jit
def _longest_increasing(pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Select the most pairs that increase in both numbers; they are sorted by the first (patience sorting)."""
    ends = np.empty(len(pairs), np.int64)
    previous = np.empty(len(pairs), np.int64)
    length = 0
    for k in range(len(pairs)):
        low, high = 0, length
        while low < high:
            middle = (low + high) // 2
            if pairs[ends[middle], 1] < pairs[k, 1]:
                low = middle + 1
            else:
                high = middle
        previous[k] = ends[low - 1] if low else -1
        ends[low] = k
        length = max(length, low + 1)
    selected = np.empty((length, 2), np.int64)
    k = ends[length - 1] if length else -1
    for place in range(length - 1, -1, -1):
        selected[place] = pairs[k]
        k = previous[k]
    return selected


@jit
def _fill(a: _Bytes, a_stop: int, b: _Bytes, b_stop: int, runs: _Runs, joined: bool) -> None:
    """Append the runs between the last one and a_stop, b_stop. joined: whether these two places correspond."""
    i, j = runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]
    skipped = _rest_of_character(a, i), _rest_of_character(b, j)
    i, j, in_run = i + skipped[0], j + skipped[1], skipped == (0, 0)
    while i < a_stop and j < b_stop:
        ahead = _equal_characters(a[:a_stop], i, b[:b_stop], j) if in_run else 0
        if ahead:
            _append(runs, i, j, ahead)
            i, j = i + ahead, j + ahead
        a_chars, b_chars = _characters(a, i, a_stop), _characters(b, j, b_stop)
        a_ends, b_ends = a_chars.edges[-1] == a_stop, b_chars.edges[-1] == b_stop
        block = _best_paths(a_chars, b_chars, in_run, joined and a_ends and b_ends)
        limits = len(a_chars.codes) if a_ends else _COMMITTED, len(b_chars.codes) if b_ends else _COMMITTED
        x, y, in_run = _commit(a_chars, b_chars, block, limits, runs)
        i, j = a_chars.edges[x], b_chars.edges[y]


@jit
def _characters(data: _Bytes, start: int, stop: int) -> _Characters:
    """Return the first characters of data[start:stop], at most a block."""
    codes = np.empty(min(stop - start, BLOCK), np.uint32)
    shifts = np.empty(len(codes), np.int32)
    edges = np.empty(len(codes) + 1, np.int64)
    edges[0] = start
    count = 0
    while count < len(codes) and edges[count] < stop:
        at = edges[count]
        width = _width(data, at, stop)
        code = 0
        for k in range(width):
            code = code << 8 | data[at + k]
        codes[count], shifts[count] = code, 0 if _is_mark(code) else SHIFT
        count += 1
        edges[count] = at + width
    return _Characters(codes[:count], shifts[:count], edges[: count + 1])


@jit
def _is_mark(code: int) -> bool:
    """Return whether a character composes with the one before it: U+0300-036F, U+1160-11FF, U+3099-309A."""
    return 0xCC80 <= code <= 0xCDAF or 0xE185A0 <= code <= 0xE187BF or 0xE38299 <= code <= 0xE3829A


@jit
def _width(data: _Bytes, at: int, stop: int) -> int:
    """Count the bytes of the UTF-8 character at `at`; 1 if the bytes are not UTF-8."""
    lead = data[at]
    if lead < 0xC2 or lead > 0xF4:
        return 1
    width = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
    for k in range(at + 1, at + width):
        if k >= stop or not _continues(data, k):
            return 1
    return width


@jit
def _best_paths(a_chars: _Characters, b_chars: _Characters, in_run: bool, joined: bool) -> _Block:
    """Run the dynamic program. `run` is the best score of a path to a cell with matching characters, `gap` of any path.

    The path starts inside a run or a differing region. It ends in the last cell if `joined`, otherwise anywhere on the
    far edges, free of charge.
    """
    n, m = len(a_chars.codes), len(b_chars.codes)
    moves = np.empty((n + 1, m + 1), np.int8)
    run = np.full(m + 1, _NEVER, np.int32)
    gap = np.zeros(m + 1, np.int32)
    gap[1:] = -np.cumsum(b_chars.shifts)
    run[0] = 0 if in_run else _NEVER
    moves[0, :], moves[0, 0] = _RIGHT, _ENDS_RUN
    best, end = _NEVER, (n, m, False)
    for x in range(1, n + 1):
        run_before, gap_before = run[0], gap[0]
        code, shift, gain = (
            a_chars.codes[x - 1],
            a_chars.shifts[x - 1],
            MATCH * (a_chars.edges[x] - a_chars.edges[x - 1]),
        )
        run[0], gap[0], moves[x, 0] = _NEVER, gap[0] - shift, _LEFT
        for y in range(1, m + 1):
            matched, from_gap = _NEVER, 0
            if code == b_chars.codes[y - 1]:
                from_gap = _RUN_FOLLOWS_GAP if gap_before - START > run_before else 0
                matched = max(run_before, gap_before - START) + gain
            score, move = gap_before, _BOTH
            if gap[y] - shift > score:
                score, move = gap[y] - shift, _LEFT
            if gap[y - 1] - b_chars.shifts[y - 1] > score:
                score, move = gap[y - 1] - b_chars.shifts[y - 1], _RIGHT
            if matched >= score:
                score, move = matched, _ENDS_RUN
            run_before, gap_before = run[y], gap[y]
            run[y], gap[y], moves[x, y] = matched, score, move | from_gap
        if gap[m] >= best:
            best, end = gap[m], (x, m, run[m] == gap[m])
    if joined:
        return _Block(moves, (n, m, run[m] == gap[m]))
    for y in range(m + 1):
        if gap[y] > best:
            best, end = gap[y], (n, y, run[y] == gap[y])
    return _Block(moves, end)


@jit
def _commit(
    a_chars: _Characters, b_chars: _Characters, block: _Block, limits: tuple[int, int], runs: _Runs
) -> tuple[int, int, bool]:
    """Append the best path's runs within `limits` characters of either side; return the cell it has reached."""
    x, y, in_run = block.end
    while x > limits[0] or y > limits[1]:
        x, y, in_run, _ = _step_back(block.moves, x, y, in_run)
    reached = x, y, in_run
    partner = np.full(x, -1, np.int32)
    while x > 0 or y > 0:
        x, y, in_run, matched = _step_back(block.moves, x, y, in_run)
        if matched:
            partner[x] = y
    for k in range(len(partner)):
        if partner[k] >= 0:
            _append(runs, a_chars.edges[k], b_chars.edges[partner[k]], a_chars.edges[k + 1] - a_chars.edges[k])
    return reached


@jit
def _step_back(moves: NDArray[np.int8], x: int, y: int, in_run: bool) -> tuple[int, int, bool, bool]:
    """Return the previous cell, whether the path is in a run there, and whether the step matched two characters."""
    move = moves[x, y]
    if in_run or move & ~_RUN_FOLLOWS_GAP == _ENDS_RUN:
        return x - 1, y - 1, move & _RUN_FOLLOWS_GAP == 0, True
    last = move & ~_RUN_FOLLOWS_GAP
    return (x if last == _RIGHT else x - 1), (y if last == _LEFT else y - 1), False, False
