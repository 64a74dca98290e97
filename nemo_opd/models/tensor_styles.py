"""Tensor-parallel styles that torch does not have: whole parameters, vocabulary shards, blocks between residuals."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, parallelize_module

_SEQUENCE = Shard(1)
"""Placement of hidden states [B, S, D] whose positions are shared."""
_HAS_ALL: ContextVar[bool] = ContextVar("whole_positions", default=False)


@contextmanager
def whole_positions() -> Iterator[None]:
    """Let each rank's forward passes have all positions inside, whose number may be any; without a backward pass."""
    before = _HAS_ALL.set(True)
    try:
        yield
    finally:
        _HAS_ALL.reset(before)


@dataclass(frozen=True, slots=True)
class Residual:
    """Placement of the hidden states [B, S, D] between the blocks of layers over a tensor-parallel group."""

    is_shared: bool
    """Whether each rank has a part of the positions, except within `whole_positions`."""

    @property
    def placement(self) -> Placement:
        """Placement in the current forward pass."""
        return _SEQUENCE if self.is_shared and not _HAS_ALL.get() else Replicate()


class Local(ParallelStyle):
    """Parameters that are placed in one way; the module computes with plain tensors, this rank's parts of them."""

    def __init__(self, placement: Placement, gradient: Placement) -> None:
        """gradient: placement of each rank's gradient: of its part, the same everywhere, or one of a sum."""
        self.placement, self.gradient = placement, gradient

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, _ in list(module.named_parameters(recurse=False)):
            _distribute(module, name, device_mesh, self.placement)
        forward = module.forward

        @wraps(forward)
        def with_local(*args: Any, **kwargs: Any) -> Any:
            with _local_parameters(module, self.gradient):
                return forward(*args, **kwargs)

        module.forward = with_local
        return module


class Experts(ParallelStyle):
    """Experts of which each rank has some whole, and computes their output for the tokens that are sent to them.

    Its output, and the gradients of its inputs, are to be summed over the ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        experts: Any = module
        begin, end = own_part(experts.num_experts, device_mesh)
        local = Local(Shard(0), Shard(0))._apply(module, device_mesh)
        # transformers leaves out tokens whose expert has this number.
        experts.num_experts, experts._is_expert_parallel = end - begin, True
        forward: Callable[..., Tensor] = local.forward

        def of_own(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            is_own = (index >= begin) & (index < end)
            return forward(hidden, torch.where(is_own, index - begin, end - begin), weights.masked_fill(~is_own, 0))

        module.forward = of_own
        return module


class Mixture(ParallelStyle):
    """Part of a layer with experts: each rank's output, of whole hidden states, is a part of the sum over ranks.

    Communicates an all-reduce forward, and one backward; where positions are shared, an all-gather and a
    reduce-scatter. All inside compute with plain tensors, whose gradients are parts of sums as well.
    """

    def __init__(self, residual: Residual) -> None:
        self.residual = residual

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            return _with_hidden(args, kwargs, lambda hidden: self._gathered(hidden, device_mesh))

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if isinstance(output, tuple):
                return leave(module, args, output[0]), *output[1:]
            return _moved(output, device_mesh, Partial(), self.residual.placement)

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)
        return module

    def _gathered(self, hidden: Tensor, mesh: DeviceMesh) -> Tensor:
        local = DTensor.from_local(hidden, mesh, [self.residual.placement], run_check=False)
        return local.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class VocabularyEmbedding(ParallelStyle):
    """Embedding whose rows are sharded, unevenly where needed; its output is whole on every rank.

    Communicates one all-reduce of [B, S, D] forward. torch's style does not move the padding index to the shard that
    has it, and skips what subclasses do to the output.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        embedding: Any = module
        begin, end = own_part(embedding.num_embeddings, device_mesh)
        _distribute(module, "weight", device_mesh, Shard(0))
        padding = embedding.padding_idx
        embedding.padding_idx = padding - begin if padding is not None and begin <= padding < end else None
        forward: Callable[[Tensor], Tensor] = module.forward

        def of_shard(ids: Tensor) -> Tensor:
            is_own = (ids >= begin) & (ids < end)
            with _local_parameters(module, Shard(0)):
                rows = forward(torch.where(is_own, ids - begin, 0))
            rows = torch.where(is_own.unsqueeze(-1), rows, 0)
            return _moved(rows, device_mesh, Partial(), Replicate())

        module.forward = of_shard
        return module


