"""Losses on a device against the CPU in fp64."""

from dataclasses import replace

import pytest
import torch

from nemo_opd.kernels.launch import compiling
from nemo_opd.losses import same_vocab
from tests.kernels.working import kernels_working
from tests.losses.cases import ALL_LOSSES, Case, one_tokenizer

MOVED = ("student", "teacher", "student_ids", "teacher_ids", "student_chunk_id", "teacher_chunk_id")

COMPILED = {"same_vocab", "p_kl", "gold", "h_kl", "strict", "byte_prefix", "shared_prefix", "alm"}


def loss_and_gradient(name: str, device: str, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute them with 300 columns."""
    (case,) = (case for case in ALL_LOSSES if case.name == name)
    batch = one_tokenizer(positions=40, width=300).to(dtype)
    on_device = replace(batch, **{field: getattr(batch, field).to(device) for field in MOVED})
    return case.value_and_gradient(on_device, divergence="jsd" if name == "same_vocab" else "forward_kl")


def check(case: Case, *, is_compiled: bool) -> None:
    """Compare fp32 on a GPU with fp64 on the CPU; errors are relative to the largest entry."""
    batch = case.batch(0, torch.float32)
    on_device = replace(batch, **{name: getattr(batch, name).to("cuda") for name in MOVED})
    with compiling(is_compiled):
        results = case.value_and_gradient(on_device)
    with compiling(False):
        expected = case.value_and_gradient(case.batch(0, torch.float64))
    for ours, reference in zip(results, expected, strict=True):
        assert ours.device.type == "cuda"
        assert float((ours.cpu().double() - reference).abs().max() / reference.abs().max()) < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("case", ALL_LOSSES, ids=str)
def test_a_loss_on_a_gpu_equals_the_cpu(case: Case) -> None:
    """Bugs: a constant on the host, an index in another order, a sum in a narrow dtype."""
    check(case, is_compiled=False)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in ALL_LOSSES if case.name in COMPILED], ids=str)
def test_a_compiled_loss_on_a_gpu_equals_the_cpu(case: Case) -> None:
    """Bug: a compiled function or a kernel with another value."""
    with kernels_working():
        check(case, is_compiled=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["same_vocab", "p_kl"])
def test_cuda_equals_cpu_and_itself(name):
    """Bug: sums by atomics, which differ from run to run."""
    first, second = (loss_and_gradient(name, "cuda") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    on_cpu = loss_and_gradient(name, "cpu")
    torch.testing.assert_close([tensor.cpu() for tensor in first], list(on_cpu), rtol=1e-11, atol=1e-15)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["same_vocab", "p_kl"])
def test_kernels_equal_pytorch_and_themselves(name):
    """Bug: a kernel with another value, or sums by atomics."""
    with kernels_working():
        first, second = (loss_and_gradient(name, "cuda", torch.float32) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    on_cpu = loss_and_gradient(name, "cpu")
    torch.testing.assert_close([tensor.cpu().double() for tensor in first], list(on_cpu), rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
def test_peak_memory_is_one_gradient_and_one_chunk():
    """Logits, teacher and gradient have 0.5 GB each. Bug: an fp32 softmax that is kept adds 2 GB."""
    student, teacher = (torch.randn(4, 1024, 2**16, device="cuda").bfloat16() for _ in range(2))
    student.requires_grad_()
    allocated = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = same_vocab(student, teacher, mask=torch.ones(4, 1024, device="cuda"), divergence="jsd").loss
    assert loss.isfinite()
    logits_bytes = student.numel() * student.element_size()
    assert torch.cuda.max_memory_allocated() - allocated <= logits_bytes + 2 * 256 * 2**20
