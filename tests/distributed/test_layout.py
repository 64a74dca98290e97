"""Ranks and coordinates are inverse to each other, in the order of torch's meshes."""

from itertools import product

import pytest

from nemo_opd.distributed.layout import Layout
from nemo_opd.errors import ConfigError


@pytest.mark.parametrize("layout", [Layout(1), Layout(3), Layout(2, 3, 4), Layout(1, 2, 1), Layout(dp=2, tp=2)])
def test_ranks_count_through_dp_then_cp_then_tp(layout: Layout) -> None:
    """Bug: tp is the outermost axis, which spreads the groups that communicate most over nodes."""
    coordinates = list(product(range(layout.dp), range(layout.cp), range(layout.tp)))

    assert [layout.coordinates(rank) for rank in range(layout.size)] == coordinates
    assert [layout.rank(*coordinate) for coordinate in coordinates] == list(range(layout.size))


def test_ranks_and_coordinates_outside_a_layout_are_errors() -> None:
    layout = Layout(2, 1, 2)

    with pytest.raises(ConfigError, match="tp=0"):
        Layout(1, 1, 0)
    with pytest.raises(IndexError, match="rank 4"):
        layout.coordinates(4)
    with pytest.raises(IndexError, match="dp=2"):
        layout.rank(0, 1, 0)
