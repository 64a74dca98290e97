"""Tensors that are sent together arrive as they were."""

import pytest
import torch

from nemo_opd.distributed.transfer import moved, together
from nemo_opd.types import Batch, ChunkRows, TeacherRows, TokenRows

TENSORS = [
    torch.arange(6).view(2, 3),
    torch.tensor([True, False, True]),
    torch.zeros(0, 4),
    torch.tensor(0.5, dtype=torch.float64),
    torch.arange(5, dtype=torch.int32)[1:].flip(0),
    torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).t(),
    torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
]


def test_values_shapes_and_dtypes_are_kept() -> None:
    """In one buffer: sizes that no alignment divides, empty and scalar tensors, and views."""
    made = together(TENSORS, "cpu")

    for found, expected in zip(made, TENSORS, strict=True):
        assert found.dtype == expected.dtype
        assert found.is_contiguous()
        assert torch.equal(found, expected)
    assert len({tensor.untyped_storage().data_ptr() for tensor in made if tensor.numel()}) == 1
    assert not together([], "cpu")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_are_the_same_rows_there(device: str) -> None:
    ids = torch.arange(6).view(2, 3)
    tokens = TokenRows(ids, torch.tensor([3, 2]), ids > 1, ids.int())
    chunks = ChunkRows(ids.int(), ids.int() - 1)
    batch = Batch(tokens, (TeacherRows(tokens, chunks), TeacherRows(tokens, None, torch.tensor([0.5, 1.0]))))

    made = moved(batch, device)

    assert made.student.ids.device.type == device
    assert made.teachers[1].chunks is None
    assert made.teachers[0].chunks.histories is None
    if device == "cpu":
        assert torch.equal(made.teachers[0].chunks.teacher, chunks.teacher)
        assert torch.equal(made.teachers[1].weights, batch.teachers[1].weights)
        assert torch.equal(made.student.loss_mask, tokens.loss_mask)
