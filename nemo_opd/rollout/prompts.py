"""Prompts of a dataset: those that fit the model, and those continued by the dataset itself."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_opd.data.record import Prompt, Rollout
from nemo_opd.errors import DataError
from nemo_opd.progress import tracked
from nemo_opd.rollout.renderer import Renderer


@dataclass(frozen=True, slots=True)
class Kept:
    """Prompts that fit the model."""

    prompts: tuple[Prompt, ...]
    num_dropped: int
    """Number of prompts that are too long."""


def drop_long(prompts: Sequence[Prompt], renderer: Renderer, max_tokens: int | None, *, key: str, way_out: str) -> Kept:
    """Return the prompts of `max_tokens` at most, None being any number, in order and uncut.

    key: setting that the prompts come from. way_out: advice for the error. Raises DataError where none is left.
    """
    if max_tokens is None:
        return Kept(tuple(prompts), 0)
    counted = tracked(prompts, f"tokenizing the prompts of {key}", "prompts")
    lengths = [len(renderer.prompt_ids(prompt)) for prompt in counted]
    kept = tuple(prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= max_tokens)
    if not kept:
        shortest = f"; the shortest has {min(lengths)}" if lengths else ""
        raise DataError(f"{key}: none of {len(prompts)} prompts has {max_tokens} tokens or less{shortest}; {way_out}")
    return Kept(kept, len(prompts) - len(kept))


def dataset_rollout(prompt: Prompt, renderer: Renderer, max_length: int) -> Rollout:
    """Return the prompt with the dataset's continuation, cut to `max_length`, as a rollout of version −1.

    Raises DataError where the row has no continuation, or a template or the model refuses it.
    """
    continued = renderer.continued(prompt)
    ids = continued.ids[:max_length]
    stop = len(ids)
    is_ended = continued.is_ended and stop == len(continued.ids)
    response = renderer.text(ids[continued.start : stop - is_ended])
    message = {"role": "assistant", "content": response}
    return Rollout(
        prompt=prompt,
        sample=0,
        ids=ids,
        loss_mask=np.arange(stop) >= continued.start,
        logprobs=np.zeros(stop, np.float32),
        behaviour_logprobs=np.zeros(stop, np.float32),
        turns=np.array([[min(continued.start, stop), stop]], np.int32),
        responses=(response,),
        messages=() if isinstance(prompt.content, str) else (*prompt.content, message),
        finish_reason="stop" if is_ended else "length",
        version=-1,
        before=continued.before,
    )
