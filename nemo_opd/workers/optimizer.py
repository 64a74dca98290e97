"""The optimizer and its schedule, and gradients that are formed separately."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from inspect import Parameter, signature

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from nemo_opd.config import optim
from nemo_opd.config.optim import Scheduler
from nemo_opd.distributed.shards import gathered
from nemo_opd.errors import ConfigError
from nemo_opd.extras import require_library
from nemo_opd.models.decoder_layers import decoder_layers
from nemo_opd.types import Last
from nemo_opd.users_code import imported
from nemo_opd.workers.composed_optimizers import OnPlainTensors, Together

_Gradients = list[Tensor | None]
"""Gradient of each parameter, sharded like it."""


def build_optimizer(settings: optim.Optimizer, model: PreTrainedModel) -> Optimizer:
    """Build the optimizer of the trainable parameters. Raises ConfigError for one that does not fit them."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if isinstance(settings, optim.Muon):
        return _muon(settings, model, trainable)
    build = partial(_of_parameters, settings)
    if _takes_shards(settings) or not any(isinstance(parameter, DTensor) for parameter in trainable):
        return build(trainable)
    return OnPlainTensors(trainable, build)


def check_optimizer(settings: optim.Optimizer, num_ranks: int) -> None:
    """Raise ConfigError for an optimizer that is not installed, does not take its arguments, or cannot update
    parameters which are sharded over the student's ranks.
    """
    _of_parameters(settings, [nn.Parameter(torch.zeros(2, 2))])
    if num_ranks == 1 or _takes_shards(settings):
        return
    reason, way_out = "it updates whole parameters, not the shards of ranks", ""
    if isinstance(settings, optim.ClassOptimizer):
        reason = f"{settings.name} is not known to update shards of parameters"
        way_out = "; if it does, set student.optimizer.sharded=true"
    raise ConfigError(
        f"student.optimizer.type={settings.type} with a student on {num_ranks} ranks: {reason}; set "
        f"student.optimizer.type=adamw or muon, or give the student one rank{way_out}"
    )


def _takes_shards(settings: optim.Optimizer) -> bool:
    return settings.sharded if isinstance(settings, optim.ClassOptimizer) else settings.type in ("adamw", "muon")


def _of_parameters(settings: optim.Optimizer, parameters: list[nn.Parameter]) -> Optimizer:
    """Build an optimizer that treats all parameters alike; of Muon the one for what is no matrix of a layer."""
    if isinstance(settings, optim.ClassOptimizer):
        return _of_class(settings, parameters)
    decay = settings.weight_decay
    if isinstance(settings, optim.Adafactor):
        decay_of_means, clip = settings.beta2_decay, settings.clip
        return torch.optim.Adafactor(parameters, lr=settings.lr, beta2_decay=decay_of_means, d=clip, weight_decay=decay)
    betas, eps = settings.betas, settings.eps
    if isinstance(settings, optim.AdamW8bit):
        require_library("bitsandbytes", "student.optimizer.type=adamw_8bit")
        made: Callable[..., Optimizer] = import_module("bitsandbytes.optim").AdamW8bit
        return made(parameters, lr=settings.lr, betas=betas, eps=eps, weight_decay=decay)
    lr = (settings.others_lr or settings.lr) if isinstance(settings, optim.Muon) else settings.lr
    # One kernel for moments and weights. A model without values, of which only the names of its state are of interest,
    # has no such kernel.
    fused = not any(parameter.is_meta for parameter in parameters)
    return torch.optim.AdamW(parameters, lr=lr, betas=betas, eps=eps, weight_decay=decay, fused=fused)


def _muon(settings: optim.Muon, model: PreTrainedModel, trainable: list[nn.Parameter]) -> Together:
    """Build Muon for the matrices of the decoder layers, first, and AdamW for all else.

    Communicates in each step the products of each matrix, sharded by rows, with itself.
    """
    layers = decoder_layers(model)
    in_layers = {parameter for layer in layers for parameter in layer.parameters() if parameter.ndim == 2}
    matrices = [parameter for parameter in trainable if parameter in in_layers]
    others = [parameter for parameter in trainable if parameter not in in_layers]
    if not matrices:
        raise ConfigError(
            f"student.optimizer.type=muon: no decoder layers of {type(model).__name__} are known whose matrices it "
            "would train; set student.optimizer.type=adamw"
        )
    muon = torch.optim.Muon(
        matrices,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        ns_steps=settings.ns_steps,
        adjust_lr_fn=settings.adjust_lr,
    )
    return Together([muon, *([_of_parameters(settings, others)] if others else [])])


def _of_class(settings: optim.ClassOptimizer, parameters: list[nn.Parameter]) -> Optimizer:
    key = "student.optimizer.name"
    found = imported(settings.name, key=key, form="package.module:Class")
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ConfigError(f"{key}={settings.name}: no class of torch.optim.Optimizer; name one")
    closure = signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise ConfigError(
            f"{key}={settings.name}: its step computes the loss anew by a closure, and a run computes it once a step; "
            "name another class"
        )
    make: Callable[..., Optimizer] = found
    try:
        return make(parameters, lr=settings.lr, **settings.arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"student.optimizer.arguments={settings.arguments}: {settings.name} does not take them, with "
            f"lr={settings.lr:g} ({error}); correct them"
        ) from error


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
