"""Tensors that are sent together arrive as they were."""

import pytest
import torch

from nemo_opd.distributed.transfer import _send_as_one_buffer, compute_on_host, on_host, to_device, to_device_batched
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
    made = _send_as_one_buffer(TENSORS, torch.device("cpu"))

    for found, expected in zip(made, TENSORS, strict=True):
        assert found.dtype == expected.dtype
        assert found.is_contiguous()
        assert torch.equal(found, expected)
    assert len({tensor.untyped_storage().data_ptr() for tensor in made if tensor.numel()}) == 1
    assert not _send_as_one_buffer([], torch.device("cpu"))
    # Bug: Triton compiles kernels again for each pattern of arguments that begin at 16 bytes and that do not.
    assert all(tensor.storage_offset() * tensor.element_size() % 16 == 0 for tensor in made)


def test_on_a_cpu_nothing_is_copied() -> None:
    assert all(ours is given for ours, given in zip(to_device_batched(TENSORS, "cpu"), TENSORS, strict=True))
    assert on_host(TENSORS[0]) is TENSORS[0]


def test_what_was_sent_is_known_and_what_is_made_of_it_there_is_not() -> None:
    (ids,) = to_device_batched([torch.arange(4)], "meta")
    assert torch.equal(on_host(ids), torch.arange(4))
    assert on_host(ids + 1) is None


def test_a_plan_of_known_values_is_made_on_the_host() -> None:
    """On meta tensors there are no values: a plan made there would fail."""
    ids, mask = to_device_batched([torch.arange(4), torch.tensor([True, False, True, True])], "meta")
    (kept,) = compute_on_host(lambda ids, mask: [ids[mask.nonzero().squeeze(1)]], ids, mask)
    assert kept.device.type == "meta"
    assert on_host(kept).tolist() == [0, 2, 3]
    (again,) = compute_on_host(lambda kept: [kept + 1], kept)
    assert on_host(again).tolist() == [1, 3, 4]
    with pytest.raises(NotImplementedError):
        compute_on_host(lambda ids, mask: [ids[mask.nonzero().squeeze(1)]], ids + 1, mask)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_are_the_same_rows_there(device: str) -> None:
    ids = torch.arange(6).view(2, 3)
    tokens = TokenRows(ids, torch.tensor([3, 2]), ids > 1, ids.int())
    chunks = ChunkRows(ids.int(), ids.int() - 1)
    batch = Batch(tokens, (TeacherRows(tokens, chunks), TeacherRows(tokens, None, torch.tensor([0.5, 1.0]))))

    made = to_device(batch, device)

    assert made.student.ids.device.type == device
    assert made.teachers[1].chunks is None
    assert made.teachers[0].chunks.histories is None
    if device == "cpu":
        assert torch.equal(made.teachers[0].chunks.teacher, chunks.teacher)
        assert torch.equal(made.teachers[1].weights, batch.teachers[1].weights)
        assert torch.equal(made.student.loss_mask, tokens.loss_mask)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_arrive_on_a_gpu() -> None:
    for found, expected in zip(to_device_batched(TENSORS, "cuda"), TENSORS, strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found.cpu(), expected)
