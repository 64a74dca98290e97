"""transformers' own generation as a rollout engine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from nemo_opd.alignment.generation_config import generation_ids
from nemo_opd.alignment.template_roles import template_roles
from nemo_opd.errors import ModelError, RolloutError
from nemo_opd.models.generation import generating
from nemo_opd.models.load import load_model, load_tokenizer
from nemo_opd.progress import Work, working
from nemo_opd.rollout.base import Completion, Engine, Request, Sampling
from nemo_opd.rollout.inverse_cdf import InverseCDF, uniforms
from nemo_opd.rollout.lengths import check_lengths

PADDING = 0
"""Any id will do: attention leaves out what is before a prompt, and what is behind an end is cut off."""


class Sampler:
    """Continues prompts with a causal language model in memory, through its `generate`: batches with a KV cache.

    A request's tokens depend on its own seed and on the model's logits. Those of one sequence differ in their last
    bits with what it is batched with, so another batch gives the same tokens but where a number that was drawn lies
    within that rounding of a border.

    transformers' continuous batching would not do: it draws all requests' tokens from one generator, and the
    log-probabilities it returns are of the warped distribution alone.
    """

    def __init__(
        self, model: PreTrainedModel, *, end_ids: Collection[int], vocab_size: int, batch_size: int, device: str
    ) -> None:
        """end_ids: each ends a sequence. vocab_size: columns of the head that are tokens. batch_size: sequences."""
        self._model: Any = model
        self._end_ids = np.array(sorted(end_ids), np.int32)
        self._vocab_size, self._batch_size, self._device = vocab_size, batch_size, device

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling, version: int) -> list[Completion]:
        """One completion a request, in order; `version` is what they say of the weights.

        Communicates what the model's forward does. Raises RolloutError for requests that do not fit the model, and for
        logits that are not finite.
        """
        check_lengths(requests, max_positions(self._model.config))
        # Alike in what they cost: the cut first, which is steps, then the prompt, which is padding.
        order = sorted(range(len(requests)), key=lambda i: (requests[i].max_new_tokens, len(requests[i].prompt_ids)))
        completions: dict[int, Completion] = {}
        with working("sampling", len(order), "sequences") as work:
            for start in range(0, len(order), self._batch_size):
                work.done = start
                rows = order[start : start + self._batch_size]
                made = self._batch([requests[i] for i in rows], sampling, version, work)
                completions |= zip(rows, made, strict=True)
        return [completions[i] for i in range(len(requests))]

    def _batch(self, requests: Sequence[Request], sampling: Sampling, version: int, work: Work) -> list[Completion]:
        steps = max(request.max_new_tokens for request in requests)
        numbers = torch.from_numpy(uniforms([request.seed for request in requests], steps)).to(self._device)
        processor = InverseCDF(sampling, numbers, self._vocab_size)
        ids, mask = left_padded([request.prompt_ids for request in requests])
        limits = torch.tensor([request.max_new_tokens for request in requests])
        with only_generation_config(self._model, self._settings(steps)) as settings:
            sequences = self._model.generate(
                ids.to(self._device),
                attention_mask=mask.to(self._device),
                generation_config=settings,
                logits_processor=LogitsProcessorList([processor]),
                stopping_criteria=StoppingCriteriaList([OwnLimits(limits.to(self._device), ids.shape[1], work)]),
                synced_gpus=False,
            )
        sampled = sequences[:, ids.shape[1] :].int().cpu().numpy()
        logprobs = processor.logprobs.cpu().numpy()
        behaviour_logprobs = processor.behaviour_logprobs.cpu().numpy()
        made = zip(requests, sampled, logprobs, behaviour_logprobs, strict=True)
        return [self._completion(request, *row, version=version) for request, *row in made]

    def _settings(self, steps: int) -> GenerationConfig:
        ends = self._end_ids.tolist()
        return GenerationConfig(
            max_new_tokens=steps, do_sample=False, use_cache=True, eos_token_id=ends or None, pad_token_id=PADDING
        )

    def _completion(
        self,
        request: Request,
        ids: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        behaviour_logprobs: NDArray[np.float32],
        *,
        version: int,
    ) -> Completion:
        """ids, log-probabilities: as far as the longest of the batch goes."""
        ids = ids[: request.max_new_tokens]
        ends = np.flatnonzero(np.isin(ids, self._end_ids))
        length = int(ends[0]) + 1 if len(ends) else len(ids)
        if not np.isfinite([logprobs[:length], behaviour_logprobs[:length]]).all():
            raise RolloutError(
                f"the model's logits are not finite after {len(request.prompt_ids)} tokens of a prompt; its weights "
                "have diverged or do not fit its dtype: lower student.optimizer.lr, or use bfloat16 or float32"
            )
        return Completion(
            ids[:length].copy(),
            logprobs[:length].copy(),
            behaviour_logprobs[:length].copy(),
            "stop" if len(ends) else "length",
            version=version,
        )


class OwnLimits(StoppingCriteria):
    """Each sequence ends at its own number of new tokens."""

    def __init__(self, limits: Tensor, prompt_length: int, work: Work) -> None:
        """limits: [B]. prompt_length: padding included. work: advances by B over as many tokens as there may be."""
        self._limits, self._prompt_length = limits, prompt_length
        self._work, self._per_token = work, len(limits) / int(limits.max())

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """[B, S] → bool [B]."""
        self._work.advance(self._per_token)
        is_over: Tensor = self._limits <= input_ids.shape[1] - self._prompt_length
        return is_over


@contextmanager
def only_generation_config(model: Any, settings: GenerationConfig) -> Iterator[GenerationConfig]:
    """Inside, nothing that came with the model changes how it generates: transformers takes from its own configuration
    what a call leaves open.
    """
    before = model.generation_config
    model.generation_config = settings
    try:
        yield settings
    finally:
        model.generation_config = before


def left_padded(prompts: Sequence[NDArray[np.int32]]) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, both int64 [B, longest]."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), PADDING)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.from_numpy(np.asarray(prompt, np.int64))
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


def max_positions(config: PretrainedConfig) -> int | None:
    """How many tokens a sequence of the model can have; None where its configuration names no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None


