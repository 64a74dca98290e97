"""A pretended GPU that counts the kernels, bytes, copies and host waits that a real GPU would see.

Its tensors have the device `pretend:0` and keep their values in host memory, or only their shapes: that costs no memory
and no time, and suits programs that never read a value back. Operations that mix both devices raise an error, as with
CUDA. Streams, speed and the limits of CUDA's kernels are not modelled.

Use it in a separate process: PyTorch can register one custom device, and not unregister it.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from nemo_opd.kernels import launch
from nemo_opd.losses.fused import Fused
from tests.pretend_kernels import Fusing, Kernel, flops_of, kernel_of, size

NAME = "pretend"
WAITS = {
    *("_local_scalar_dense", "bincount", "equal", "masked_select", "nonzero"),
    *("_unique2", "unique_consecutive", "unique_dim"),
}
"""Operations that make the host wait for their result or its size."""
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
COLLECTIVES = {"c10d", "_c10d_functional"}


@dataclass
class Work:
    """Work of the pretended GPU."""

    kernels: list[Kernel] = field(default_factory=list)
    waits: Counter[str] = field(default_factory=Counter)
    """How often the host waits for a value, keyed by operation and source line."""
    copies: Counter[str] = field(default_factory=Counter)
    """Copies from the host, keyed by source line."""

    @property
    def num_bytes(self) -> int:
        return sum(kernel.num_bytes for kernel in self.kernels)

    def taken(self) -> dict[str, Any]:
        """Return the counts as plain values and reset them."""
        counts = {
            "kernels": len(self.kernels),
            "bytes": self.num_bytes,
            "waits": dict(self.waits),
            "copies": dict(self.copies),
        }
        self.clear()
        return counts

    def clear(self) -> None:
        for record in (self.kernels, self.waits, self.copies):
            record.clear()


@contextmanager
def counted(*, has_values: bool = True) -> Iterator[Work]:
    """Provide the device and yield its work.

    has_values: False for tensors with shapes only; the host then reads ones, and Triton's kernels count the bytes that
    they report. With values, Triton's kernels are not used.
    """
    mode = _Mode(torch.device("cpu" if has_values else "meta"))
    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device=…) is a copy from the host
    try:
        with (
            mode,
            patch.object(Fused, "as_compiled", lambda *arguments, **keywords: mode.fused(*arguments, **keywords)),
            patch.object(launch, "is_supported", lambda device: device == NAME and not has_values),
            patch.object(launch, "launch", mode.launched),
        ):
            yield mode.work
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)


class _Stream:
    device_index = 0

    def __init__(self, *_: object, **__: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def wait_stream(self, _: object) -> None: ...
    def wait_event(self, _: object) -> None: ...
    def record_event(self, *_: object) -> _Event:
        return _Event()

    def synchronize(self) -> None: ...


class _Event:
    def __init__(self, *_: object, **__: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def wait(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...


class _Backend:
    """Module `torch.pretend`."""

    Stream, Event = _Stream, _Event

    def is_initialized(self) -> bool:
        return True

    is_available = is_initialized

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def current_stream(self, *_: object) -> _Stream:
        return _Stream()

    def stream(self, _: object) -> _Stream:
        return _Stream()

    def set_device(self, _: object) -> None: ...
    def synchronize(self, *_: object) -> None: ...
    def manual_seed_all(self, _: int) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
DEVICE = torch.device(NAME, 0)


class OnDevice(Tensor):
    """A tensor of the device; `held` has its values, on the host."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        tensor: OnDevice = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        tensor.held = held
        return tensor

    def __init__(self, held: Tensor) -> None: ...

    def tolist(self) -> Any:
        return self.to("cpu").tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{function} outside `counted`")


