"""A frozen model on one data-parallel rank."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from nemo_opd.config.teacher import TeacherBase
from nemo_opd.distributed.layout import Layout
from nemo_opd.distributed.mesh import build_mesh
from nemo_opd.evaluation import likelihoods
from nemo_opd.models.head import ReadingModel, reading_model
from nemo_opd.models.load import compute_dtype
from nemo_opd.models.sharded_load import load_sharded
from nemo_opd.rollout.base import BatchLimit, Completion, Request, Sampling
from nemo_opd.rotary import RotaryLimit
from nemo_opd.types import TokenRows
from nemo_opd.workers.layer_stream import LayerStream
from nemo_opd.workers.memory import FrozenTasks, Task, needs_memory
from nemo_opd.workers.residence import Residence
from nemo_opd.workers.sampler import WorkerSampler

Handoff = Literal["hidden_states", "logits"]
"""Form of the output of a teacher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSource:
    """Origin of a teacher's output on this rank."""

    logit_rows: ReadingModel
    use: Callable[[], AbstractContextManager[None]]
    """Context in which `logit_rows` may be called."""
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherModel(TeacherSource):
    """Model that a teacher computes with on this rank; in `use` it is on the device and has the teacher's weights."""

    model: PreTrainedModel
    mesh: DeviceMesh
    is_fixed: bool = True
    """Whether the weights never change."""


def _load(
    settings: TeacherBase, task: Task, *, key: str, device: str, handoff: Handoff, gives_back: bool
) -> TeacherModel:
    """Load the model. Raises ModelError and ClusterError as `FrozenWorker` does."""
    dtype, parallelism = compute_dtype(settings.dtype, device), settings.parallelism
    moves = settings.offload in (True, "layers")
    mesh = build_mesh(Layout.of(dist.get_world_size(), parallelism), device)
    with needs_memory(task):
        model = load_sharded(
            settings.reference,
            dtype,
            mesh,
            key=key,
            parallelism=parallelism,
            compute_dtype=dtype,
            device="cpu" if moves else device,
            trainable=False,
            compile_layers=settings.compile,
            fused_layers=settings.fused_layers,
            attn_implementation=settings.attn_implementation,
        )
    stream = LayerStream(model, device) if settings.offload == "layers" and device == "cuda" else None
    residence = Residence(model, device, offload=moves, gives_back=gives_back, stream=stream)
    logit_rows = reading_model(model, handoff, key=key, mesh=mesh, parallelism=parallelism)
    return TeacherModel(model=model, mesh=mesh, logit_rows=logit_rows, use=residence.use, close=residence.close)


class FrozenWorker:
    """A frozen model that reads and continues texts.

    Communicates FSDP2's all-gathers of parameters over the model's group.
    """

    def __init__(
        self,
        settings: TeacherBase,
        tasks: FrozenTasks,
        *,
        key: str,
        vocab_size: int,
        device: str,
        handoff: Handoff = "hidden_states",
        gives_back: bool = False,
        own: TeacherSource | None = None,
    ) -> None:
        """Load the model, unless `own` is given.

        key: of the model in the settings. vocab_size: of the tokenizer. handoff: the form of a teacher's output.
        gives_back: others need what is cached. Raises ModelError for weights or a head that cannot be used, and
        ClusterError where memory runs out.
        """
        self.vocab_size, self.device = vocab_size, device
        self._settings, self._key, self._tasks = settings, key.removesuffix(".model"), tasks
        if own is None:
            own = _load(settings, tasks.loading, key=key, device=device, handoff=handoff, gives_back=gives_back)
        self._own, self.logit_rows = own, own.logit_rows

    @property
    def _model(self) -> TeacherModel:
        assert isinstance(self._own, TeacherModel), "a cached teacher has no model"
        return self._own

    @property
    def model(self) -> PreTrainedModel:
        return self._model.model

    def reads_packed(self) -> bool:
        """Return whether padding costs the model nothing."""
        return self.logit_rows.reads_packed

    def rotary_limit(self) -> RotaryLimit | None:
        """Return the limit of the model's rotary factors."""
        return self.logit_rows.rotary

    @torch.no_grad()
    def likelihoods(self, tokens: TokenRows, micro_batches: Sequence[slice]) -> Tensor:
        """Return the likelihoods of what is scored of each sequence, as `nemo_opd.evaluation.likelihoods` does."""
        with needs_memory(self._tasks.reading), self._own.use():
            return likelihoods.read(self.logit_rows, tokens, micro_batches, self.device)

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, end_ids: Collection[int], limit: BatchLimit
    ) -> list[Completion]:
        """Continue each prompt, in the model's tokens, until one of `end_ids`; return completions in order.

        Ranks of a tensor-parallel group must get the same requests.
        """
        with needs_memory(self._tasks.answers), self._own.use():
            return self._sampler(requests, sampling, end_ids, limit)

    @cached_property
    def _sampler(self) -> WorkerSampler:
        own, size = self._model, self.vocab_size
        return WorkerSampler(self._settings, own.model, own.mesh, key=self._key, vocab_size=size, device=self.device)

    def close(self) -> None:
        """Give the model's memory back."""
        self._own.close()
