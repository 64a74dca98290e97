"""Dataset prompts: selection by length, and rollouts from the dataset's own responses."""

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
    """Number of prompts dropped because of their length."""


def drop_long(prompts: Sequence[Prompt], renderer: Renderer, max_tokens: int | None, *, key: str, way_out: str) -> Kept:
    """Drop prompts of more than `max_tokens` tokens (None for no limit), and keep the order.

    key: setting that the prompts come from. way_out: advice for the error. Raises DataError if no prompt is left.
    """
    if max_tokens is None:
        return Kept(tuple(prompts), 0)
    counted = tracked(prompts, f"tokenizing the prompts of {key}", "prompts")
    lengths = [len(renderer.prompt_ids(prompt)) for prompt in counted]
    short = tuple(prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= max_tokens)
    if not short:
        shortest = f"; the shortest has {min(lengths)}" if lengths else ""
        raise DataError(f"{key}: none of {len(prompts)} prompts has {max_tokens} tokens or less{shortest}; {way_out}")
    return Kept(short, len(prompts) - len(short))


def dataset_rollout(prompt: Prompt, renderer: Renderer, max_length: int) -> Rollout:
    """Return the prompt with the dataset's response, cut to `max_length`, as a rollout of version −1.

    Raises DataError if the row has no response, or the template or the model rejects it.
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
