"""Tensors that are sent to a device in one buffer, and values computed on the host."""

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
    """Bugs: wrong offsets with odd sizes, empty tensors, scalars or views; a copy per tensor."""
    views = _send_as_one_buffer(TENSORS, torch.device("cpu"))

    for tensor, expected in zip(views, TENSORS, strict=True):
        assert tensor.dtype == expected.dtype
        assert tensor.is_contiguous()
        assert torch.equal(tensor, expected)
    assert len({tensor.untyped_storage().data_ptr() for tensor in views if tensor.numel()}) == 1
    assert not _send_as_one_buffer([], torch.device("cpu"))
    # Triton compiles kernels again for each pattern of arguments that are aligned to 16 bytes or not.
    assert all(tensor.storage_offset() * tensor.element_size() % 16 == 0 for tensor in views)


def test_on_a_cpu_nothing_is_copied() -> None:
    assert all(result is tensor for result, tensor in zip(to_device_batched(TENSORS, "cpu"), TENSORS, strict=True))
    assert on_host(TENSORS[0]) is TENSORS[0]


def test_only_tensors_that_were_sent_have_a_host_copy() -> None:
    (ids,) = to_device_batched([torch.arange(4)], "meta")
    assert torch.equal(on_host(ids), torch.arange(4))
    assert on_host(ids + 1) is None


def test_a_plan_of_known_values_is_made_on_the_host() -> None:
    """Bug: a plan reads values from the device although its inputs have host copies; meta tensors have none."""
    ids, mask = to_device_batched([torch.arange(4), torch.tensor([True, False, True, True])], "meta")
    (selected,) = compute_on_host(lambda ids, mask: [ids[mask.nonzero().squeeze(1)]], ids, mask)
    assert selected.device.type == "meta"
    assert on_host(selected).tolist() == [0, 2, 3]
    (shifted,) = compute_on_host(lambda selected: [selected + 1], selected)
    assert on_host(shifted).tolist() == [1, 3, 4]
    with pytest.raises(NotImplementedError):
        compute_on_host(lambda ids, mask: [ids[mask.nonzero().squeeze(1)]], ids + 1, mask)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_batch_has_the_same_values_on_the_device(device: str) -> None:
    ids = torch.arange(6).view(2, 3)
    tokens = TokenRows(ids, torch.tensor([3, 2]), ids > 1, ids.int())
    chunks = ChunkRows(ids.int(), ids.int() - 1)
    batch = Batch(tokens, (TeacherRows(tokens, chunks), TeacherRows(tokens, None, torch.tensor([0.5, 1.0]))))

    moved = to_device(batch, device)

    assert moved.student.ids.device.type == device
    assert moved.teachers[1].chunks is None
    assert moved.teachers[0].chunks.histories is None
    if device == "cpu":
        assert torch.equal(moved.teachers[0].chunks.teacher, chunks.teacher)
        assert torch.equal(moved.teachers[1].weights, batch.teachers[1].weights)
        assert torch.equal(moved.student.loss_mask, tokens.loss_mask)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_arrive_on_a_gpu() -> None:
    for tensor, expected in zip(to_device_batched(TENSORS, "cuda"), TENSORS, strict=True):
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor.cpu(), expected)
