"""Kernels compile for GPUs (on a CPU), and PyTorch replaces a kernel that fails."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch

from nemo_opd.kernels import launch
from nemo_opd.kernels.forms import FORWARD_KL, JSD, TVD
from nemo_opd.logits.rows import TrainableRows
from nemo_opd.losses import same_vocab
from tests.kernels.working import kernels_working

triton = pytest.importorskip("triton")

A100, H100 = 80, 90
"""Compute capabilities."""
INTEGERS = ("units", "partner", "begins", "cells", "rows", "is_needed", "entries")
"""Suffixes of arguments' names by type, as are the next two."""
NUMBERS = ("stride", "columns", "end", "num_cells", "first", "last", "num_parts", "first_part")
FACTORS = ("over_temperature", "comparison_weight", "mapped_weight", "coverage")


def _type_of(name: str, kernel: str, logits: str) -> str:
    if name == "targets":
        return "*i64"
    if name.endswith(FACTORS) or name == "weight":
        return "fp32"
    if name.endswith(NUMBERS):
        return "i32"
    if name in ("total", "student") or name.endswith("teacher") or (name, kernel) == ("rows", "_row_sums"):
        return logits
    return "*i32" if name.endswith(INTEGERS) else "*fp32"


ALL: dict[str, int] = {"COMPARISON_KIND": JSD, "MAPPED_KIND": JSD, "IS_FIRST": False}
"""Constants of a kernel other than True, unless a variant changes them."""
DEFAULT = {"COMPARISON_KIND": FORWARD_KL, "MAPPED_KIND": FORWARD_KL, "IS_FIRST": True}
VARIANTS = {
    "row_sums, weighted": ("row_losses._row_sums", {}),
    "row_sums": ("row_losses._row_sums", {"HAS_WEIGHTS": False, "HAS_NEEDED": False}),
    "log_ratios, short": ("arithmetic._lists", dict(zip(("LISTS", "ENTRIES"), launch.SHORT_TILE, strict=True))),
    "log_ratios, long": ("arithmetic._lists", dict(zip(("LISTS", "ENTRIES"), launch.LONG_TILE, strict=True))),
    "forward KL": ("row_losses.rows_kernel", DEFAULT),
    "JSD, value": ("row_losses.rows_kernel", {"HAS_GRADIENT": False, "HAS_SURPRISE": False}),
    "JSD, gradient": ("row_losses.rows_kernel", {}),
    "TVD of pairs": (
        "row_losses.rows_kernel",
        {"MAPPED_KIND": TVD, "HAS_SURPRISE": False, "HAS_COMPARISON": False, "HAS_CELLS": False},
    ),
    "cross-entropy": (
        "row_losses.rows_kernel",
        DEFAULT | {"HAS_COMPARISON": False, "HAS_MAPPED": False, "HAS_CELLS": False},
    ),
}


LAYERS = {
    "layers._rms_norm_forward": {"ROWS": 2, "COLUMNS": 2048},
    "layers._rms_norm_backward": {"OF_WEIGHT": True, "ROWS": 1, "COLUMNS": 8192},
    "layers._swiglu_forward": {},
    "layers._swiglu_backward": {},
    "layers._rotate_both": {"BACK": True, "HEADS": 32, "COLUMNS": 64, "REST": 32},
}
"""Kernels of layers and their constants."""
_FP32_OF_LAYERS = ("inverse", "parts")
_NUMBERS_OF_LAYERS = ("num_", "half", "width")


@pytest.mark.world
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("capability", "numbers"), [(H100, "*bf16"), (A100, "*fp32")])
def test_a_kernel_of_layers_is_compiled_for_a_gpu(name: str, capability: int, numbers: str) -> None:
    """Bug: code that Triton's interpreter accepts and its compiler refuses."""

    def type_of(argument: str) -> str:
        if argument.startswith(_NUMBERS_OF_LAYERS) or argument.endswith("stride"):
            return "i32"
        return "fp32" if argument == "eps" else "*fp32" if argument in _FP32_OF_LAYERS else numbers

    _compile(name, {"BLOCK": launch.BLOCK} | LAYERS[name], type_of, capability)


@pytest.mark.world
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("capability", "logits"), [(H100, "*bf16"), (A100, "*fp32")])
def test_a_kernel_is_compiled_for_a_gpu(variant: str, capability: int, logits: str) -> None:
    """Bug: code that Triton's interpreter accepts and its compiler refuses."""
    name, constants = VARIANTS[variant]
    _compile(
        name,
        {"BLOCK": launch.ROWS_BLOCK if name == "row_losses.rows_kernel" else launch.BLOCK} | ALL | constants,
        lambda key: _type_of(key, name.split(".")[1], logits),
        capability,
    )


