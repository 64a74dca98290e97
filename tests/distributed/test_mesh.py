"""Mesh and layout agree on every rank's coordinates. One process poses as one rank after another."""

import pytest

from nemo_opd.distributed.layout import Layout
from nemo_opd.distributed.process_group import build_mesh, context_axis, fsdp_axis, tensor_axis
from tests.models.world import as_rank

LAYOUTS = [Layout(2, 2, 2), Layout(3, 1, 2), Layout(1, 2, 3), Layout(1, 4, 1)]
COPIES = [Layout(4, replicas=2), Layout(6, 1, 2, replicas=3), Layout(4, 2, 1, replicas=2), Layout(4, 2, 2, replicas=4)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_is_where_the_layout_has_it(layout: Layout) -> None:
    """Bug: another order of axes, which puts the ranks of a tensor-parallel group on different nodes."""
    for rank in range(layout.size):
        with as_rank(rank, layout.size):
            mesh = build_mesh(layout, "cpu")
            d, c, t = layout.coordinates(rank)
            assert tuple(mesh.get_coordinate() or ()) == (d, c, t)
            fsdp = fsdp_axis(mesh)
            assert (fsdp.size(), fsdp.get_local_rank()) == (layout.dp * layout.cp, d * layout.cp + c)
            assert fsdp.mesh.tolist() == [
                layout.rank(*divmod(index, layout.cp), t) for index in range(layout.dp * layout.cp)
            ]
            tensor, context = tensor_axis(mesh), context_axis(mesh)
            assert (tensor is None) == (layout.tp == 1)
            assert (context is None) == (layout.cp == 1)
            if tensor is not None:
                assert tensor.mesh.tolist() == [layout.rank(d, c, index) for index in range(layout.tp)]
            if context is not None:
                assert context.mesh.tolist() == [layout.rank(d, index, t) for index in range(layout.cp)]


@pytest.mark.parametrize("layout", COPIES, ids=str)
def test_a_copy_is_sharded_over_consecutive_ranks(layout: Layout) -> None:
    """Bugs: copies are sharded across nodes and replicated within them; the FSDP size leaves the copies out."""
    ranks_per_copy = layout.size // layout.replicas
    for rank in range(layout.size):
        with as_rank(rank, layout.size):
            mesh = build_mesh(layout, "cpu")
            fsdp = fsdp_axis(mesh)
            assert fsdp.size() == layout.dp * layout.cp
            copies = fsdp.mesh.tolist()
            assert [len(shards) for shards in copies] == [layout.num_shards] * layout.replicas
            for number, shards in enumerate(copies):
                assert shards == list(
                    range(number * ranks_per_copy + rank % layout.tp, (number + 1) * ranks_per_copy, layout.tp)
                )
            assert tuple(fsdp.get_coordinate() or ()) == (rank // ranks_per_copy, rank % ranks_per_copy // layout.tp)
            d, c, t = layout.coordinates(rank)
            for axis, place, degree in ((tensor_axis(mesh), t, layout.tp), (context_axis(mesh), c, layout.cp)):
                assert (axis is None) == (degree == 1)
                assert axis is None or (axis.size(), axis.get_local_rank()) == (degree, place)
            if (tensor := tensor_axis(mesh)) is not None:
                assert tensor.mesh.tolist() == [layout.rank(d, c, index) for index in range(layout.tp)]


def test_data_parallel_alone_is_one_axis() -> None:
    with as_rank(1, 4):
        mesh = build_mesh(Layout(4), "cpu")
        assert mesh.ndim == 1
        assert fsdp_axis(mesh) is mesh
        assert tensor_axis(mesh) is None
        assert context_axis(mesh) is None
