"""Kernels can be compiled for GPUs, which takes none; and what happens where they cannot."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from nemo_opd.kernels import launch
from nemo_opd.kernels.forms import JSD
from nemo_opd.losses import same_vocab

triton = pytest.importorskip("triton")

A100, H100 = 80, 90
"""Compute capabilities."""
INTEGERS = ("units_", "partner", "begins", "cells", "rows", "is_needed", "others", "teacher_begins", "teacher_others")
NUMBERS = ("stride", "columns", "num_", "total_stride", "teacher_stride")
FACTORS = ("over_", "weight_b", "weight_c", "coverage")


def _type_of(name: str, kernel: str) -> str:
    if name == "targets":
        return "*i64"
    if name.startswith(FACTORS) or name == "weight":
        return "fp32"
    if name.startswith(NUMBERS):
        return "i32"
    if name == "total":
        return "*bf16"
    is_ids = name.startswith(INTEGERS) and not (name == "rows" and kernel == "_row_sums")
    return "*i32" if is_ids else "*fp32"


@pytest.mark.world
@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("row_sums._row_sums", H100),
        ("log_ratios._short", H100),
        ("log_ratios._long", H100),
        ("rows.of_rows", H100),
        ("rows.of_rows", A100),
    ],
)
def test_a_kernel_is_compiled_for_a_gpu(name: str, capability: int) -> None:
    """Bugs: what Triton's interpreter takes and its compiler does not."""
    from importlib import import_module

    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, function = name.partition(".")
    kernel = getattr(import_module(f"nemo_opd.kernels.{module}"), function)
    every: dict[str, Any] = {"BLOCK": launch.BLOCK, "IS_FIRST": False}
    constants = {
        key: every.get(key, JSD if key.startswith("KIND") else True) for key in kernel.arg_names if key.isupper()
    }
    types = {key: "constexpr" if key in constants else _type_of(key, function) for key in kernel.arg_names}
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": launch.WARPS}
    made = triton.compile(ASTSource(kernel, types, constants), target=target, options=options)
    assert made.asm["cubin"]


def test_where_a_kernel_fails_pytorch_computes_and_says_so_once() -> None:
    def fails(name: str, num_bytes: int, run: object) -> None:
        raise launch.KernelError(f"{name}: no")

    student, teacher = torch.randn(2, 1, 4, 6).unbind()
    given = {"mask": torch.ones(1, 4)}
    expected = same_vocab(student.requires_grad_(), teacher, **given).loss
    with (
        patch.object(launch, "is_supported", lambda device: True),
        patch.object(launch, "launch", fails),
        patch.object(launch, "_has_failed", False),
        patch("nemo_opd.losses.fused.is_compiled", lambda device: False),
        launch.compiling(True),
    ):
        with pytest.warns(UserWarning, match=r"row_sums: no; train\.compile_losses=false"):
            assert torch.equal(same_vocab(student, teacher, **given).loss, expected)
        assert torch.equal(same_vocab(student, teacher, **given).loss, expected)


def test_nothing_is_launched_on_a_cpu_nor_for_fp64() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert not launch.are_used(cpu, torch.float32)
    assert launch.are_used(cuda, torch.float32)
    assert not launch.are_used(cuda, torch.float64)
    with launch.compiling(False):
        assert not launch.are_used(cuda, torch.float32)
