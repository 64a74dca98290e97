"""A GPU that is none, which counts what a real one would be asked for: kernels, bytes, copies, and waits of the host.

Its tensors say `pretend:0` and hold their values in host memory, where they are computed; or only their shapes, which
takes no memory and no time, for programs that never read a value back. Operations on tensors of both devices are
refused, as CUDA refuses them. It knows no streams, no speed and no limits of CUDA's kernels.

Use it in a process of its own: PyTorch has one place for devices that it does not know, and keeps what is put there.
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
"""Operations of which the host needs the result, or its size."""
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
COLLECTIVES = {"c10d", "_c10d_functional"}


@dataclass
class Work:
    """Work that the pretended GPU was given."""

    kernels: list[Kernel] = field(default_factory=list)
    waits: Counter[str] = field(default_factory=Counter)
    """Times that the host needs a value, by operation and place."""
    copies: Counter[str] = field(default_factory=Counter)
    """Copies from the host, by place."""

    @property
    def num_bytes(self) -> int:
        return sum(kernel.num_bytes for kernel in self.kernels)

    def taken(self) -> dict[str, Any]:
        """Return what there is as plain values, and begin again."""
        found = {
            "kernels": len(self.kernels),
            "bytes": self.num_bytes,
            "waits": dict(self.waits),
            "copies": dict(self.copies),
        }
        self.clear()
        return found

    def clear(self) -> None:
        for each in (self.kernels, self.waits, self.copies):
            each.clear()


@contextmanager
def counted(*, has_values: bool = True) -> Iterator[Work]:
    """Inside, the device is there; yield what it is asked for.

    has_values: False for a device that knows shapes only, of which the host reads ones, and on which Triton's kernels
    are counted as what they say of themselves; else they are not used.
    """
    mode = _Mode(torch.device("cpu" if has_values else "meta"))
    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device=…) is a copy from the host
    try:
        with (
            mode,
            patch.object(Fused, "as_compiled", lambda *given, **more: mode.fused(*given, **more)),
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
    """A tensor of the device, with its values on the host."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        made: OnDevice = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

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
            made = function.function(*args, **kwargs)
        finally:
            self._fusing = None
        is_made = fusing.inner.keys() | fusing.gathered.keys()
        written = sum(size(each) for each in tree_iter(made) if id(each) in is_made)
        self.work.kernels.append(Kernel(f"compiled {function.function.__name__}", fusing.num_bytes + written, 0))
        return made

    def launched(self, name: str, num_bytes: int, run: object, *, without: str = "") -> None:
        """Count a kernel of Triton's."""
        self.work.kernels.append(Kernel(f"triton {name}", num_bytes, 0))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(not issubclass(each, OnDevice | torch.nn.Parameter) and each is not Tensor for each in types):
            return NotImplemented
        kwargs = dict(kwargs or {})
        namespace, _, name = function._schema.name.partition("::")
        given = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        ours = [each for each in given if isinstance(each, OnDevice)]
        wanted = kwargs.get("device")
        is_made_here = wanted is not None and torch.device(wanted).type == NAME
        if not ours and not is_made_here:
            return function(*args, **kwargs)
        if name == "_to_copy":
            return self._copied(function, args[0], kwargs)
        if name == "copy_" and len(ours) == 1:
            return self._copied_into(*args)
        # Without a tensor of ours the others are a pattern, as for `empty_like`.
        others = [each for each in given if ours and each.dim() and not isinstance(each, OnDevice)]
        if namespace not in COLLECTIVES:
            self._look(name, args, kwargs, others)
        if name == "_local_scalar_dense" and self._holder.type == "meta":
            return torch.ones((), dtype=args[0].dtype).item()
        if is_made_here:
            kwargs["device"] = self._holder
        held_args, held_kwargs = tree_map(self._held, args), tree_map(self._held, kwargs)
        if function is torch.ops.aten.addmm.dtype_out and self._holder.type == "meta":
            made = held_kwargs["out"]  # which torch 2.11 cannot compute: it takes the dtype for a factor
        else:
            made = function(*held_args, **held_kwargs)
        flops = flops_of(function, held_args, held_kwargs, made)
        if self._fusing is None:
            read = [each for each in tree_iter((args, kwargs | {"out": None})) if isinstance(each, Tensor)]
            self._count(name, read, [each for each in tree_iter(made) if isinstance(each, Tensor)], flops)
            return _returned(function, args, kwargs, made, ours)
        returned = _returned(function, args, kwargs, made, ours)
        self._fusing.note(name, ours, [each for each in tree_iter(returned) if isinstance(each, OnDevice)])
        return returned

    def _copied(self, function: Any, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        wanted = kwargs.pop("device", None)
        target = source.device.type if wanted is None else torch.device(wanted).type
        for name in ("pin_memory", "non_blocking"):
            kwargs.pop(name, None)
        held = function(self._held(source), **kwargs)
        if target != NAME:
            self.work.waits[f"to the host, {_place()}"] += 1
            return torch.ones_like(held, device="cpu") if held.is_meta else held
        made = OnDevice(held.clone() if held is source else held)
        if not isinstance(source, OnDevice):
            self.work.copies[_place()] += 1
        elif self._fusing is None:
            self._count("_to_copy", [source], [made])
        else:
            self._fusing.note("_to_copy", [source], [made])
        return made

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

    def _look(self, name: str, args: Any, kwargs: dict[str, Any], others: list[Tensor]) -> None:
        """Count a wait for the device. Raises RuntimeError where tensors are on two devices."""
        if others and name in INDEXING:
            self.work.copies[f"an index, {_place()}"] += 1
        elif others:
            raise RuntimeError(f"{name} of tensors on {NAME} and cpu: {_place()}")
        is_masked = name in INDEXING and any(
            isinstance(each, Tensor) and each.dtype == torch.bool for each in tree_iter(args[1])
        )
        has_unknown_size = name == "repeat_interleave" and kwargs.get("output_size") is None
        is_checked = name == "segment_reduce" and not kwargs.get("unsafe", False)
        if name in WAITS or is_masked or has_unknown_size or is_checked:
            self.work.waits[f"{name}, {_place()}"] += 1

    def _count(self, name: str, given: list[Tensor], made: list[Tensor], flops: int = 0) -> None:
        if (kernel := kernel_of(name, given, made, flops)) is not None:
            self.work.kernels.append(kernel)


def _returned(function: Any, args: Any, kwargs: dict[str, Any], made: Any, ours: list[OnDevice]) -> Any:
    """Return what the operation returns: the tensors that it wrote into, or new ones of the device."""
    known = {id(each.held): each for each in ours}
    written = [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(function._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if isinstance(made, Tensor) and written:
        return written[0]
    return tree_map(lambda each: known.get(id(each), OnDevice(each)) if isinstance(each, Tensor) else each, made)


def _place() -> str:
    """Return the innermost line of the package or of transformers that is running."""
    for frame in reversed(traceback.extract_stack()):
        for folder in ("/nemo_opd/", "/transformers/"):
            head, found, tail = frame.filename.rpartition(folder)
            if found and "/tests/" not in head:
                return f"{tail}:{frame.lineno}"
    return "tests"
