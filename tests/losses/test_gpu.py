import numpy as np
import pytest
import torch

from nemo_opd.losses import p_kl, same_vocab

from . import oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

B, S, V = 2, 40, 300
MATRIX = oracle.Matrix.random(V, V, 4, seed=0)
CHUNKS = oracle.random_chunk_ids(np.random.default_rng(0), B, S, S)
IDS = torch.zeros(B, S, dtype=torch.long)


def loss_and_gradient(name: str, device: str, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (3 * torch.randn(B, S, V, generator=generator, dtype=torch.float64) for _ in range(2))
    student, teacher = student.to(device, dtype).requires_grad_(), teacher.to(device, dtype)
    if name == "same_vocab":
        loss = same_vocab(student, teacher, mask=torch.ones(B, S, device=device), divergence="jsd").loss
    else:
        loss = p_kl(
            student,
            teacher,
            projection=MATRIX,
            student_ids=IDS.to(device),
            teacher_ids=IDS.to(device),
            student_chunk_id=CHUNKS[0].to(device),
            teacher_chunk_id=CHUNKS[1].to(device),
        ).loss
    return loss.detach(), torch.autograd.grad(loss, student)[0]


@pytest.mark.parametrize("name", ["same_vocab", "p_kl"])
def test_cuda_equals_cpu_and_itself(name):
    """Sums by atomics would differ from run to run."""
    first, second = (loss_and_gradient(name, "cuda") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    on_cpu = loss_and_gradient(name, "cpu")
    torch.testing.assert_close([tensor.cpu() for tensor in first], list(on_cpu), rtol=1e-11, atol=1e-15)


@pytest.mark.filterwarnings("error:a Triton kernel")
@pytest.mark.parametrize("name", ["same_vocab", "p_kl"])
def test_kernels_equal_pytorch_and_themselves(name):
    first, second = (loss_and_gradient(name, "cuda", torch.float32) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    on_cpu = loss_and_gradient(name, "cpu")
    torch.testing.assert_close([tensor.cpu().double() for tensor in first], list(on_cpu), rtol=1e-5, atol=1e-7)


def test_peak_memory_is_one_gradient_and_one_chunk():
    """Logits, teacher and gradient of 0.5 GB each would be joined by 2 GB for every fp32 softmax that is kept."""
    student, teacher = (torch.randn(4, 1024, 2**16, device="cuda").bfloat16() for _ in range(2))
    student.requires_grad_()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = same_vocab(student, teacher, mask=torch.ones(4, 1024, device="cuda"), divergence="jsd").loss
    assert loss.isfinite()
    logits_bytes = student.numel() * student.element_size()
    assert torch.cuda.max_memory_allocated() - before <= logits_bytes + 2 * 256 * 2**20
