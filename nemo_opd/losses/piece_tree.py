"""Prefix tree of the teacher's tokens, each written as student tokens, its pieces (methods.md §5.7)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.distributed.transfer import to_device_batched
from nemo_opd.errors import ConfigError, ProjectionError
from nemo_opd.losses.sparse_projection import cached_by_array

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

PIECES = ("spelling", "longest_prefix")
_ENDS_HERE = -1
"""Next piece of tokens that end at a node."""
_Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PieceTree:
    """Prefix tree whose nodes are sequences of leading pieces of teacher tokens; node 0 is the empty sequence.

    A node's tokens are consecutive in `order` and form runs with the same next piece, in ascending order of that piece;
    the run of tokens that end at the node comes first.
    """

    student_size: int
    """V"""
    order: Tensor
    """int64 [X]: teacher tokens that have pieces, sorted by their pieces."""
    pieces: Tensor
    """int64 [Y]: the pieces of all tokens, concatenated, and one padding entry."""
    node: Tensor
    """int64 [Y]: the node of the pieces that precede this one in its token."""
    begin: Tensor
    """int64 [W]: where a token begins in `pieces`."""
    length: Tensor
    """int64 [W]: number of a token's pieces."""
    first_run: Tensor
    """int64 [N]: a node's first run."""
    num_runs: Tensor
    """int64 [N]: number of a node's runs."""
    run_key: Tensor
    """int64 [R]: node · (V + 1) + next piece + 1, ascending."""
    run_begin: Tensor
    """int64 [R]: a run's first token in `order`."""
    run_length: Tensor
    """int64 [R]: number of a run's tokens."""
    run_child: Tensor
    """int64 [R]: the node reached by the next piece, −1 for the run of tokens that end at the node."""

    @staticmethod
    def of(
        projection: ProjectionMatrix,
        pieces: str,
        student_vocab_size: int,
        teacher_vocab_size: int,
        device: torch.device,
    ) -> PieceTree:
        """Build the tree within the given vocabulary sizes; cached while the projection lives.

        pieces: one of PIECES. Raises ProjectionError for a projection without pieces.
        """
        ids, ends = arrays_of(projection, pieces)
        return cached_by_array(
            lambda: _tree(ids, ends[:teacher_vocab_size].astype(np.int64), student_vocab_size, device),
            (ids, ends),
            PieceTree,
            student_vocab_size,
            teacher_vocab_size,
            device,
        )

    def run_cell(self, runs: Tensor) -> Tensor:
        """Return the next piece of each run, or V for tokens that end at the node."""
        piece = self.run_key[runs] % (self.student_size + 1) - 1
        return torch.where(piece == _ENDS_HERE, self.student_size, piece)

    def has_pieces_below(self, nodes: Tensor) -> Tensor:
        """Return whether any token continues beyond each node: int64 [X] → bool [X]."""
        first = self.run_key[self.first_run[nodes]] % (self.student_size + 1) - 1
        return (self.num_runs[nodes] > 1) | (first != _ENDS_HERE)

    def child(self, nodes: Tensor, pieces: Tensor) -> Tensor:
        """Extend nodes by one piece each, −1 if the tree has no such node: int64 [X] and [X] → [X]."""
        keys = nodes * (self.student_size + 1) + pieces + 1
        runs = torch.searchsorted(self.run_key, keys).clamp(max=len(self.run_key) - 1)
        return torch.where((nodes >= 0) & (self.run_key[runs] == keys), self.run_child[runs], -1)


TreeOn = Callable[[torch.device], PieceTree]
"""Returns the tree on a device."""


