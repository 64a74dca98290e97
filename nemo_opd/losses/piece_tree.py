"""The tree of teacher tokens written as student tokens, their pieces (methods.md §5.7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.distributed.transfer import to_device_batched
from nemo_opd.errors import ProjectionError, check_choice
from nemo_opd.losses.sparse_projection import cached_while_alive

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

_ENDS_HERE = -1
"""Next piece, or byte, of tokens that end at a node."""
_ADD_THEM = (
    "which this projection lacks; add them with nemo_opd.projection.add_byte_prefix or "
    "nemo-opd projection byte-prefix, or use projection: auto"
)
_Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PieceTree:
    """Prefix tree whose nodes are sequences of leading pieces of teacher tokens; node 0 is the empty sequence.

    A node's tokens are consecutive in `order` and form runs with the same next piece, in ascending order of that piece;
    the run of tokens that end at the node comes first.

    Further nodes, from `first_byte_node` on, are those of `teacher_text`: leading bytes of teacher tokens. Their
    next piece is the longest student token that begins the remaining bytes.
    """

    student_size: int
    """V"""
    teacher_text: ByteTree
    num_student_bytes: Tensor
    """int64 [V]: number of each student token's bytes."""
    first_byte_node: int
    order: Tensor
    """int64 [X]: the teacher tokens of all runs."""
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
    @cached_while_alive
    def of(
        projection: ProjectionMatrix,
        pieces: str,
        student_vocab_size: int,
        teacher_vocab_size: int,
        device: torch.device,
    ) -> PieceTree:
        """Build the tree within the given vocabulary sizes; cached while the projection lives.

        pieces: as for `byte_prefix`. device: of `order`, `run_key`, `run_begin` and `run_length`; other tensors stay on
        the host. Raises ProjectionError for a projection without pieces or without tokens' bytes.
        """
        if device.type == "cpu":
            ids, ends = _arrays_of(projection, pieces)
            sides = _byte_trees(projection, student_vocab_size, teacher_vocab_size)
            return _tree(ids, ends[:teacher_vocab_size].astype(np.int64), student_vocab_size, *sides)
        host = PieceTree.of(projection, pieces, student_vocab_size, teacher_vocab_size, torch.device("cpu"))
        sent = to_device_batched([host.order, host.run_key, host.run_begin, host.run_length], device)
        order, run_key, run_begin, run_length = sent
        return replace(host, order=order, run_key=run_key, run_begin=run_begin, run_length=run_length)

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
        return torch.where(nodes >= 0, _child_of(self.run_key, self.run_child, keys), -1)


def _child_of(key: Tensor, child: Tensor, wanted: Tensor) -> Tensor:
    """Return the children of the wanted keys, −1 for keys that are not there: int64 [X] → [X]. key: ascending."""
    index = torch.searchsorted(key, wanted).clamp(max=len(key) - 1)
    return torch.where(key[index] == wanted, child[index], -1)


@cached_while_alive
def first_pieces(projection: ProjectionMatrix, pieces: str) -> NDArray[np.int32]:
    """Return the first piece of each teacher token [W], −1 for none. Raises ProjectionError as `PieceTree.of`."""
    ids, ends = _arrays_of(projection, pieces)
    begin = np.append(0, ends[:-1])
    return np.where(begin < ends, np.append(ids, -1)[begin], -1).astype(np.int32)


