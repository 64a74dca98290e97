"""Teachers with the student's weights, and the exponential moving average of these weights (methods.md §13)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import PreTrainedModel

from nemo_opd.config.teacher import TeacherBase
from nemo_opd.distributed.collectives import local
from nemo_opd.models.causal_model import ReadingModel
from nemo_opd.models.lora import without_adapters
from nemo_opd.models.parallelize import free_gathered
from nemo_opd.workers.frozen import TeacherModel
from nemo_opd.workers.offload import DeviceOffload, HostCopy
from nemo_opd.workers.out_of_memory import averaging, needs_memory
from nemo_opd.workers.teacher_worker import TeacherWorker


class Average:
    """The average θ̄ ← d · θ̄ + (1 − d) · θ of this rank's shards of the trained parameters, in fp32.

    Communicates nothing.
    """

    def __init__(self, model: nn.Module, decay: float, *, offload: bool = False) -> None:
        """Start from the model's weights, which must be on the device. offload: keep an idle average on the host."""
        self._model, self._offload = model, offload
        self._update = get_ema_multi_avg_fn(decay)
        # Keyed by name, not by parameter: moving a model replaces its parameters' tensors.
        self.tensors = {name: parameter.detach().clone() for name, parameter in self._trained()}
        """Average of each parameter, keyed by its name and sharded like it."""
        self._host = HostCopy()
        if offload:
            self._to_host()

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in self._model.named_parameters() if parameter.requires_grad)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the average on the device inside the context."""
        if self._offload:
            self._host.restore()
        try:
            yield
        finally:
            if self._offload:
                self._to_host()

    def _to_host(self) -> None:
        self._host.hold(self.tensors.values())
        torch.cuda.current_stream().synchronize()

    @torch.no_grad()
    def update(self) -> None:
        """Update the average from the model's weights, which must be on the device."""
        averages, weights = zip(*self._pairs(), strict=True)
        with self.on_device():
            self._update(list(averages), list(weights), None)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Swap the average into the model inside the context. The model must be on the device and sharded."""
        with self.on_device():
            self._swap()
            try:
                yield
            finally:
                self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, weight in self._pairs():
            previous = weight.clone()
            weight.copy_(average)
            average.copy_(previous)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's shards of each average and its weight."""
        for name, parameter in self._trained():
            yield local(self.tensors[name]), local(parameter.detach())


class OwnTeachers:
    """This rank's teachers that run the student's module, in the student's layout.

    Only averages and teacher outputs need extra memory.
    """

    def __init__(
        self,
        arguments: Mapping[int, Mapping[str, Any]],
        model: PreTrainedModel,
        mesh: DeviceMesh,
        logit_rows: ReadingModel,
        residence: DeviceOffload,
    ) -> None:
        """Build the teachers. arguments: `TeacherWorker` arguments, keyed by teacher index."""
        self._model, self._residence = model, residence
        self._averages: dict[int, Average] = {}
        self._workers: dict[int, TeacherWorker] = {}
        for i, worker_arguments in arguments.items():
            settings: TeacherBase = worker_arguments["settings"]
            if settings.weights == "ema":
                with residence.use(), needs_memory(averaging(f"teachers.{i}", settings.name)):
                    offload = settings.offload is True and worker_arguments["device"] == "cuda"
                    self._averages[i] = Average(model, settings.ema_decay, offload=offload)
            use = partial(self._use, i, settings.adapters)
            source = TeacherModel(model=model, mesh=mesh, logit_rows=logit_rows, use=use, is_fixed=False)
            self._workers[i] = TeacherWorker(**worker_arguments, source=source)

    @contextmanager
    def _use(self, teacher: int, adapters: bool) -> Iterator[None]:
        """Give the module a teacher's weights inside the context. adapters: whether they include the student's."""
        self._model.eval()
        weights = self.averaged(teacher if teacher in self._averages else None)
        with self._residence.use(), weights, nullcontext() if adapters else without_adapters(self._model):
            try:
                yield
            finally:
                free_gathered(self._model)  # the parameters of the teacher

    def call(self, teacher: int, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of a teacher. teacher: its index."""
        return getattr(self._workers[teacher], method)(*arguments)

    def update(self) -> None:
        """Update the averages. Call after the optimizer step, with the student's weights on the device."""
        for average in self._averages.values():
            average.update()

    def averaged(self, teacher: int | None) -> AbstractContextManager[None]:
        """Return a context that gives the module (on the device, sharded) a teacher's average, or changes nothing."""
        return nullcontext() if teacher is None else self._averages[teacher].in_model()

    @contextmanager
    def state(self) -> Iterator[dict[str, dict[str, Tensor]]]:
        """Yield the averages on the device, keyed by teacher index, to be saved or overwritten."""
        with ExitStack() as stack:
            for average in self._averages.values():
                stack.enter_context(average.on_device())
            yield {str(i): average.tensors for i, average in self._averages.items()}

    def close(self) -> None:
        """Release the teachers' buffers."""
        for worker in self._workers.values():
            worker.close()
