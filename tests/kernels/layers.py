"""Comparison of layers' elementwise kernels with PyTorch, on a device with Triton or in its interpreter."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama as llama
from transformers.models.phi3 import modeling_phi3 as phi3

from nemo_opd.config.model import Lora
from nemo_opd.kernels import launch
from nemo_opd.models.fused_layers import RMSNorm, Rotary, SwiGLU, replace_parts
from nemo_opd.models.lora import Adapters
from tests.models.families import VOCABULARY, model_of

Function = Callable[..., Tensor | tuple[Tensor, ...]]


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32 if x.dtype != torch.float64 else torch.float64)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return nn.functional.silu(gate) * up


def cases(seed: int = 0) -> dict[str, tuple[Function, Function, list[Tensor], int]]:
    """Return, for each case, our function, PyTorch's, fp64 arguments, and the number of arguments with a gradient."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def heads(*shape: int) -> Tensor:
        """Return heads as projections lay them out: positions before heads in memory, here with a gap between."""
        batch, number, positions, width = shape
        return random(batch, positions, number + 1, width)[:, :, :number].transpose(1, 2)

    angles = random(2, 5, 6).repeat(1, 1, 2)
    table = [angles.cos(), angles.sin()]
    return {
        "rms_norm": (lambda x, w: RMSNorm.apply(x, w, 1e-5), _norm, [random(3, 5, 70), random(70)], 2),
        "rms_norm, no weight's gradient": (
            lambda x, w: RMSNorm.apply(x, w, 1e-5),
            _norm,
            [random(37, 9).t().contiguous().t(), random(9)],
            1,
        ),
        "swiglu": (SwiGLU.apply, _gated, [random(2, 3, 75), random(2, 3, 75)], 2),
        "swiglu of one tensor": (SwiGLU.apply, lambda both: _gated(*both.chunk(2, -1)), [random(2, 3, 150)], 1),
        "rotary": (Rotary.apply, llama.apply_rotary_pos_emb, [heads(2, 4, 5, 12), heads(2, 3, 5, 12), *table], 2),
        "rotary, one table": (
            Rotary.apply,
            llama.apply_rotary_pos_emb,
            [heads(2, 2, 5, 12), heads(2, 1, 5, 12), *(angles[:1] for angles in table)],
            2,
        ),
        "rotary of a part": (
            Rotary.apply,
            phi3.apply_rotary_pos_emb,
            [heads(2, 4, 5, 17), heads(2, 2, 5, 17), *table],
            2,
        ),
    }


def compared(name: str, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Return the largest differences, as shares of the largest number.

    `forward`: from PyTorch in the same dtype. `gradient`, and PyTorch's own (`of PyTorch`): from fp64 with the same
    rounded arguments.
    """
    fused, plain, arguments, num_leaves = cases()[name]
    rounded = [argument.to(dtype) for argument in arguments]
    actual = _run(fused, [argument.to(device) for argument in rounded], num_leaves)
    same_dtype = _run(plain, rounded, num_leaves)
    exact = _run(plain, [argument.double() for argument in rounded], num_leaves)
    return {
        "forward": _difference(actual[0], same_dtype[0]),
        "gradient": _difference(actual[1], exact[1]),
        "of PyTorch": _difference(same_dtype[1], exact[1]),
    }


def _run(function: Function, arguments: Sequence[Tensor], num_leaves: int) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [argument.detach().requires_grad_() for argument in arguments[:num_leaves]]
    output = function(*leaves, *arguments[num_leaves:])
    results = [output] if isinstance(output, Tensor) else list(output)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(result.shape, generator=generator, dtype=torch.float64) for result in results]
    pairs = [(result * factor.to(result)).sum() for result, factor in zip(results, gradients, strict=True)]
    leaf_gradients = torch.autograd.grad(torch.stack(pairs).sum(), leaves)
    return [result.detach().cpu().double() for result in results], [grad.cpu().double() for grad in leaf_gradients]


def _difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(actual, expected, strict=True))


@contextmanager
def noted(launched: list[str]) -> Iterator[None]:
    """Record the names of launched kernels."""
    run = launch.launch

    def note(name: str, *arguments: Any, **options: Any) -> None:
        launched.append(name)
        run(name, *arguments, **options)

    with patch.object(launch, "launch", note):
        yield


def compared_model(family: str, device: str, *, adapters: bool = False) -> dict[str, Any]:
    """Compare logits and all gradients of a model in fp32 with and without kernels, on two packed sequences."""
    ids = torch.randint(VOCABULARY, (1, 7), generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]], device=device)
    launched: list[str] = []
    results = []
    for is_fused in (False, True):
        model = model_of(family).to(device).train()  # type: ignore[arg-type]
        if adapters:
            model.requires_grad_(False)
            Adapters(Lora(rank=2), "tiny", seed=0).attach(model)
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:  # B begins at 0; A · B is as large as the weights, or roundings grow
                    nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
        with noted(launched):
            if is_fused:
                replace_parts(model)
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            results.append([logits.detach(), *torch.autograd.grad(logits.square().sum(), trained)])
    return {"error": _difference(results[1], results[0]), "kernels": sorted(set(launched))}
