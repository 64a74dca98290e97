"""The tree of teacher tokens' pieces, and the teacher mass that moves along chains of tokens (methods.md §5.7).

Each teacher token is written as student tokens, its pieces. A chain is a chunk of one student token and several teacher
tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.distributed.transfer import compute_on_host, to_device_batched
from nemo_opd.errors import ProjectionError, check_choice
from nemo_opd.logits.term import ReadAhead
from nemo_opd.losses.alm import log1mexp, log_surprise
from nemo_opd.losses.arguments import next_tokens, over
from nemo_opd.losses.chunk_loss import ChunkInputs, ChunkPositions
from nemo_opd.losses.fused import log_sum_exp
from nemo_opd.losses.sparse_projection import cached_while_alive

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

ADD_MAPS = (
    "which this projection lacks; add it with nemo_opd.projection.add_byte_prefix or "
    "nemo-opd projection byte-prefix, or use projection: auto"
)
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
    @cached_while_alive
    def of(
        projection: ProjectionMatrix,
        pieces: str,
        student_vocab_size: int,
        teacher_vocab_size: int,
        device: torch.device,
    ) -> PieceTree:
        """Build the tree within the given vocabulary sizes; cached while the projection lives.

        pieces: as for `byte_prefix`. Raises ProjectionError for a projection without them.
        """
        ids, ends = _arrays_of(projection, pieces)
        return _tree(ids, ends[:teacher_vocab_size].astype(np.int64), student_vocab_size, device)

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
        raise ProjectionError(
            "byte_prefix needs the teacher's tokens in pieces of the student's, which this projection lacks; add "
            "them with nemo_opd.projection.add_byte_prefix or nemo-opd projection byte-prefix, or use projection: auto"
        )
    return ids, ends


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


@dataclass(frozen=True, slots=True)
class Chains:
    """Chunks, among all units, whose last student token x ends beyond their first teacher token."""

    is_chain: Tensor
    """bool [U, 1]"""
    last_rows: Tensor
    """int64 [U]: indices into [B·S] of the logits that predict x."""
    positions: ChunkPositions
    """Positions of y_2..y_n of each chain; empty for other units."""
    begin: Tensor
    """int64 [R, 1]: start of the byte-order range of tokens that continue the chain."""
    end: Tensor
    """int64 [R, 1]: end of that range, exclusive."""
    prefixes: PrefixRanges
    ahead: ReadAhead
    """Reader of the teacher's rows at the positions."""

    @staticmethod
    def of(inputs: ChunkInputs, prefixes: PrefixRanges, num_compared: Tensor | None = None) -> Chains:
        """Find the chains. Up to y_{n−1} the realised token continues a chain; at y_n any token that begins with it.

        num_compared: int64 [U], number of a chunk's leading student tokens that are compared, by default 1. A chunk
        with more student tokens is not a chain.
        """
        units = inputs.units

        def chains(m: Tensor, n: Tensor, rows: Tensor, student_rows: Tensor, *compared: Tensor) -> list[Tensor]:
            (number,) = compared or (torch.ones_like(m),)
            is_chain = (m == number) & (n > 1)
            return [is_chain, (n - 1) * is_chain, rows + 1, student_rows + number - 1]

        fields = (units.student_lengths, units.teacher_lengths, units.teacher_rows, units.student_rows)
        optional = () if num_compared is None else (num_compared,)
        is_chain, lengths, begins, last_rows = compute_on_host(chains, *fields, *optional)
        positions = ChunkPositions.of(begins, lengths)
        targets = positions.targets(inputs.teacher_ids)
        last = positions.place == positions.per_position(lengths) - 1
        begin = torch.where(last, prefixes.begin[targets], prefixes.place[targets])
        end = torch.where(last, prefixes.end[targets], prefixes.place[targets] + 1)
        ahead = inputs.teacher_ahead(positions.rows, positions.offsets)
        bounds = begin.unsqueeze(1), end.unsqueeze(1)
        return Chains(is_chain.unsqueeze(1), last_rows, positions, *bounds, prefixes, ahead)

    def moved(self, inputs: ChunkInputs, part: slice) -> MovedMass:
        """Compute the mass that moves in a part's units."""
        is_chain, surprise = self.is_chain[part], self._log_surprise(inputs, part)
        return MovedMass(
            first_teacher=next_tokens(inputs.teacher_ids, inputs.units.teacher_rows[part]).long().unsqueeze(1),
            realised=next_tokens(inputs.student_ids, self.last_rows[part]).long().unsqueeze(1),
            is_chain=is_chain,
            log_moved=(-surprise.exp()).masked_fill(~is_chain, -math.inf),
            log_kept=log1mexp(surprise).masked_fill(~is_chain, 0),
        )

    @torch.no_grad()
    def _log_surprise(self, inputs: ChunkInputs, part: slice) -> Tensor:
        """Compute log(−log R) [u, 1]; R: probability of y_2..y_{n−1}, then of a token that begins with y_n."""
        span = self.positions.span(part)
        logits = over(self.ahead.of(part).to(inputs.dtype), inputs.temperature)
        place = self.prefixes.place
        continues = (place >= self.begin[span]) & (place < self.end[span])
        # The unknown mass of a truncated teacher does not count, so that R stays a lower bound.
        continues = F.pad(continues, (0, logits.shape[1] - continues.shape[1]))
        odds_against = _log_mass(logits, ~continues) - _log_mass(logits, continues)
        return self.positions.log_sum_exp(log_surprise(odds_against), part)


@dataclass(frozen=True, slots=True)
class MovedMass:
    """Lower bound of the teacher's mass on the realised student token x. Units without a chain move nothing."""

    first_teacher: Tensor
    """int64 [u, 1]: y_1."""
    realised: Tensor
    """int64 [u, 1]: x."""
    is_chain: Tensor
    """bool [u, 1]"""
    log_moved: Tensor
    """[u, 1]: log of the share of q(y_1) that moves to x."""
    log_kept: Tensor
    """[u, 1]: log of the share that stays."""


@dataclass(frozen=True, slots=True)
class PrefixRanges:
    """Prefix relation of teacher tokens, as ranges of the byte order; tokens without bytes come last."""

    place: Tensor
    """int64 [W]: a token's place in the byte order."""
    begin: Tensor
    """int64 [W]: places begin ≤ i < end hold the tokens whose bytes begin with this token's bytes."""
    end: Tensor
    """int64 [W]"""

    @staticmethod
    @cached_while_alive
    def of(projection: ProjectionMatrix, teacher_vocab_size: int, device: torch.device) -> PrefixRanges:
        """Return the ranges among the first `teacher_vocab_size` tokens; cached while the matrix lives.

        Raises ProjectionError for a projection without a byte order.
        """
        if projection.teacher_byte_order is None:
            raise ProjectionError(f"byte_prefix needs the byte order of the teacher's tokens, {ADD_MAPS}")
        # On the host, where counting tokens does not wait for a device.
        order, begin, end = torch.from_numpy(projection.teacher_byte_order).long().T
        is_inside = order < teacher_vocab_size
        inside_before = torch.cat([is_inside.new_zeros(1).long(), is_inside.cumsum(0)])
        bounds = (inside_before[bound[:teacher_vocab_size]] for bound in (begin, end))
        return PrefixRanges(*to_device_batched([order[is_inside].argsort(), *bounds], device))


def _log_mass(logits: Tensor, mask: Tensor) -> Tensor:
    """Compute log Σ exp of the columns in a mask: [R, W] and bool [R, W] → [R, 1]."""
    return log_sum_exp(torch.where(mask, logits, torch.finfo(logits.dtype).min)).unsqueeze(1)