class _Mode(TorchDispatchMode):
    def __init__(self, holder: torch.device) -> None:
        """holder: device of the tensors that are held."""
        super().__init__()
        self.work = Work()
        self._holder = holder
        self._fusing: Fusing | None = None

    def fused(self, function: Fused[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that would be compiled, and count one kernel."""
        self._fusing = fusing = Fusing()
        try:
            result = function.function(*args, **kwargs)
        finally:
            self._fusing = None
        computed = fusing.inner.keys() | fusing.gathered.keys()
        written = sum(size(tensor) for tensor in tree_iter(result) if id(tensor) in computed)
        self.work.kernels.append(Kernel(f"compiled {function.function.__name__}", fusing.num_bytes + written, 0))
        return result

    def launched(self, name: str, num_bytes: int, run: object, *, without: str = "") -> None:
        """Count a kernel of Triton's."""
        self.work.kernels.append(Kernel(f"triton {name}", num_bytes, 0))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(not issubclass(kind, OnDevice | torch.nn.Parameter) and kind is not Tensor for kind in types):
            return NotImplemented
        kwargs = dict(kwargs or {})
        namespace, _, name = function._schema.name.partition("::")
        tensors = [tensor for tensor in tree_iter((args, kwargs)) if isinstance(tensor, Tensor)]
        ours = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
        device = kwargs.get("device")
        is_created_here = device is not None and torch.device(device).type == NAME
        if not ours and not is_created_here:
            return function(*args, **kwargs)
        if name == "_to_copy":
            return self._copied(function, args[0], kwargs)
        if name == "copy_" and len(ours) == 1:
            return self._copied_into(*args)
        # Without a tensor of the device, host tensors only give the shape, as in `empty_like`.
        host_tensors = [tensor for tensor in tensors if ours and tensor.dim() and not isinstance(tensor, OnDevice)]
        if namespace not in COLLECTIVES:
            self._look(name, args, kwargs, host_tensors)
        if name == "_local_scalar_dense" and self._holder.type == "meta":
            return torch.ones((), dtype=args[0].dtype).item()
        if is_created_here:
            kwargs["device"] = self._holder
        held_args, held_kwargs = tree_map(self._held, args), tree_map(self._held, kwargs)
        if function is torch.ops.aten.addmm.dtype_out and self._holder.type == "meta":
            result = held_kwargs["out"]  # torch 2.11 fails here: it takes the dtype for a factor
        else:
            result = function(*held_args, **held_kwargs)
        flops = flops_of(function, held_args, held_kwargs, result)
        if self._fusing is None:
            read = [tensor for tensor in tree_iter((args, kwargs | {"out": None})) if isinstance(tensor, Tensor)]
            self._count(name, read, [tensor for tensor in tree_iter(result) if isinstance(tensor, Tensor)], flops)
            return _returned(function, args, kwargs, result, ours)
        returned = _returned(function, args, kwargs, result, ours)
        self._fusing.note(name, ours, [tensor for tensor in tree_iter(returned) if isinstance(tensor, OnDevice)])
        return returned

    def _copied(self, function: Any, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        device = kwargs.pop("device", None)
        target = source.device.type if device is None else torch.device(device).type
        for name in ("pin_memory", "non_blocking"):
            kwargs.pop(name, None)
        held = function(self._held(source), **kwargs)
        if target != NAME:
            self.work.waits[f"to the host, {_place()}"] += 1
            return torch.ones_like(held, device="cpu") if held.is_meta else held
        copy = OnDevice(held.clone() if held is source else held)
        if not isinstance(source, OnDevice):
            self.work.copies[_place()] += 1
        elif self._fusing is None:
            self._count("_to_copy", [source], [copy])
        else:
            self._fusing.note("_to_copy", [source], [copy])
        return copy

    def _copied_into(self, target: Tensor, source: Tensor, *_: object) -> Tensor:
        if isinstance(target, OnDevice):
            self.work.copies[_place()] += 1
        else:
            self.work.waits[f"to the host, {_place()}"] += 1
        held = self._held(source)
        self._held(target).copy_(torch.ones_like(held, device="cpu") if held.is_meta else held)
        return target

    def _held(self, value: Any) -> Any:
        if isinstance(value, OnDevice):
            return value.held
        is_of_another = isinstance(value, Tensor) and value.dim() and self._holder.type == "meta"
        return value.to("meta") if is_of_another else value

    def _look(self, name: str, args: Any, kwargs: dict[str, Any], host_tensors: list[Tensor]) -> None:
        """Count a wait for the device. Raises RuntimeError if tensors are on two devices."""
        if host_tensors and name in INDEXING:
            self.work.copies[f"an index, {_place()}"] += 1
        elif host_tensors:
            raise RuntimeError(f"{name} of tensors on {NAME} and cpu: {_place()}")
        is_masked = name in INDEXING and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in tree_iter(args[1])
        )
        has_unknown_size = name == "repeat_interleave" and kwargs.get("output_size") is None
        is_checked = name == "segment_reduce" and not kwargs.get("unsafe", False)
        if name in WAITS or is_masked or has_unknown_size or is_checked:
            self.work.waits[f"{name}, {_place()}"] += 1

    def _count(self, name: str, inputs: list[Tensor], outputs: list[Tensor], flops: int = 0) -> None:
        if (kernel := kernel_of(name, inputs, outputs, flops)) is not None:
            self.work.kernels.append(kernel)


def _returned(function: Any, args: Any, kwargs: dict[str, Any], result: Any, ours: list[OnDevice]) -> Any:
    """Return the tensors that the operation wrote into, or its result as tensors of the device."""
    wrappers = {id(value.held): value for value in ours}
    written = [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(function._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if isinstance(result, Tensor) and written:
        return written[0]
    return tree_map(
        lambda value: wrappers.get(id(value), OnDevice(value)) if isinstance(value, Tensor) else value, result
    )


def _place() -> str:
    """Return the innermost line of the package or of transformers that is running."""
    for frame in reversed(traceback.extract_stack()):
        for folder in ("/nemo_opd/", "/transformers/"):
            head, folder_name, tail = frame.filename.rpartition(folder)
            if folder_name and "/tests/" not in head:
                return f"{tail}:{frame.lineno}"
    return "tests"
