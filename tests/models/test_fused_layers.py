"""Fused layers: which parts of a model kernels replace, and the fallback if a kernel cannot run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from nemo_opd.config.model import Parallelism, Student
from nemo_opd.errors import ModelError
from nemo_opd.kernels import launch
from nemo_opd.models.fused_layers import fuse_layers, may_fuse, replace_parts
from nemo_opd.preflight.model_info import read_model_info
from tests.kernels import layers
from tests.kernels.interpreter import interpret
from tests.models import one_update
from tests.models.families import FAMILIES, model_of, save
from tests.models.one_update import cut, train
from tests.models.test_parallel import compared
from tests.models.world import on_ranks
from tests.tiny import Tiny

pytest.importorskip("triton")

CPU, CUDA = "cpu", "cuda"
LAYOUTS = {
    "llama, tied": Parallelism(),
    "qwen3, norms of heads": Parallelism(tp=2, sequence_parallel=True),
}
ALL_PARTS = {"rms_norm", "gradient of rms_norm", "swiglu", "gradient of swiglu", "rotary"}
FP32 = 2**-18
"""Tolerance relative to a tensor's largest entry: dozens of roundings, and gradients summed in another order."""


def replaced(model: nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules() if "forward" in vars(module)}


@pytest.fixture
def with_triton() -> Iterator[None]:
    with patch.object(launch, "is_supported", lambda device: True):
        yield


def test_parts_of_known_code_are_replaced_in_one_model_alone() -> None:
    """Bugs: Gemma's norms (which add 1 to the weight) or its GELU are replaced; a patch reaches other models."""
    classes = {}
    for family in FAMILIES:
        model = model_of(family)
        replace_parts(model)
        classes[family.split(",")[0]] = replaced(model)
    llama = {"RMSNorm", "Attention", "MLP"}
    assert classes == {
        "llama": {f"Llama{part}" for part in llama},
        "qwen2": {f"Qwen2{part}" for part in llama},
        "qwen3": {f"Qwen3{part}" for part in llama},
        "gemma2": {"Gemma2Attention"},
        "gemma3": {"Gemma3Attention"},
        "phi": {"PhiAttention"},
        "phi3": {f"Phi3{part}" for part in llama},
        "olmo2": {"Olmo2MLP"},
    }
    assert not replaced(model_of("llama, tied"))
    assert modeling_llama.apply_rotary_pos_emb.__module__ == modeling_llama.__name__


def test_pytorch_computes_what_kernels_do_not_take() -> None:
    """Bug: on a CPU or in fp64, a model with replaced parts gives other bits than without."""
    for family in ("llama, tied", "phi3, fused"):
        plain, model = model_of(family), model_of(family)
        replace_parts(model)
        ids = torch.tensor([[4, 5, 6]])
        assert torch.equal(model(ids).logits, plain(ids).logits)
        with patch.object(launch, "is_supported", lambda device: True):
            assert torch.equal(model.double()(ids).logits, plain.double()(ids).logits)


@pytest.mark.usefixtures("with_triton")
def test_a_kernel_that_cannot_be_compiled_leaves_layers_as_they_are() -> None:
    def fails(name: str, *arguments: Any, **options: Any) -> None:
        raise launch.KernelError(f"{name}: no compiler")

    model = model_of("llama, tied")
    with patch.object(launch, "launch", fails):
        with pytest.warns(UserWarning, match=r"^student: .*: no compiler; PyTorch computes its layers, more slowly"):
            fuse_layers(model, "auto", torch.bfloat16, CPU, key="student")
        with pytest.raises(ModelError, match=r"^student\.fused_layers=true: .*: no compiler"):
            fuse_layers(model, True, torch.bfloat16, CPU, key="student")
    assert not replaced(model)