def end_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None) -> frozenset[int]:
    """What ends a sampled sequence: EOS ids of the generation configs, of the model and beside the tokenizer, the
    tokenizer's own EOS, and what the chat template ends a turn with.
    """
    configured: Any = None if generation_config is None else generation_config.eos_token_id
    own: Any = tokenizer.eos_token_id
    turns = [content for content, role in template_roles(tokenizer).items() if role == "end_of_turn"]
    return frozenset(
        int(each)
        for each in (
            *([configured] if isinstance(configured, int) else configured or ()),
            *generation_ids(tokenizer).eos,
            *([] if own is None else [own]),
            *(tokenizer.convert_tokens_to_ids(content) for content in turns),
        )
    )


class HFEngine(Engine):
    """A model of its own, from a Hugging Face folder."""

    def __init__(self, model: str, *, dtype: torch.dtype, device: str, batch_size: int, version: int = 0) -> None:
        """model: a folder, a hub name or `demo:NAME`. Raises ModelError where it cannot be loaded."""
        self._name, self._dtype, self._version = model, dtype, version
        tokenizer = load_tokenizer(model, key="model")
        self._model: Any = load_model(model, dtype, key="model").eval().to(device)
        ends = end_ids(tokenizer, self._model.generation_config)
        self._sampler: Sampler | None = Sampler(
            self._model, end_ids=ends, vocab_size=len(tokenizer), batch_size=batch_size, device=device
        )

    @property
    def version(self) -> int:
        return self._version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion a request, in order. Raises RolloutError as `Sampler.generate` does, and after `close`."""
        if self._sampler is None:
            raise RolloutError(f"the engine of {self._name} is closed and has no model any more; make another")
        with generating(self._model, None):
            return self._sampler.generate(requests, sampling, self._version)

    @torch.no_grad()
    def update_weights(self, folder: Path, version: int) -> None:
        """Sample from now on with the weights in a Hugging Face folder of the same model.

        Raises RolloutError for a folder that cannot be read or has another model; the weights are then as before.
        """
        if self._sampler is None:
            raise RolloutError(f"the engine of {self._name} is closed and takes no weights any more; make another")
        try:
            loaded = load_model(str(folder), self._dtype, key="weights").state_dict()
        except ModelError as error:
            raise RolloutError(f"version {version} of the weights was not taken: {error}") from error
        own = self._model.state_dict()
        if {name: value.shape for name, value in loaded.items()} != {name: value.shape for name, value in own.items()}:
            raise RolloutError(
                f"version {version} of the weights was not taken: {folder} is another model than {self._name}, with "
                "other tensors; give a folder that this model was exported to"
            )
        # In place: nowhere on the device are there two models.
        for name, value in loaded.items():
            own[name].copy_(value)
        self._version = version

    def close(self) -> None:
        """Free the model. Closing twice is closing once."""
        self._sampler = self._model = None
