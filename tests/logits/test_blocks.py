from dataclasses import replace

import pytest
import torch

from nemo_opd.logits.blocks import CPU_PRODUCT_ROWS, LONGEST, blocks, local_parts
from nemo_opd.logits.rows import TensorLogits
from nemo_opd.logits.term import Term, unit_cells

SOURCE = TensorLogits(torch.zeros(1, 1, 1))


def test_parts_cover_the_units_once():
    assert local_parts(SOURCE, unit_cells(0, 1)) == []
    assert local_parts(SOURCE, unit_cells(3, 10**12)) == [slice(0, 1), slice(1, 2), slice(2, 3)]


def test_parts_fit_the_budget_by_what_their_positions_take(monkeypatch):
    """Bug: a chunk of many tokens exceeds the budget because parts count units, not their rows."""
    monkeypatch.setattr("nemo_opd.logits.blocks.CPU_BLOCK_BYTES", 40)
    lengths = [0, 1, 9, 10, 11, 31, 32]
    assert local_parts(SOURCE, unit_cells(6, 1, (lengths, 1))) == [
        slice(0, 1),
        slice(1, 2),
        slice(2, 4),
        slice(4, 5),
        slice(5, 6),
    ]


def test_parts_of_a_product_have_the_rows_that_it_needs():
    """Bug: with 262,144 tokens, bits per byte read the teacher's head again for every 21 rows."""
    parts = local_parts(Product(torch.zeros(1, 1, 1)), unit_cells(300, 3 * 2**18))
    assert [part.stop - part.start for part in parts] == [128, 128, 44]


def test_every_process_of_a_share_has_as_many_parts():
    """Bug: a process has fewer parts, and the other processes wait for it in a collective read."""

    class Shared(TensorLogits):
        def __init__(self, index: int) -> None:
            super().__init__(torch.zeros(1, 1, 1))
            self.share = (index, 2)

    assert [local_parts(Shared(rank), unit_cells(5, 1)) for rank in (0, 1)] == [[slice(0, 3)], [slice(3, 5)]]
    odd = unit_cells(3, 10**12)
    assert local_parts(Shared(0), odd) == [slice(0, 1), slice(2, 3)]
    assert local_parts(Shared(1), odd) == [slice(1, 2), slice(0, 0)]


def nothing(logits: torch.Tensor, part: slice) -> torch.Tensor:
    raise AssertionError("not computed here")


class Product(TensorLogits):
    is_product = True


