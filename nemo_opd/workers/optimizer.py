"""The optimizer and its schedule, and gradients that are formed separately."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nemo_opd.config.optim import AdamW, Scheduler
from nemo_opd.distributed.shards import gathered
from nemo_opd.types import Last

_Gradients = list[Tensor | None]
"""Gradient of each parameter, sharded like it."""


def build_optimizer(settings: AdamW, model: nn.Module) -> torch.optim.AdamW:
    """Build AdamW over the trainable parameters, with one kernel for moments and weights."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        trainable,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        # A model without values, of which only the names of its state are of interest, has no such kernel.
        fused=not any(parameter.is_meta for parameter in trainable),
    )


def build_scheduler(
    settings: Scheduler, optimizer: torch.optim.Optimizer, total_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Build the schedule with its warmup."""
    # Imported here: with it transformers imports every library that it can train with.
    from transformers import get_scheduler

    warmup, kind = settings.warmup_steps, settings.type
    if kind == "cosine":
        specific = {"min_lr_rate": settings.min_lr_ratio}
        return get_scheduler("cosine_with_min_lr", optimizer, warmup, total_steps, scheduler_specific_kwargs=specific)
    return get_scheduler("constant_with_warmup" if kind == "constant" else kind, optimizer, warmup, total_steps)


def take_gradients(model: nn.Module) -> _Gradients:
    """Remove the gradients from the model and return them."""
    taken = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return taken


def add_gradients(model: nn.Module, added: _Gradients) -> None:
    for parameter, gradient in zip(model.parameters(), added, strict=True):
        if parameter.grad is None:
            parameter.grad = gradient
        elif gradient is not None:
            parameter.grad += gradient


def gradient_metrics(kd: _Gradients, ce: _Gradients) -> dict[str, Last]:
    """Return the norms of the KD and the CE gradient over all parameters, and their cosine; 0 where one is 0.

    Communicates one all-reduce for each metric over the parameters' mesh.
    """
    pairs = [(ours, theirs) for ours, theirs in zip(kd, ce, strict=True) if ours is not None and theirs is not None]
    kd_norm = _inner_product([(own, own) for own in kd if own is not None]).sqrt()
    ce_norm = _inner_product([(own, own) for own in ce if own is not None]).sqrt()
    product = kd_norm * ce_norm
    floor = torch.finfo(product.dtype).tiny
    cosine = torch.where(product > 0, _inner_product(pairs) / product.clamp(min=floor), 0.0)
    return {"kd_grad_norm": Last(kd_norm), "ce_grad_norm": Last(ce_norm), "kd_ce_cosine": Last(cosine)}


def _inner_product(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the sum of all products of entries, in fp32 or better, the same on every rank."""
    total = torch.stack([(left * right).sum() for left, right in pairs]).sum()
    return gathered(total)