@pytest.mark.world
def test_aligned_rows_of_an_odd_number_of_columns_are_read_several_numbers_at_a_time() -> None:
    """Bug: a mask that ends at 151,669 columns makes the compiler load numbers one by one, even from aligned rows."""
    rows = torch.empty(3, 128)[:, :101]
    assert (launch.readable(101, rows), launch.readable(101, rows.contiguous())) == (112, 101)
    multiples = ("rows", "stride", "end")
    ptx = _compile(
        "row_losses._row_sums",
        {"BLOCK": launch.BLOCK},
        lambda key: _type_of(key, "_row_sums", "*fp32"),
        H100,
        multiples,
    )
    assert "ld.global.v4" in ptx


def _compile(
    name: str,
    constants: dict[str, Any],
    type_of: Callable[[str], str],
    capability: int,
    multiples: Sequence[str] = (),
) -> str:
    """Return the PTX.

    constants: keyed by name; a constant of the kernel without an entry is True. multiples: names of arguments that are
    multiples of 16.
    """
    from importlib import import_module

    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, function = name.partition(".")
    kernel = getattr(import_module(f"nemo_opd.kernels.{module}"), function)
    all_constants = {key: constants.get(key, True) for key in kernel.arg_names if key.isupper()}
    types = {key: "constexpr" if key in all_constants else type_of(key) for key in kernel.arg_names}
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": launch.WARPS}
    attributes = {(kernel.arg_names.index(key),): [["tt.divisibility", 16]] for key in multiples}
    compiled = triton.compile(ASTSource(kernel, types, all_constants, attributes), target=target, options=options)
    assert compiled.asm["cubin"]
    ptx: str = compiled.asm["ptx"]
    return ptx


def test_where_a_kernel_fails_pytorch_computes_and_says_so_once() -> None:
    def fails(name: str, num_bytes: int, run: object) -> None:
        raise launch.KernelError(f"{name}: no")

    student, teacher = torch.randn(2, 1, 4, 6).unbind()
    options = {"mask": torch.ones(1, 4)}
    expected = same_vocab(student.requires_grad_(), teacher, **options).loss
    with (
        patch.object(launch, "is_supported", lambda device: True),
        patch.object(launch, "launch", fails),
        patch.object(launch, "_has_failed", False),
        patch("nemo_opd.losses.fused.is_compiled", lambda device: False),
        launch.compiling(True),
    ):
        with pytest.warns(UserWarning, match=r"row_sums: no; PyTorch's are used"):
            assert torch.equal(same_vocab(student, teacher, **options).loss, expected)
        assert torch.equal(same_vocab(student, teacher, **options).loss, expected)


def test_where_others_wait_for_this_rank_a_kernel_that_fails_ends_the_run() -> None:
    """Bug: only this rank starts over with PyTorch, and exchanges other blocks than the other ranks expect."""

    def fails(name: str, *arguments: Any, **options: Any) -> None:
        raise launch.KernelError(f"{name}: no")

    student, teacher = torch.randn(2, 1, 4, 6).unbind()
    with (
        patch.object(launch, "is_supported", lambda device: True),
        patch.object(launch, "launch", fails),
        patch.object(launch, "_has_failed", False),
        patch("nemo_opd.losses.fused.is_compiled", lambda device: False),
        patch.object(TrainableRows, "share", (0, 2)),
        launch.compiling(True),
        pytest.raises(launch.KernelError, match="row_sums: no"),
    ):
        same_vocab(student.requires_grad_(), teacher, mask=torch.ones(1, 4))


def test_nothing_is_launched_on_a_cpu_nor_for_fp64() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert not launch.are_used(cpu, torch.float32)
    assert launch.are_used(cuda, torch.float32)
    assert not launch.are_used(cuda, torch.float64)
    with launch.compiling(False):
        assert not launch.are_used(cuda, torch.float32)


def test_an_error_of_cuda_is_no_reason_to_compute_otherwise() -> None:
    """Bug: an illegal memory access becomes `could not be used`, and PyTorch is tried on a GPU that has failed."""

    def fails() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match=r"^CUDA error"):
        launch.launch("row_sums", 0, fails)


def test_a_kernel_that_fails_is_not_taken_for_one_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the warning filters match nothing, so tests on a GPU pass although every kernel fails."""

    def fails() -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(launch, "_has_failed", False)
    with pytest.raises(launch.KernelError) as failed:
        launch.launch("row_sums", 0, fails)
    with pytest.raises(UserWarning, match="row_sums could not be used"), kernels_working():
        launch.give_up(failed.value)
    with pytest.raises(AssertionError, match="a kernel failed before"), kernels_working():
        pass
