"""Mesh and layout agree on every rank's coordinates; one process takes every rank in turn, without communication."""

import pytest

from nemo_opd.distributed.layout import Layout
from nemo_opd.distributed.mesh import build_mesh, context_axis, fsdp_axis, tensor_axis
from tests.models.world import as_rank


@pytest.mark.parametrize("layout", [Layout(2, 2, 2), Layout(3, 1, 2), Layout(1, 2, 3), Layout(1, 4, 1)], ids=str)
def test_every_rank_is_where_the_layout_has_it(layout: Layout) -> None:
    """Another order of axes would put the ranks of a tensor-parallel group on different nodes."""
    for rank in range(layout.size):
        with as_rank(rank, layout.size):
            mesh = build_mesh(layout, "cpu")
            d, c, t = layout.coordinates(rank)
            assert tuple(mesh.get_coordinate() or ()) == (d, c, t)
            fsdp = fsdp_axis(mesh)
            assert (fsdp.size(), fsdp.get_local_rank()) == (layout.dp * layout.cp, d * layout.cp + c)
            assert fsdp.mesh.tolist() == [
                layout.rank(*divmod(other, layout.cp), t) for other in range(layout.dp * layout.cp)
            ]
            tensor, context = tensor_axis(mesh), context_axis(mesh)
            assert (tensor is None) == (layout.tp == 1)
            assert (context is None) == (layout.cp == 1)
            if tensor is not None:
                assert tensor.mesh.tolist() == [layout.rank(d, c, other) for other in range(layout.tp)]
            if context is not None:
                assert context.mesh.tolist() == [layout.rank(d, other, t) for other in range(layout.cp)]


def test_data_parallel_alone_is_one_axis() -> None:
    with as_rank(1, 4):
        mesh = build_mesh(Layout(4), "cpu")
        assert mesh.ndim == 1
        assert fsdp_axis(mesh) is mesh
        assert tensor_axis(mesh) is None
        assert context_axis(mesh) is None