@pytest.mark.usefixtures("with_triton")
@pytest.mark.parametrize(
    ("done", "reason"), [(None, "differs from PyTorch's"), (AttributeError("gone"), "fails: Attr")]
)
def test_kernels_that_are_wrong_are_not_used(done: Exception | None, reason: str) -> None:
    """Bugs: a kernel whose result is wrong on some GPU or Triton version is used; its other exceptions end the run."""
    model = model_of("llama, tied")
    with (
        patch.object(launch, "launch", Mock(side_effect=done)),
        pytest.warns(UserWarning, match=rf"^student: a .* by Triton's kernels {reason}"),
    ):
        fuse_layers(model, "auto", torch.bfloat16, CPU, key="student")
    assert not replaced(model)


def test_auto_is_for_gpus_in_16_bits() -> None:
    assert may_fuse("auto", torch.bfloat16, CUDA)
    assert not may_fuse("auto", torch.float32, CUDA)
    assert may_fuse(True, torch.float32, CUDA)
    assert not may_fuse(True, torch.float64, CUDA)
    assert not may_fuse("auto", torch.bfloat16, CPU)
    assert not may_fuse(False, torch.bfloat16, CUDA)


def test_what_cannot_be_is_refused_before_anything_is_loaded(tiny: Tiny) -> None:
    why = r"^student\.fused_layers=true: Triton needs a GPU, and the device is cpu; leave it out"
    with pytest.raises(ModelError, match=why):
        read_model_info(Student(model=str(tiny.student), fused_layers=True), "student", CPU)


@pytest.mark.usefixtures("with_triton")
def test_true_needs_a_family_that_is_known() -> None:
    with pytest.raises(ModelError, match=r"^teachers\.0\.fused_layers=true: no part of the layers of Sequential is"):
        fuse_layers(nn.Sequential(nn.Linear(2, 2)), True, torch.bfloat16, CPU, key="teachers.0")  # type: ignore[arg-type]


def errors_on_rank(folders: dict[str, Path]) -> dict[str, dict[str, float]]:
    """Return, for each family, the errors of layers with kernels (in Triton's interpreter) against the same without."""
    interpret()
    errors = {}
    for family, folder in folders.items():
        layout = LAYOUTS[family]
        results = []
        for is_fused in (True, False):
            again = layout.sequence_parallel
            options = {"dtype": torch.float32, "fused_layers": is_fused, "activation_checkpointing": again}
            mesh, model = cut(folder, layout, **options)  # type: ignore[arg-type]
            launched: list[str] = []
            # One microbatch for each rank: the interpreter is slow.
            with layers.noted(launched), patch.object(one_update, "IDS", one_update.IDS[:6]):
                results.append(train(model, mesh, layout)[0])
            assert set(launched) == (ALL_PARTS if is_fused else set()), (family, set(launched))
        errors[family] = compared(*results)
    return errors


@pytest.mark.world
def test_ranks_that_share_a_model_learn_the_same(tmp_path: Path) -> None:
    """Bugs in kernels under FSDP2's temporary weights, tensor parallelism, and activation checkpointing."""
    folders = {family: save(family, tmp_path) for family in LAYOUTS}
    for rank_errors in on_ranks(2, errors_on_rank, folders, tmp_path / "ranks"):
        for family, errors in rank_errors.items():
            assert not {name: error for name, error in errors.items() if not error < FP32}, family


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama, tied", "qwen3, norms of heads", "phi3, fused"])
def test_on_a_gpu(family: str) -> None:
    assert layers.compared_model(family, CUDA)["error"] < FP32
    for name in layers.cases():
        for dtype in (torch.float32, torch.bfloat16):
            errors = layers.compared(name, dtype, CUDA)
            assert errors["gradient"] <= errors["of PyTorch"] + torch.finfo(dtype).eps / 4 + FP32, (name, dtype)
            # Kernels and PyTorch each round the sigmoid and its product: half an eps four times.
            assert errors["forward"] <= 2 * torch.finfo(dtype).eps, (name, dtype)