def _arrays_of(projection: ProjectionMatrix, pieces: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the concatenated pieces of teacher tokens and where each token's pieces end.

    Raises ConfigError for unknown pieces, ProjectionError for a projection without them.
    """
    arrays = {
        "spelling": (projection.teacher_spellings, projection.teacher_spelling_ends),
        "longest_prefix": (projection.teacher_prefix_pieces, projection.teacher_prefix_ends),
    }
    check_choice("pieces", pieces, arrays)
    ids, ends = arrays[pieces]
    if ids is None or ends is None:
        raise ProjectionError(f"byte_prefix needs the teacher's tokens in pieces of the student's, {_ADD_THEM}")
    return ids, ends


@dataclass(frozen=True, slots=True)
class ByteTree:
    """Prefix tree of tokens' bytes, on the host; node 0 has no bytes."""

    length: Tensor
    """int64 [W]: number of each token's bytes."""
    begin: Tensor
    """int64 [W]: where a token begins in `values`."""
    values: Tensor
    """int64 [Y]: the bytes of all tokens, concatenated, and one padding entry."""
    node: Tensor
    """int64 [Y]: the node of the bytes that precede this one in its token."""
    token: Tensor
    """int64 [N]: the first token that ends at a node, or −1."""
    key: Tensor
    """int64 [N]: parent node · 256 + byte of all nodes but 0, ascending, and a larger number."""
    key_child: Tensor
    """int64 [N]: the node of each key, −1 for the last."""

    @staticmethod
    def of(texts: Sequence[bytes], is_preferred: Sequence[bool] = ()) -> ByteTree:
        """Build the tree. Among tokens with the same bytes, preferred ones come first, then lower ids."""
        ordered = sorted(
            (text, not preferred, token)
            for token, (text, preferred) in enumerate(zip_longest(texts, is_preferred, fillvalue=False))
            if text
        )
        order = np.array([token for _, _, token in ordered], np.int64)
        length = np.fromiter(map(len, texts), np.int64, len(texts))
        begin = length.cumsum() - length
        values = np.frombuffer(b"".join(texts), np.uint8).astype(np.int64)
        node, (run_node, byte, first, _, child) = _runs(values, begin, length, order)
        ends = byte == _ENDS_HERE
        token = np.full(1 + int((~ends).sum()), -1)
        token[run_node[ends]] = order[first[ends]]
        arrays = (
            length,
            begin,
            np.append(values, 0),
            node,
            token,
            np.append((run_node * 256 + byte)[~ends], np.iinfo(np.int64).max),
            np.append(child[~ends], -1),
        )
        return ByteTree(*map(torch.from_numpy, arrays))

    def child(self, nodes: Tensor, values: Tensor) -> Tensor:
        """Extend nodes by one byte each, −1 if the tree has no such node: int64 [X] and [X] → [X]."""
        return _child_of(self.key, self.key_child, nodes * 256 + values)

    def end_node(self, tokens: Tensor) -> Tensor:
        """Return the node of all bytes of each token, −1 for tokens without text: int64 [X] → [X]."""
        last = (self.begin + self.length - 1)[tokens]
        return torch.where(self.length[tokens] > 0, self.child(self.node[last], self.values[last]), -1)

    def longest_tokens(self, values: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        """Return the longest token that begins each of the texts values[begin:end], or −1: [Y], [X], [X] → [X]."""
        tokens, nodes, place = torch.full_like(begin, -1), torch.zeros_like(begin), begin.clone()
        active = (place < end).nonzero().squeeze(1)
        while len(active):
            child = self.child(nodes[active], values[place[active]])
            active, child = active[child >= 0], child[child >= 0]
            nodes[active], token = child, self.token[child]
            tokens[active] = torch.where(token >= 0, token, tokens[active])
            place[active] += 1
            active = active[place[active] < end[active]]
        return tokens


def _byte_trees(
    projection: ProjectionMatrix, student_vocab_size: int, teacher_vocab_size: int
) -> tuple[ByteTree, ByteTree]:
    """Return the trees of the student's and the teacher's tokens. Raises ProjectionError as `token_bytes`."""
    student, teacher = token_bytes(projection, student_vocab_size, teacher_vocab_size)
    # Of student tokens with the same bytes, the one that has a partner is the usual one.
    return ByteTree.of(student, projection.exact[: len(student)].tolist()), ByteTree.of(teacher)


def token_bytes(
    projection: ProjectionMatrix, student_vocab_size: int, teacher_vocab_size: int
) -> tuple[list[bytes], list[bytes]]:
    """Return the bytes of both sides' tokens within the sizes, empty for tokens without text.

    Raises ProjectionError for a projection without them.
    """
    sides = (
        (projection.student_bytes, projection.student_byte_ends, student_vocab_size),
        (projection.teacher_bytes, projection.teacher_byte_ends, teacher_vocab_size),
    )
    texts: list[list[bytes]] = []
    for values, ends, size in sides:
        if values is None or ends is None:
            raise ProjectionError(f"the loss needs the bytes of both sides' tokens, {_ADD_THEM}")
        joined, stops = values.astype(np.uint8).tobytes(), ends[:size].tolist()
        texts.append([joined[start:stop] for start, stop in zip([0, *stops], stops, strict=False)])
    return texts[0], texts[1]


def _tree(
    pieces: NDArray[np.int32],
    ends: _Integers,
    student_size: int,
    student: ByteTree,
    text: ByteTree,
) -> PieceTree:
    begin = np.append(0, ends[:-1])
    length = ends - begin
    # Tokens with a piece outside of the student's vocabulary count as without pieces.
    length[np.unique(np.repeat(np.arange(len(ends)), length)[pieces[: ends[-1]] >= student_size])] = 0
    order = _sorted_tokens(pieces, begin, length)
    node, piece_runs = _runs(pieces, begin, length, order)
    first_byte_node = int(piece_runs[0].max(initial=0)) + 1
    byte_order, byte_runs = _byte_runs(student, text)
    byte_runs[0] += first_byte_node
    byte_runs[2] += len(order)
    run_node, piece, *run_arrays = (np.concatenate(parts) for parts in zip(piece_runs, byte_runs, strict=True))
    first_run = np.searchsorted(run_node, np.arange(first_byte_node + len(text.token)))
    arrays = (
        np.concatenate([order, byte_order]),
        np.append(pieces, _ENDS_HERE),
        node,
        begin,
        length,
        first_run,
        np.diff(first_run, append=len(run_node)),
        run_node * (student_size + 1) + piece + 1,
        *run_arrays,
    )
    tensors = [torch.from_numpy(array.astype(np.int64)) for array in arrays]
    return PieceTree(student_size, text, student.length, first_byte_node, *tensors)


def _byte_runs(student: ByteTree, text: ByteTree) -> tuple[_Integers, list[_Integers]]:
    """Return the tokens of all runs at the nodes of `text`, and the runs' fields as from `_runs`."""
    tokens = torch.arange(len(text.length)).repeat_interleave(text.length)
    place = text.node[: len(tokens)].nonzero().squeeze(1)
    end = (text.begin + text.length)[tokens]
    piece = student.longest_tokens(text.values, place, end[place])
    place, piece = place[piece >= 0], piece[piece >= 0]
    ending = text.length.nonzero().squeeze(1)
    node = torch.cat([text.end_node(ending), text.node[place]]).numpy()
    next_piece = torch.cat([torch.full_like(ending, _ENDS_HERE), piece]).numpy()
    token = torch.cat([ending, tokens[place]]).numpy()
    order = np.lexsort([token, next_piece, node])
    node, next_piece = node[order], next_piece[order]
    first, count = _equal_runs(node, next_piece)
    return token[order], [node[first], next_piece[first], first, count, np.full(len(first), -1)]


def _sorted_tokens(pieces: NDArray[np.int32], begin: _Integers, length: _Integers) -> _Integers:
    tokens = np.flatnonzero(length)
    padded = np.append(pieces, _ENDS_HERE)
    columns = [
        np.where(place < length[tokens], padded[np.minimum(begin[tokens] + place, len(pieces))], _ENDS_HERE)
        for place in range(length.max(initial=0))
    ]
    return tokens[np.lexsort([tokens, *reversed(columns)])]


def _runs(
    pieces: NDArray[np.integer], begin: _Integers, length: _Integers, order: _Integers
) -> tuple[_Integers, list[_Integers]]:
    """Return `node` of PieceTree, and each run's node, piece, first token, number of tokens and child.

    Nodes are numbered in order of depth, so collecting runs depth by depth yields them in node order.
    """
    node_of_place = np.zeros(len(pieces) + 1, np.int64)
    padded = np.append(pieces, _ENDS_HERE)
    # The tokens of this depth as indices into `order`, and the node of their first `depth` pieces.
    index, node, depth, num_nodes = np.arange(len(order)), np.zeros(len(order), np.int64), 0, 1
    depths: list[list[_Integers]] = [[np.empty(0, np.int64)] * 5]
    while len(index):
        tokens = order[index]
        has_more = length[tokens] > depth
        place = begin[tokens] + depth
        node_of_place[place[has_more]] = node[has_more]
        piece = np.where(has_more, padded[np.minimum(place, len(pieces))], _ENDS_HERE)
        first, count = _equal_runs(node, piece)
        has_child = piece[first] != _ENDS_HERE
        child = np.where(has_child, num_nodes + np.cumsum(has_child) - 1, -1)
        depths.append([node[first], piece[first], index[first], count, child])
        num_nodes += int(has_child.sum())
        child_of_token = np.repeat(child, count)
        index, node = index[child_of_token >= 0], child_of_token[child_of_token >= 0]
        depth += 1
    return node_of_place, [np.concatenate(parts) for parts in zip(*depths, strict=True)]


def _equal_runs(node: _Integers, piece: _Integers) -> tuple[_Integers, _Integers]:
    """Return the first index and the length of each run of equal pairs."""
    first = np.flatnonzero(np.append(True, (np.diff(node) != 0) | (np.diff(piece) != 0))[: len(node)])
    return first, np.diff(first, append=len(node))
