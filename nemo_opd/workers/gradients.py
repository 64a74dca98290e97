"""Two gradients of one model, compared and added."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_opd.types import Last

Gradients = list[Tensor | None]
"""Of each parameter; sharded as it is."""


def take_gradients(model: nn.Module) -> Gradients:
    """The gradients, which the model then has no more."""
    taken = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return taken


def add_gradients(model: nn.Module, added: Gradients) -> None:
    for parameter, gradient in zip(model.parameters(), added, strict=True):
        if parameter.grad is None:
            parameter.grad = gradient
        elif gradient is not None:
            parameter.grad += gradient


def compared(kd: Gradients, ce: Gradients) -> dict[str, Last]:
    """Norms of the KD and the CE gradient over all parameters, and their cosine; 0 where one is 0.

    Communicates, over the parameters' mesh, one all-reduce for each figure.
    """
    pairs = [(ours, theirs) for ours, theirs in zip(kd, ce, strict=True) if ours is not None and theirs is not None]
    kd_norm = inner([(own, own) for own in kd if own is not None]).sqrt()
    ce_norm = inner([(own, own) for own in ce if own is not None]).sqrt()
    product = kd_norm * ce_norm
    cosine = torch.where(product > 0, inner(pairs) / product.clamp(min=torch.finfo(product.dtype).tiny), 0.0)
    return {"kd_grad_norm": Last(kd_norm), "ce_grad_norm": Last(ce_norm), "kd_ce_cosine": Last(cosine)}


def inner(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Σ of all products of entries, in fp32 or better, the same on every rank."""
    total = torch.stack([(left * right).sum() for left, right in pairs]).sum()
    return total.full_tensor() if isinstance(total, DTensor) else total
