"""The student's optimizer and schedule, and the comparison of KD and CE gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from inspect import Parameter, signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from nemo_opd.config import train
from nemo_opd.config.train import Scheduler
from nemo_opd.distributed.collectives import gathered, local
from nemo_opd.errors import ConfigError
from nemo_opd.extras import require_library
from nemo_opd.models.tensor_plan import decoder_layers
from nemo_opd.types import Last
from nemo_opd.users_code import imported

_Gradients = list[Tensor | None]
"""Gradients in parameter order, sharded like the parameters."""


def build_optimizer(settings: train.Optimizer, model: PreTrainedModel) -> Optimizer:
    """Build the optimizer of the trainable parameters. Raises ConfigError if it cannot train them."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if isinstance(settings, train.Muon):
        return _muon(settings, model, trainable)
    build = partial(_single_optimizer, settings)
    if _takes_shards(settings) or not any(isinstance(parameter, DTensor) for parameter in trainable):
        return build(trainable)
    return _PlainTensorOptimizer(trainable, build)


def check_optimizer(settings: train.Optimizer, num_ranks: int) -> None:
    """Raise ConfigError for an optimizer that is not installed, rejects its arguments, or cannot update parameters
    sharded over the student's ranks.
    """
    _single_optimizer(settings, [nn.Parameter(torch.zeros(2, 2))])
    if num_ranks == 1 or _takes_shards(settings):
        return
    reason, way_out = "it updates whole parameters, not each rank's shards", ""
    if isinstance(settings, train.ClassOptimizer):
        reason = f"{settings.name} may not be able to update parameter shards"
        way_out = "; if it is, set student.optimizer.sharded=true"
    raise ConfigError(
        f"student.optimizer.type={settings.type} with a student on {num_ranks} ranks: {reason}; set "
        f"student.optimizer.type=adamw or muon, or give the student one rank{way_out}"
    )


def _takes_shards(settings: train.Optimizer) -> bool:
    return settings.sharded if isinstance(settings, train.ClassOptimizer) else settings.type in ("adamw", "muon")


def _single_optimizer(settings: train.Optimizer, parameters: list[nn.Parameter]) -> Optimizer:
    """Build an optimizer that treats all parameters alike; for Muon, its AdamW."""
    if isinstance(settings, train.ClassOptimizer):
        return _class_optimizer(settings, parameters)
    decay = settings.weight_decay
    if isinstance(settings, train.Adafactor):
        beta2_decay, clip = settings.beta2_decay, settings.clip
        return torch.optim.Adafactor(parameters, lr=settings.lr, beta2_decay=beta2_decay, d=clip, weight_decay=decay)
    betas, eps = settings.betas, settings.eps
    if isinstance(settings, train.AdamW8bit):
        require_library("bitsandbytes", "student.optimizer.type=adamw_8bit")
        adamw_8bit: Callable[..., Optimizer] = import_module("bitsandbytes.optim").AdamW8bit
        return adamw_8bit(parameters, lr=settings.lr, betas=betas, eps=eps, weight_decay=decay)
    lr = (settings.others_lr or settings.lr) if isinstance(settings, train.Muon) else settings.lr
    # Meta tensors, used to list the names of the state, have no fused kernel.
    fused = not any(parameter.is_meta for parameter in parameters)
    return torch.optim.AdamW(parameters, lr=lr, betas=betas, eps=eps, weight_decay=decay, fused=fused)


