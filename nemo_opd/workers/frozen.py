"""A frozen model on one data-parallel rank, and the sampler of a sharded model."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from nemo_opd.config.model import Model
from nemo_opd.config.teacher import TeacherBase
from nemo_opd.distributed.layout import Layout
from nemo_opd.distributed.process_group import build_mesh
from nemo_opd.evaluation import likelihoods
from nemo_opd.models.causal_model import ReadingModel, reading_model
from nemo_opd.models.generation import generating
from nemo_opd.models.load import compute_dtype, tokenizer_of
from nemo_opd.models.sharded_load import load_sharded
from nemo_opd.rollout.engine_interface import BatchLimit, Completion, Request, Sampling
from nemo_opd.rollout.transformers_engine import Sampler
from nemo_opd.rotary import RotaryLimit
from nemo_opd.types import TokenRows
from nemo_opd.workers.offload import DeviceOffload, LayerStream
from nemo_opd.workers.out_of_memory import FrozenTasks, Task, needs_memory

Handoff = Literal["hidden_states", "logits"]
"""Form of a teacher's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSource:
    """Source of a teacher's output on this rank."""

    logit_rows: ReadingModel
    use: Callable[[], AbstractContextManager[None]]
    """Context that calls of `logit_rows` need."""
    close: Callable[[], None] = lambda: None
    is_fixed: bool = True
    """Whether the weights never change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherModel(TeacherSource):
    """A teacher's model on this rank; inside `use` it is on the device and has the teacher's weights."""

    model: PreTrainedModel
    mesh: DeviceMesh


class WorkerSampler:
    """Sampler of a model that is sharded over a mesh and must be on the device when called.

    Communicates as `generating` does. All ranks of a tensor-parallel group must get the same requests.
    """

    def __init__(
        self,
        settings: Model,
        model: PreTrainedModel,
        mesh: DeviceMesh,
        *,
        key: str,
        vocab_size: int,
        device: str,
        rounds_logits: bool = False,
    ) -> None:
        """Store the arguments.

        key: key of the model's section in the settings. vocab_size: columns of the head that are tokens. rounds_logits:
        see `generating`.
        """
        self._model, self._mesh, self._vocab_size, self._device = model, mesh, vocab_size, device
        self._rounds_logits, self._frees_gathered = rounds_logits, settings.parallelism.frees_gathered
        self._tokenizer = cache(partial(tokenizer_of, settings, key=key))

    def __call__(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        end_ids: Collection[int],
        limit: BatchLimit,
        version: int = 0,
    ) -> list[Completion]:
        """Return one completion per request, in order."""
        sampler = Sampler(
            self._model,
            end_ids=end_ids,
            vocab_size=self._vocab_size,
            limit=limit,
            device=self._device,
            tokenizer=self._tokenizer,
        )
        with generating(
            self._model,
            self._mesh,
            rounds_logits=self._rounds_logits,
            reshard_after_forward=self._frees_gathered,
        ):
            return sampler.generate(requests, sampling, version)


class FrozenWorker:
    """A frozen model that scores and continues texts.

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
        empties_cache: bool = False,
        source: TeacherSource | None = None,
    ) -> None:
        """Load the model, or use `source`.

        key: the model's key in the settings. vocab_size: size of the tokenizer. handoff: form of a teacher's output.
        empties_cache: release cached device memory after use. Raises ModelError for unusable weights
        or an unusable head, and ClusterError if memory runs out.
        """
        self.vocab_size, self.device = vocab_size, device
        self._settings, self._key, self._tasks = settings, key.removesuffix(".model"), tasks
        if source is None:
            source = _load(
                settings, tasks.loading, key=key, device=device, handoff=handoff, empties_cache=empties_cache
            )
        self._source, self.logit_rows = source, source.logit_rows

    @property
    def _model(self) -> TeacherModel:
        assert isinstance(self._source, TeacherModel), "a cached teacher has no model"
        return self._source

    @property
    def model(self) -> PreTrainedModel:
        return self._model.model

    def reading_form(self) -> tuple[bool, RotaryLimit | None]:
        """Return whether the model reads packed sequences, so that padding is free, and its rotary factors' limit."""
        return self.logit_rows.reads_packed, self.logit_rows.rotary

    @torch.no_grad()
    def likelihoods(self, tokens: TokenRows, micro_batches: Sequence[slice]) -> Tensor:
        """Return each sequence's likelihood of its scored tokens, as `nemo_opd.evaluation.likelihoods.read` does."""
        with needs_memory(self._tasks.reading), self._source.use():
            return likelihoods.read(self.logit_rows, tokens, micro_batches, self.device)

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, end_ids: Collection[int], limit: BatchLimit
    ) -> list[Completion]:
        """Continue each prompt of the model's tokens until one of `end_ids`; return completions in request order.

        All ranks of a tensor-parallel group must get the same requests.
        """
        with needs_memory(self._tasks.answers), self._source.use():
            return self._sampler(requests, sampling, end_ids, limit)

    @cached_property
    def _sampler(self) -> WorkerSampler:
        model, mesh, size = self._model.model, self._model.mesh, self.vocab_size
        return WorkerSampler(self._settings, model, mesh, key=self._key, vocab_size=size, device=self.device)

    def close(self) -> None:
        """Free the model's memory."""
        self._source.close()


def _load(
    settings: TeacherBase, task: Task, *, key: str, device: str, handoff: Handoff, empties_cache: bool
) -> TeacherModel:
    """Load the model. Raises ModelError and ClusterError like `FrozenWorker`."""
    dtype, parallelism = compute_dtype(settings.dtype, device), settings.parallelism
    offload = settings.offload in (True, "layers")
    mesh = build_mesh(Layout.of(dist.get_world_size(), parallelism), device)
    with needs_memory(task):
        model = load_sharded(
            settings,
            dtype,
            mesh,
            key=key,
            compute_dtype=dtype,
            device="cpu" if offload else device,
            trainable=False,
        )
    stream = LayerStream(model, device) if settings.offload == "layers" and device == "cuda" else None
    residence = DeviceOffload(model, device, offload=offload, empties_cache=empties_cache, stream=stream)
    logit_rows = reading_model(model, handoff, key=key, mesh=mesh, parallelism=parallelism)
    return TeacherModel(model=model, mesh=mesh, logit_rows=logit_rows, use=residence.use, close=residence.close)
