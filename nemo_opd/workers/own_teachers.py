"""Teachers in the student's processes, with its current weights or an average of them (methods.md §13)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from nemo_opd.config.teacher import TeacherBase
from nemo_opd.models.head import ReadingModel
from nemo_opd.models.lora import without_adapters
from nemo_opd.models.parallelize import sharded_units
from nemo_opd.workers.average import Average
from nemo_opd.workers.frozen import TeacherModel
from nemo_opd.workers.memory import averaging, needs_memory
from nemo_opd.workers.residence import DeviceOffload
from nemo_opd.workers.teacher import TeacherWorker


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
            use = self._use(self._weights(i, worker_arguments["settings"], worker_arguments["device"]))
            source = TeacherModel(model=model, mesh=mesh, logit_rows=logit_rows, use=use, is_fixed=False)
            self._workers[i] = TeacherWorker(**worker_arguments, source=source)

    def _weights(self, i: int, settings: TeacherBase, device: str) -> Callable[[], AbstractContextManager[None]]:
        """Return a factory of contexts that give the module the teacher's weights."""
        if settings.weights == "ema":
            with self._residence.use(), needs_memory(averaging(f"teachers.{i}", settings.name)):
                offload = settings.offload is True and device == "cuda"
                self._averages[i] = Average(self._model, settings.ema_decay, offload=offload)
            return self._averages[i].in_model
        return nullcontext if settings.adapters else lambda: without_adapters(self._model)

    def _use(self, weights: Callable[[], AbstractContextManager[None]]) -> Callable[[], AbstractContextManager[None]]:
        @contextmanager
        def use() -> Iterator[None]:
            self._model.eval()
            with self._residence.use(), weights():
                try:
                    yield
                finally:
                    # Free gathered parameters: they are the teacher's.
                    for unit in sharded_units(self._model):
                        unit.reshard()

        return use

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