def _muon(settings: train.Muon, model: PreTrainedModel, trainable: list[nn.Parameter]) -> _ChainedOptimizer:
    """Build Muon for the matrices of the decoder layers, followed by AdamW for the remaining parameters.

    Communicates in each step the product of each row-sharded matrix with its transpose.
    """
    layers = decoder_layers(model)
    in_layers = {parameter for layer in layers for parameter in layer.parameters() if parameter.ndim == 2}
    matrices = [parameter for parameter in trainable if parameter in in_layers]
    remaining = [parameter for parameter in trainable if parameter not in in_layers]
    if not matrices:
        raise ConfigError(
            f"student.optimizer.type=muon: found no trainable matrices in the decoder layers of "
            f"{type(model).__name__}; set student.optimizer.type=adamw"
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
    return _ChainedOptimizer([muon, *([_single_optimizer(settings, remaining)] if remaining else [])])


def _class_optimizer(settings: train.ClassOptimizer, parameters: list[nn.Parameter]) -> Optimizer:
    key = "student.optimizer.name"
    user_class = imported(settings.name, key=key, form="package.module:Class")
    if not (isinstance(user_class, type) and issubclass(user_class, Optimizer)):
        raise ConfigError(f"{key}={settings.name}: not a subclass of torch.optim.Optimizer; name one")
    closure = signature(user_class.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise ConfigError(
            f"{key}={settings.name}: its step needs a closure that recomputes the loss, but a run computes the loss "
            "once per step; name another class"
        )
    build: Callable[..., Optimizer] = user_class
    try:
        return build(parameters, lr=settings.lr, **settings.arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"student.optimizer.arguments={settings.arguments}: {settings.name} rejects them with lr={settings.lr:g} "
            f"({error}); correct them"
        ) from error


class _ChainedOptimizer(Optimizer):
    """Several optimizers as one, with their groups in order and a joint state."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        # The groups are shared dicts, so that a scheduler of this optimizer also schedules the wrapped ones.
        super().__init__(chain.from_iterable(optimizer.param_groups for optimizer in optimizers), {})
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for optimizer in self._optimizers:
            optimizer.state = self.state
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for optimizer in self._optimizers:
            optimizer.step()


class _PlainTensorOptimizer(Optimizer):
    """A wrapper for a student on one rank that hides FSDP2's DTensors: the wrapped optimizer gets plain tensors."""

    def __init__(self, parameters: Sequence[nn.Parameter], build: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        self._parameters = parameters
        self._plain = [nn.Parameter(local(parameter.detach())) for parameter in parameters]
        self._optimizer = build(self._plain)
        super().__init__(parameters, self._optimizer.defaults)
        self.state = self._optimizer.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter, plain in zip(self._parameters, self._plain, strict=True):
            plain.data = local(parameter.detach())  # every step: the model may have changed device
            plain.grad = None if parameter.grad is None else local(parameter.grad)
        self._optimizer.param_groups[0] |= _options(self)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        self._optimizer.param_groups[0] |= _options(self)
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)
        self.state = self._optimizer.state
        self.param_groups[0] |= _options(self._optimizer)


def _options(optimizer: Optimizer) -> dict[str, Any]:
    """Return the options of the single parameter group."""
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


def build_scheduler(
    settings: Scheduler, optimizer: torch.optim.Optimizer, total_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Build the learning rate schedule with its warmup."""
    # Imported here because this makes transformers import every training library it supports.
    from transformers import get_scheduler

    warmup, kind = settings.warmup_steps, settings.type
    if kind == "cosine":
        specific = {"min_lr_rate": settings.min_lr_ratio}
        return get_scheduler("cosine_with_min_lr", optimizer, warmup, total_steps, scheduler_specific_kwargs=specific)
    return get_scheduler("constant_with_warmup" if kind == "constant" else kind, optimizer, warmup, total_steps)


def take_gradients(model: nn.Module) -> _Gradients:
    """Remove the gradients from the model and return them."""
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return gradients


def add_gradients(model: nn.Module, gradients: _Gradients) -> None:
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = gradient
        elif gradient is not None:
            parameter.grad += gradient


def gradient_metrics(kd: _Gradients, ce: _Gradients) -> dict[str, Last]:
    """Return the norms of the KD and CE gradients over all parameters, and their cosine, 0 if a norm is 0.

    Communicates one all-reduce per metric over the parameters' mesh.
    """
    pairs = [(of_kd, of_ce) for of_kd, of_ce in zip(kd, ce, strict=True) if of_kd is not None and of_ce is not None]
    kd_norm = _inner_product([(gradient, gradient) for gradient in kd if gradient is not None]).sqrt()
    ce_norm = _inner_product([(gradient, gradient) for gradient in ce if gradient is not None]).sqrt()
    product = kd_norm * ce_norm
    floor = torch.finfo(product.dtype).tiny
    cosine = torch.where(product > 0, _inner_product(pairs) / product.clamp(min=floor), 0.0)
    return {"kd_grad_norm": Last(kd_norm), "ce_grad_norm": Last(ce_norm), "kd_ce_cosine": Last(cosine)}


def _inner_product(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Sum the elementwise products of all pairs, in at least fp32; the result is the same on every rank."""
    total = torch.stack([(first * second).sum() for first, second in pairs]).sum()
    return gathered(total)
