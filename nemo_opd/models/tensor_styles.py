"""Tensor-parallel styles that torch lacks: replicated parameters, vocabulary shards, blocks between residuals."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, parallelize_module

_SEQUENCE = Shard(1)
"""Placement of hidden states [B, S, D] with sharded positions."""
_WHOLE_POSITIONS: ContextVar[bool] = ContextVar("whole_positions", default=False)


@contextmanager
def whole_positions() -> Iterator[None]:
    """Disable sequence parallelism inside: each rank has all positions, of any number. For forward passes only."""
    token = _WHOLE_POSITIONS.set(True)
    try:
        yield
    finally:
        _WHOLE_POSITIONS.reset(token)


@dataclass(frozen=True, slots=True)
class Residual:
    """Placement of hidden states [B, S, D] between blocks over a tensor-parallel group."""

    is_shared: bool
    """Whether positions are sharded over the ranks, except within `whole_positions`."""

    @property
    def placement(self) -> Placement:
        """Placement in the current forward pass."""
        return _SEQUENCE if self.is_shared and not _WHOLE_POSITIONS.get() else Replicate()


class Local(ParallelStyle):
    """Module whose parameters have one placement, and that computes with plain local tensors."""

    def __init__(self, placement: Placement, gradient: Placement) -> None:
        """gradient: placement of the gradient: sharded, the same on every rank, or a partial sum."""
        self.placement, self.gradient = placement, gradient

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):
                # Every rank has the full parameter, or it is on meta: nothing is sent.
                part = distribute_tensor(parameter.detach(), device_mesh, [self.placement], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        forward = module.forward

        @wraps(forward)
        def with_local(*args: Any, **kwargs: Any) -> Any:
            with _local_parameters(module, self.gradient):
                return forward(*args, **kwargs)

        module.forward = with_local
        return module


class Experts(ParallelStyle):
    """Experts distributed over the ranks; a rank computes its experts' output for the tokens that are sent to them.

    The caller must sum the output, and the gradients of the inputs, over the ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        experts: Any = module
        begin, end = local_range(experts.num_experts, device_mesh)
        local = Local(Shard(0), Shard(0))._apply(module, device_mesh)
        # transformers skips tokens whose expert index equals num_experts.
        experts.num_experts, experts._is_expert_parallel = end - begin, True
        forward: Callable[..., Tensor] = local.forward

        def local_experts(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            is_local = (index >= begin) & (index < end)
            return forward(hidden, torch.where(is_local, index - begin, end - begin), weights.masked_fill(~is_local, 0))

        module.forward = local_experts
        return module


class VocabularyEmbedding(ParallelStyle):
    """Embedding with sharded rows, unevenly if needed, and a replicated output.

    Communicates one all-reduce of [B, S, D] forward. torch's style does not move the padding index to the shard that
    has it, and skips the operations of subclasses on the output.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        embedding: Any = module
        begin, end = local_range(embedding.num_embeddings, device_mesh)
        padding = embedding.padding_idx
        embedding.padding_idx = padding - begin if padding is not None and begin <= padding < end else None
        local: Callable[[Tensor], Tensor] = Local(Shard(0), Shard(0))._apply(module, device_mesh).forward

        def embed(ids: Tensor) -> Tensor:
            is_local = (ids >= begin) & (ids < end)
            rows = torch.where(is_local.unsqueeze(-1), local(torch.where(is_local, ids - begin, 0)), 0)
            return _redistribute(rows, device_mesh, Partial(), Replicate())

        module.forward = embed
        return module


class VocabularyHead(ParallelStyle):
    """Head with sharded rows: from replicated hidden states to each rank's columns of the logits.

    Communicates one all-reduce of [B, S, D] backward.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        local: Callable[[Tensor], Tensor] = Local(Shard(0), Shard(0))._apply(module, device_mesh).forward

        def local_logits(hidden: Tensor) -> Tensor:
            replicated = DTensor.from_local(hidden, device_mesh, [Replicate()], run_check=False)
            return local(replicated.to_local(grad_placements=[Partial()]))

        module.forward = local_logits
        return module


class RowParallel(ParallelStyle):
    """Linear layer with sharded input features at the end of a block: its outputs are summed over the ranks.

    torch's style fixes the placement of the sum when it is applied; here it may change between forward passes.
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

    Gradients of the input are also summed once: an all-reduce, or a reduce-scatter with sharded positions.
    """

    def __init__(self, residual: Residual) -> None:
        self.residual = residual

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            if args:
                return (self._gathered(args[0], device_mesh), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": self._gathered(kwargs["hidden_states"], device_mesh)}

        module.register_forward_pre_hook(enter, with_kwargs=True)
        return module

    def _gathered(self, hidden: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return all positions of hidden states [B, S, D], as a DTensor for the linear layers' styles."""
        local = DTensor.from_local(hidden, mesh, [self.residual.placement], run_check=False)
        return local.redistribute(placements=[Replicate()])


class Mixture(Block):
    """Part of a layer with experts, which takes replicated hidden states and outputs a partial sum on each rank.

    Communicates an all-reduce forward and one backward; with sharded positions, an all-gather and a reduce-scatter
    instead. Modules inside compute with plain tensors, whose gradients are partial sums too.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if isinstance(output, tuple):
                return leave(module, args, output[0]), *output[1:]
            return _redistribute(output, device_mesh, Partial(), self.residual.placement)

        module.register_forward_hook(leave)
        return super()._apply(module, device_mesh)

    def _gathered(self, hidden: Tensor, mesh: DeviceMesh) -> Tensor:
        gathered: Any = super()._gathered(hidden, mesh)
        return gathered.to_local(grad_placements=[Partial()])


def share_positions(first: nn.Module, last: nn.Module, mesh: DeviceMesh, residual: Residual) -> None:
    """Shard positions over the ranks before the first layer, and gather them after the last.

    Communicates an all-gather of [B, S, D] forward and one backward. S must be a multiple of the group's size. Has no
    effect within `whole_positions`.
    """

    def take(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return _redistribute(args[0], mesh, Replicate(), residual.placement), *args[1:]

    def gather(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return _redistribute(output[0], mesh, residual.placement, Replicate()), *output[1:]
        return _redistribute(output, mesh, residual.placement, Replicate())

    first.register_forward_pre_hook(take)
    last.register_forward_hook(gather)


def _redistribute(local: Tensor, mesh: DeviceMesh, source: Placement, target: Placement) -> Tensor:
    """Convert a local tensor from one placement to another."""
    distributed = DTensor.from_local(local, mesh, [source], run_check=False)
    return distributed.redistribute(placements=[target]).to_local()


@contextmanager
def _local_parameters(module: nn.Module, gradient: Placement) -> Iterator[None]:
    """Replace the module's direct parameters inside by this rank's parts, plain tensors that pass gradients on."""
    parameters = dict(module._parameters)
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor):
            local: Any = parameter.to_local(grad_placements=[gradient])
            module._parameters[name] = local
    try:
        yield
    finally:
        module._parameters.update(parameters)


def local_range(size: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Return [begin, end) of this rank's shard of a dimension over a one-dimensional mesh; the last may be empty."""
    local_size, begin = Shard.local_shard_size_and_offset(size, mesh.size(), mesh.get_local_rank())
    return begin, begin + local_size