@pytest.mark.parametrize("source", [SOURCE, Product(torch.zeros(1, 1, 1))], ids=["tensor", "product"])
@pytest.mark.parametrize("budget", [1, 20, 10**6])
def test_joint_blocks_hold_each_unit_of_every_term_once_with_all_its_rows(source, budget, monkeypatch):
    """Catches a unit that is lost, computed twice or lacks rows, for random terms with overlapping units."""
    monkeypatch.setattr("nemo_opd.logits.blocks.CPU_BLOCK_BYTES", budget)
    monkeypatch.setattr("nemo_opd.logits.blocks.CPU_PRODUCT_ROWS", 1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        terms = []
        for _ in range(3):
            lengths = torch.randint(1, 4, (6,), generator=generator)
            rows = torch.randperm(30, generator=generator)[: lengths.sum()].sort().values
            begins = [0, *lengths.cumsum(0).tolist()]
            size = int(torch.randint(1, 5, (1,), generator=generator))
            terms.append(Term(rows, nothing, unit_cells(6, 1), 1, begins, chunk_size=size))
        terms.append(Term(torch.zeros(0, dtype=torch.int64), nothing, unit_cells(0, 1), 1, [0]))
        seen: list[list[int]] = [[], [], [], []]
        read: set[int] = set()
        for block in blocks(source, terms):
            assert len(block.rows.unique()) == len(block.rows)
            assert block.overlaps >= bool(read & set(block.rows.tolist()))
            read |= set(block.rows.tolist())
            for step in block.steps:
                for i, (part, places) in enumerate(step):
                    assert torch.equal(block.rows[places], terms[i].rows[terms[i].span(part)])
                    assert part.stop - part.start <= (terms[i].chunk_size or 0)
                    seen[i] += range(part.start, part.stop)
        assert seen == [list(range(6))] * 3 + [[]]


@pytest.mark.parametrize(("budget", "sizes"), [(4, [1] * 6), (8, [2, 2, 2]), (12, [3, 3]), (10**6, [6])])
def test_products_are_of_as_many_rows_as_the_budget_has_room_for(budget, sizes, monkeypatch):
    """Bug: a product with the full head for every few rows takes many times as long as the loss."""
    monkeypatch.setattr("nemo_opd.logits.blocks.CPU_BLOCK_BYTES", budget)
    monkeypatch.setattr("nemo_opd.logits.blocks.CPU_PRODUCT_ROWS", 1)
    term = Term(torch.arange(6), nothing, unit_cells(6, 1), 1, chunk_size=1)
    assert [len(block.rows) for block in blocks(Product(torch.zeros(1, 1, 1)), [term])] == sizes
    assert [len(block.rows) for block in blocks(SOURCE, [term])] == [1] * 6


def test_only_terms_outside_kernels_cut_a_block_into_steps(monkeypatch):
    """Bug: steps sized for temporaries that kernels do not have (253 of 1,772 rows) leave half of an H100 idle."""
    monkeypatch.setattr("nemo_opd.logits.blocks.CPU_BLOCK_BYTES", 160)
    monkeypatch.setattr("nemo_opd.logits.blocks.CPU_PRODUCT_ROWS", 1)
    wide, narrow = (Term(torch.arange(30), nothing, unit_cells(30, cells), 4) for cells in (40, 10))

    def rows(source, terms, in_kernels):
        return [
            [units.stop - units.start for (units, _), *_ in block.steps] for block in blocks(source, terms, in_kernels)
        ]

    product = Product(torch.zeros(1, 1, 1))
    assert rows(product, [wide], ()) == [[1] * 10] * 3
    assert rows(product, [wide], {0}) == [[10]] * 3
    assert rows(product, [wide, narrow], {0}) == [[4, 4, 4], [4, 4, 4], [4, 2]]
    assert rows(product, [replace(wide, chunk_size=5)], {0}) == [[5, 5]] * 3
    assert rows(SOURCE, [wide], {0}) == [[5]] * 6


def test_a_wide_vocabulary_has_as_many_rows_as_a_product_needs():
    """Bug: the budget of 64 MiB has room for 16 rows of 2^20 tokens, so the head is read again for every 16 rows."""
    term = Term(torch.arange(300), nothing, unit_cells(300, 2**20), 2**20)
    sizes = [len(block.rows) for block in blocks(Product(torch.zeros(1, 1, 1)), [term])]
    assert sizes == [CPU_PRODUCT_ROWS, CPU_PRODUCT_ROWS, 300 - 2 * CPU_PRODUCT_ROWS]


def test_every_process_of_a_share_has_a_product():
    """Bug: a process of a share multiplies the rows of the other processes too."""

    class Shared(Product):
        share = (1, 4)

    term = Term(torch.arange(6), nothing, unit_cells(6, 1), 1, chunk_size=1)
    assert [block.rows.tolist() for block in blocks(Shared(torch.zeros(1, 1, 1)), [term])] == [[2, 3]]


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("kind", [TensorLogits, Product])
def test_units_that_lie_across_each_other_all_along_are_cut(kind, processes, monkeypatch):
    """Bug: no row ends a unit of all terms, so one process reads all rows at once."""
    length, fitting = 8192, 256
    monkeypatch.setattr("nemo_opd.logits.blocks.CPU_BLOCK_BYTES", fitting * 4)
    monkeypatch.setattr("nemo_opd.logits.blocks.CPU_PRODUCT_ROWS", 1)
    terms = []
    for first in (0, 1):
        begins = list(range(0, length - 2 * first + 1, 2))
        rows = torch.arange(first, length - first)
        terms.append(Term(rows, nothing, unit_cells(len(begins) - 1, 1), 1, begins))
    blocks_by_process = []
    for index in range(processes):
        source = kind(torch.zeros(1, 1, 1))
        source.share = (index, processes)
        blocks_by_process.append(list(blocks(source, terms)))
    assert (
        max(len(block.rows) for process_blocks in blocks_by_process for block in process_blocks)
        <= (LONGEST + 1) * fitting
    )
    rounds = list(zip(*blocks_by_process, strict=True))
    read: set[int] = set()
    for parallel_blocks in rounds:
        assert len({(len(block.steps), block.overlaps) for block in parallel_blocks}) == 1
        for block in parallel_blocks:
            assert block.overlaps >= bool(read & set(block.rows.tolist()))
            read |= set(block.rows.tolist())
    for i, term in enumerate(terms):
        units = [step[i][0] for parallel_blocks in rounds for block in parallel_blocks for step in block.steps]
        assert sorted(unit for part in units for unit in range(part.start, part.stop)) == list(range(term.num_units))
    rows_by_process = [sum(len(block.rows) for block in process_blocks) for process_blocks in blocks_by_process]
    assert max(rows_by_process) - min(rows_by_process) <= (LONGEST + 1) * fitting