def arrays_of(projection: ProjectionMatrix, pieces: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the concatenated pieces of teacher tokens and where each token's pieces end.

    Raises ConfigError for unknown pieces, ProjectionError for a projection without them.
    """
    if pieces not in PIECES:
        raise ConfigError(f"pieces={pieces!r} is unknown; choose from {', '.join(PIECES)}")
    arrays = {
        "spelling": (projection.teacher_spellings, projection.teacher_spelling_ends),
        "longest_prefix": (projection.teacher_prefix_pieces, projection.teacher_prefix_ends),
    }
    ids, ends = arrays[pieces]
    if ids is None or ends is None:
        raise ProjectionError(
            "byte_prefix needs the teacher's tokens in pieces of the student's, which this projection lacks; add "
            "them with nemo_opd.projection.add_byte_prefix or nemo-opd projection byte-prefix, or use projection: auto"
        )
    return ids, ends


def first_pieces(projection: ProjectionMatrix, pieces: str) -> NDArray[np.int32]:
    """Return the first piece of each teacher token [W], −1 for none. Raises ProjectionError as `PieceTree.of`."""
    ids, ends = arrays_of(projection, pieces)

    def first() -> NDArray[np.int32]:
        begin = np.append(0, ends[:-1])
        return np.where(begin < ends, np.append(ids, -1)[begin], -1).astype(np.int32)

    return cached_by_array(first, (ids, ends), first_pieces)


def _tree(pieces: NDArray[np.int32], ends: _Integers, student_size: int, device: torch.device) -> PieceTree:
    begin = np.append(0, ends[:-1])
    length = ends - begin
    # Tokens with a piece outside of the student's vocabulary count as without pieces.
    length[np.unique(np.repeat(np.arange(len(ends)), length)[pieces[: ends[-1]] >= student_size])] = 0
    order = _sorted_tokens(pieces, begin, length)
    node, runs = _runs(pieces, begin, length, order)
    run_node, piece, *run_arrays = runs
    num_nodes = int(run_node.max(initial=0)) + 1
    first_run = np.searchsorted(run_node, np.arange(num_nodes))
    arrays = (
        order,
        np.append(pieces, _ENDS_HERE),
        node,
        begin,
        length,
        first_run,
        np.diff(first_run, append=len(run_node)),
        run_node * (student_size + 1) + piece + 1,
        *run_arrays,
    )
    return PieceTree(
        student_size, *to_device_batched([torch.from_numpy(array.astype(np.int64)) for array in arrays], device)
    )


def _sorted_tokens(pieces: NDArray[np.int32], begin: _Integers, length: _Integers) -> _Integers:
    tokens = np.flatnonzero(length)
    padded = np.append(pieces, _ENDS_HERE)
    columns = [
        np.where(place < length[tokens], padded[np.minimum(begin[tokens] + place, len(pieces))], _ENDS_HERE)
        for place in range(length.max(initial=0))
    ]
    return tokens[np.lexsort([tokens, *reversed(columns)])]


def _runs(
    pieces: NDArray[np.int32], begin: _Integers, length: _Integers, order: _Integers
) -> tuple[_Integers, list[_Integers]]:
    """Return `node` of PieceTree, and each run's node, piece, first token, number of tokens and child.

    Nodes are numbered in order of depth, so collecting runs depth by depth yields them in node order.
    """
    node_of_place = np.zeros(len(pieces) + 1, np.int64)
    padded = np.append(pieces, _ENDS_HERE)
    # The tokens of this depth as indices into `order`, and the node of their first `depth` pieces.
    index, node, depth, num_nodes = np.arange(len(order)), np.zeros(len(order), np.int64), 0, 1
    depths: list[list[_Integers]] = []
    while len(index):
        tokens = order[index]
        has_more = length[tokens] > depth
        place = begin[tokens] + depth
        node_of_place[place[has_more]] = node[has_more]
        piece = np.where(has_more, padded[np.minimum(place, len(pieces))], _ENDS_HERE)
        is_first = np.append(True, (np.diff(node) != 0) | (np.diff(piece) != 0))
        first = np.flatnonzero(is_first)
        count = np.diff(first, append=len(index))
        has_child = piece[first] != _ENDS_HERE
        child = np.where(has_child, num_nodes + np.cumsum(has_child) - 1, -1)
        depths.append([node[first], piece[first], index[first], count, child])
        num_nodes += int(has_child.sum())
        child_of_token = np.repeat(child, count)
        index, node = index[child_of_token >= 0], child_of_token[child_of_token >= 0]
        depth += 1
    return node_of_place, [np.concatenate(parts) for parts in zip(*depths, strict=True)]