class VocabularyHead(ParallelStyle):
    """Head whose rows are sharded: from whole hidden states to each rank's own columns of logits.

    Communicates one all-reduce of [B, S, D] backward.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear: Any = module
        for name, _ in list(module.named_parameters(recurse=False)):
            _distribute(module, name, device_mesh, Shard(0))

        def of_shard(hidden: Tensor) -> Tensor:
            entered = DTensor.from_local(hidden, device_mesh, [Replicate()], run_check=False)
            with _local_parameters(module, Shard(0)):
                return F.linear(entered.to_local(grad_placements=[Partial()]), linear.weight, linear.bias)

        module.forward = of_shard
        return module


class RowParallel(ParallelStyle):
    """Linear layer with a part of the input features, at the end of a block: its outputs are summed over the ranks.

    torch's style must know beforehand which ranks get the sum.
    """

    def __init__(self, residual: Residual, *, input_layouts: Placement | None = None) -> None:
        self.residual, self.input_layouts = residual, input_layouts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        summed = RowwiseParallel(input_layouts=self.input_layouts, output_layouts=Partial(), use_local_output=False)
        parallelize_module(module, device_mesh, summed, src_data_rank=self.src_data_rank)
        module.register_forward_hook(self._leave)
        return module

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: DTensor) -> Tensor:
        return output.redistribute(placements=[self.residual.placement], async_op=True).to_local()


class Block(ParallelStyle):
    """Part of a layer whose input is gathered once for all of its linear layers.

    Gradients of the input are summed once as well: an all-reduce, or a reduce-scatter where positions are shared.
    """

    def __init__(self, residual: Residual) -> None:
        self.residual = residual

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(self._enter, device_mesh), with_kwargs=True)
        return module

    def _enter(
        self, mesh: DeviceMesh, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def entered(hidden: Tensor) -> DTensor:
            local = DTensor.from_local(hidden, mesh, [self.residual.placement], run_check=False)
            return local.redistribute(placements=[Replicate()])

        return _with_hidden(args, kwargs, entered)


def _with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a module's arguments with other hidden states."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def share_positions(first: nn.Module, last: nn.Module, mesh: DeviceMesh, residual: Residual) -> None:
    """Cut positions over the ranks before the first layer, and gather them after the last.

    Communicates an all-gather of [B, S, D] forward, and one backward. S must be a multiple of the group's size. Has no
    effect within `whole_positions`.
    """

    def take(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return _moved(args[0], mesh, Replicate(), residual.placement), *args[1:]

    def gather(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return _moved(output[0], mesh, residual.placement, Replicate()), *output[1:]
        return _moved(output, mesh, residual.placement, Replicate())

    first.register_forward_pre_hook(take)
    last.register_forward_hook(gather)


def _moved(local: Tensor, mesh: DeviceMesh, source: Placement, target: Placement) -> Tensor:
    """Redistribute a local tensor from one placement to another."""
    distributed = DTensor.from_local(local, mesh, [source], run_check=False)
    return distributed.redistribute(placements=[target]).to_local()


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Replace a parameter by this rank's part; every rank has it whole, or on meta, so nothing is sent."""
    parameter = module._parameters[name]
    assert parameter is not None
    if not isinstance(parameter, DTensor):
        part = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))


@contextmanager
def _local_parameters(module: nn.Module, gradient: Placement) -> Iterator[None]:
    """Make the module's own parameters plain tensors inside: this rank's parts, through which gradients flow."""
    held = dict(module._parameters)
    for name, parameter in held.items():
        if isinstance(parameter, DTensor):
            local: Any = parameter.to_local(grad_placements=[gradient])
            module._parameters[name] = local
    try:
        yield
    finally:
        module._parameters.update(held)


def own_part(size: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Return [begin, end) of this rank's shard of a dimension over a one-dimensional mesh; late ones may be empty."""
    num_own, begin = Shard.local_shard_size_and_offset(size, mesh.size(), mesh.get_local_rank())
    return begin, begin + num_own
