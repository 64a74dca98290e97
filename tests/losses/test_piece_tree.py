"""The tree of the teacher's spellings, and the tokens that begin with a token's bytes, against lists."""

import itertools

import numpy as np
import pytest
import torch

from nemo_opd.errors import ConfigError, ProjectionError
from nemo_opd.losses.piece_tree import ByteTree, PieceTree, first_pieces
from nemo_opd.losses.prefixes import PrefixRanges
from nemo_opd.projection import ProjectionMatrix

from .projections import spelled_matrix

V = 4


def random_pieces(seed: int) -> list[tuple[int, ...]]:
    """Make tokens with equal pieces, tokens without any, and pieces that begin other tokens."""
    draw = np.random.default_rng(seed)
    return [tuple(draw.integers(V, size=draw.integers(0, 5)).tolist()) for _ in range(60)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sizes", [(V, 60), (V - 1, 47)])
def test_runs_of_every_node_equal_the_lists(seed: int, sizes: tuple[int, int]) -> None:
    """Catches tokens of one node under another, an end read as a piece, and tokens beyond a vocabulary."""
    spellings = random_pieces(seed)
    texts = [bytes(spelling) for spelling in spellings]
    projection = spelled_matrix([], V, texts, spellings, [bytes([v]) for v in range(V)])
    tree = PieceTree.of(projection, "spelling", *sizes, torch.device("cpu"))
    spelled = {t: s for t, s in enumerate(spellings[: sizes[1]]) if s and max(s) < sizes[0]}
    nodes = {(): 0}
    for pieces in sorted({s[:k] for s in spelled.values() for k in range(len(s) + 1)}, key=len):
        if pieces:
            nodes[pieces] = int(tree.child(torch.tensor([nodes[pieces[:-1]]]), torch.tensor([pieces[-1]])))
        node, depth = nodes[pieces], len(pieces)
        assert node >= 0
        runs = range(tree.first_run[node], tree.first_run[node] + tree.num_runs[node])
        cells = tree.run_cell(torch.tensor(runs)).tolist()
        expected: dict[int, set[int]] = {}
        for t, s in spelled.items():
            if s[:depth] == pieces:
                expected.setdefault(s[depth] if len(s) > depth else sizes[0], set()).add(t)
        begins, lengths = tree.run_begin[list(runs)].tolist(), tree.run_length[list(runs)].tolist()
        tokens = [set(tree.order[b : b + n].tolist()) for b, n in zip(begins, lengths, strict=True)]
        assert dict(zip(cells, tokens, strict=True)) == expected
    for t, s in spelled.items():
        places = range(tree.begin[t], tree.begin[t] + tree.length[t])
        assert tree.node[list(places)].tolist() == [nodes[s[:k]] for k in range(len(s))]
        assert int(tree.child(torch.tensor([nodes[s[:-1]]]), torch.tensor([s[-1]]))) == nodes[s]
    assert first_pieces(projection, "spelling").tolist() == [s[0] if s else -1 for s in spellings]


@pytest.mark.parametrize("seed", range(5))
def test_ranges_equal_the_loop(seed: int) -> None:
    """Bugs with equal bytes under several ids, tokens without bytes, and prefixes of prefixes."""
    rng = np.random.default_rng(seed)
    strings = [b"".join(parts) for n in range(4) for parts in itertools.product([b"a", b"b", b"\xff"], repeat=n)]
    pieces = [None if i < 0 else strings[i] for i in rng.integers(-1, len(strings), size=60)]
    matrix = spelled_matrix([], 1, pieces, [[]] * 60)
    size = 60 - 15 * (seed % 2)
    ranges = PrefixRanges.of(matrix, size, torch.device("cpu"))
    pieces = pieces[:size]
    order = ranges.place.argsort()
    assert torch.equal(order[ranges.place], torch.arange(size))
    for token, piece in enumerate(pieces):
        computed = set(order[ranges.begin[token] : ranges.end[token]].tolist())
        begun = {t for t, text in enumerate(pieces) if piece and text and text.startswith(piece)}
        assert computed == begun | {token}


def test_the_longest_token_that_begins_a_text() -> None:
    """Catches the rarer of two ids with equal bytes, such as a byte token, and a token longer than the text."""
    tree = ByteTree.of([b"a", b"a", b"abc", b"", b"b"], [False, True, False, False, False])
    texts = torch.tensor(list(b"abcab"))
    begin, end = torch.tensor([0, 3, 1, 2]), torch.tensor([3, 5, 3, 3])
    assert tree.longest_tokens(texts, begin, end).tolist() == [2, 1, 4, -1]


def test_missing_pieces_are_named() -> None:
    """Catches an old projection without pieces whose user does not learn how to add them."""
    projection = ProjectionMatrix([[0]], [[1.0]])
    with pytest.raises(ProjectionError, match="add_byte_prefix or nemo-opd projection byte-prefix, or use projection"):
        PieceTree.of(projection, "spelling", 1, 1, torch.device("cpu"))
    with pytest.raises(ConfigError, match="choose from spelling, longest_prefix"):
        first_pieces(projection, "letters")
