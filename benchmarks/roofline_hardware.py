"""What GPUs and their links can do, and what is assumed of programs on them: every constant of the roofline."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """A GPU in a node of eight. Bytes and FLOPs a second, in one direction where it is a link."""

    name: str
    flops: float
    """Dense bf16 with fp32 sums."""
    memory: float
    """Bytes a second."""
    memory_bytes: float
    peer: float
    """Bytes a second that one GPU sends to the others of its node."""
    source: str


GPUS = (
    GPU(
        "H100 SXM",
        989.4e12,
        3.35e12,
        80e9,
        450e9,
        "NVIDIA H100 data sheet: 1,979 TFLOPS bf16 with sparsity, 80 GB at 3.35 TB/s, NVLink 900 GB/s both ways",
    ),
    GPU(
        "H200",
        989.4e12,
        4.8e12,
        141e9,
        450e9,
        "NVIDIA H200 data sheet: as H100 SXM, with 141 GB at 4.8 TB/s",
    ),
    GPU(
        "A100 80GB",
        312e12,
        2.039e12,
        80e9,
        300e9,
        "NVIDIA A100 data sheet (SXM): 312 TFLOPS bf16, 80 GB at 2,039 GB/s, NVLink 600 GB/s both ways",
    ),
)


@dataclass(frozen=True)
class Assumptions:
    """What programs reach of these, none of it measured here."""

    products: float = 0.70
    """Share of the FLOP/s that matrix products reach: an assumption, as reports on large bf16 products name 0.6 to 0.8
    (the clock falls under such a load; narrow matrices leave multiprocessors without work)."""
    attention: float = 0.35
    """Share that flash attention reaches: FlashAttention-2, which PyTorch has, on an H100 (FlashAttention-3, Shah et
    al. 2024, abstract; it reaches 0.75 itself). On an A100 it is more."""
    traffic: float = 0.85
    """Share of the memory's bytes a second that kernels reach which only read and write."""
    links: float = 0.75
    """Share of a link's bytes a second that NCCL reaches for messages of many megabytes."""
    shortest_kernel_s: float = 3e-6
    """From the start of one kernel to that of the next, however little it does."""
    launch_s: float = 8e-6
    """Host time for each kernel of an eager program: Python, dispatcher, autograd and the launch itself, about 4 µs."""
    compiled_call_s: float = 60e-6
    """Host time for each call of a compiled function, guards included."""
    triton_call_s: float = 25e-6
    """Host time for each of Triton's kernels: its launcher, which is Python and looks at every argument, and the
    function of autograd around it."""
    copy_s: float = 15e-6
    """Host time for a copy from pinned memory that nobody waits for: filling the buffer, and the launch."""
    wait_s: float = 30e-6
    """Time that the GPU has nothing to do each time that the host waits for it, until new kernels arrive."""
    collective_s: float = 20e-6
    """Latency of each collective within a node."""
