"""Sampling from a worker's model."""

from collections.abc import Collection, Sequence
from functools import cache, partial

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from nemo_opd.config.model import Model
from nemo_opd.models.generation import generating
from nemo_opd.models.load import tokenizer_of
from nemo_opd.rollout.base import BatchLimit, Completion, Request, Sampling
from nemo_opd.rollout.hf import Sampler


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
            batch_size=limit.sequences,
            batch_tokens=limit.tokens,
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
