"""The teacher's tokens as a tree of the student tokens that spell them (methods.md §5.7)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.distributed.transfer import together
from nemo_opd.errors import ConfigError, ProjectionError
from nemo_opd.losses.made_once import made_once

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

PIECES = ("spelling", "longest_prefix")
_ENDS_HERE = -1
"""Piece of the run of tokens that are spelled by a node's pieces alone."""
_Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PieceTree:
    """Nodes are sequences of pieces that begin a teacher token or are all of its pieces; node 0 is the empty one.

    A node's tokens follow one another in `order`, in runs of the same next piece. Each node has its runs in ascending
    order of that piece; the run of the tokens that end at the node comes first.
    """

    student_size: int
    """V"""
    order: Tensor
    """int64 [X]: teacher tokens that have pieces, sorted by these."""
    pieces: Tensor
    """int64 [Y]: of all tokens, one token after another; one more, of no token, at the end."""
    node: Tensor
    """int64 [Y]: the node of the pieces before this one in its token."""
    begin: Tensor
    """int64 [W]: a token's first place in `pieces`."""
    length: Tensor
    """int64 [W]: number of its pieces."""
    first_run: Tensor
    """int64 [N]: a node's first run."""
    num_runs: Tensor
    """int64 [N]"""
    run_key: Tensor
    """int64 [R]: node · (V + 1) + next piece + 1; ascending."""
    run_begin: Tensor
    """int64 [R]: a run's first token in `order`."""
    run_length: Tensor
    """int64 [R]"""
    run_child: Tensor
    """int64 [R]: the node with the next piece; −1 for tokens that end at the node."""

    @staticmethod
    def of(
        projection: ProjectionMatrix,
        pieces: str,
        student_vocab_size: int,
        teacher_vocab_size: int,
        device: torch.device,
    ) -> PieceTree:
        """Make the tree of the first tokens of either side; made once as long as the projection lives.

        pieces: one of PIECES. Raises ProjectionError for a projection without pieces.
        """
        ids, ends = arrays_of(projection, pieces)
        return made_once(
            lambda: _tree(ids, ends[:teacher_vocab_size].astype(np.int64), student_vocab_size, device),
            (ids, ends),
            PieceTree,
            student_vocab_size,
            teacher_vocab_size,
            device,
        )

    def run_cell(self, runs: Tensor) -> Tensor:
        """Return the next piece of runs, or V for the run of tokens that end at the node."""
        piece = self.run_key[runs] % (self.student_size + 1) - 1
        return torch.where(piece == _ENDS_HERE, self.student_size, piece)

    def has_pieces_below(self, nodes: Tensor) -> Tensor:
        """Return whether a token has more pieces than a node: int64 [X] → bool [X]."""
        first = self.run_key[self.first_run[nodes]] % (self.student_size + 1) - 1
        return (self.num_runs[nodes] > 1) | (first != _ENDS_HERE)

    def child(self, nodes: Tensor, pieces: Tensor) -> Tensor:
        """Return the nodes with one more piece, −1 if there is none: int64 [X] and [X] → [X]."""
        keys = nodes * (self.student_size + 1) + pieces + 1
        runs = torch.searchsorted(self.run_key, keys).clamp(max=len(self.run_key) - 1)
        return torch.where((nodes >= 0) & (self.run_key[runs] == keys), self.run_child[runs], -1)


TreeOn = Callable[[torch.device], PieceTree]
"""The tree on a device."""


def arrays_of(projection: ProjectionMatrix, pieces: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the pieces of teacher tokens and where each token's end. Raises ConfigError for an unknown kind."""
    if pieces not in PIECES:
        raise ConfigError(f"pieces={pieces!r}: there are no such pieces; choose from {', '.join(PIECES)}")
    of_kind = {
        "spelling": (projection.teacher_spellings, projection.teacher_spelling_ends),
        "longest_prefix": (projection.teacher_prefix_pieces, projection.teacher_prefix_ends),
    }
    ids, ends = of_kind[pieces]
    if ids is None or ends is None:
        raise ProjectionError(
            "byte_prefix needs the student's pieces of the teacher's tokens, which this projection does not have; add "
            "them with nemo_opd.projection.add_byte_prefix or nemo-opd projection byte-prefix, or use projection: auto"
        )
    return ids, ends


def first_pieces(projection: ProjectionMatrix, pieces: str) -> NDArray[np.int32]:
    """Return the first piece of each teacher token [W], −1 for none. Raises ProjectionError as `PieceTree.of`."""
    ids, ends = arrays_of(projection, pieces)

    def first() -> NDArray[np.int32]:
        begin = np.append(0, ends[:-1])
        return np.where(begin < ends, np.append(ids, -1)[begin], -1).astype(np.int32)

    return made_once(first, (ids, ends), first_pieces)


def _tree(pieces: NDArray[np.int32], ends: _Integers, student_size: int, device: torch.device) -> PieceTree:
    begin = np.append(0, ends[:-1])
    length = ends - begin
    length[np.unique(np.repeat(np.arange(len(ends)), length)[pieces[: ends[-1]] >= student_size])] = 0
    order = _sorted_tokens(pieces, begin, length)
    node, runs = _runs(pieces, begin, length, order)
    run_node, piece, *of_runs = runs
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
        *of_runs,
    )
    return PieceTree(student_size, *together([torch.from_numpy(array.astype(np.int64)) for array in arrays], device))


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
    """Return `node` of PieceTree, and of each run its node, piece, first token, number of tokens and child.

    Nodes are numbered by their number of pieces, so runs found one depth after another are in the order of nodes.
    """
    node_of_place = np.zeros(len(pieces) + 1, np.int64)
    padded = np.append(pieces, _ENDS_HERE)
    at, node, depth, num_nodes = np.arange(len(order)), np.zeros(len(order), np.int64), 0, 1
    """Tokens as places in `order`, and the node of their first `depth` pieces."""
    depths: list[list[_Integers]] = []
    while len(at):
        tokens = order[at]
        goes_on = length[tokens] > depth
        place = begin[tokens] + depth
        node_of_place[place[goes_on]] = node[goes_on]
        piece = np.where(goes_on, padded[np.minimum(place, len(pieces))], _ENDS_HERE)
        is_first = np.append(True, (np.diff(node) != 0) | (np.diff(piece) != 0))
        first = np.flatnonzero(is_first)
        count = np.diff(first, append=len(at))
        has_child = piece[first] != _ENDS_HERE
        child = np.where(has_child, num_nodes + np.cumsum(has_child) - 1, -1)
        depths.append([node[first], piece[first], at[first], count, child])
        num_nodes += int(has_child.sum())
        child_of_token = np.repeat(child, count)
        at, node = at[child_of_token >= 0], child_of_token[child_of_token >= 0]
        depth += 1
    return node_of_place, [np.concatenate(parts) for parts in zip(*depths, strict=True)]
