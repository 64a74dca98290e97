"""Prompts as the student reads them, or a teacher that is asked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from nemo_opd.data.continuation import Continued, Ids
from nemo_opd.data.record import Message, Prompt, Rollout
from nemo_opd.errors import DataError
from nemo_opd.progress import tracked

Tools = Sequence[dict[str, Any]] | None


class Renderer(Protocol):
    """A model's tokenizer around what it samples, which is the student unless said: token in, token out."""

    @property
    def takes_turns(self) -> bool:
        """Prompts are conversations, so that somebody can answer the student."""
        ...

    def prompt_ids(self, prompt: Prompt) -> Ids:
        """[P] tokens up to where the student takes over. Raises DataError, naming the prompt's row."""
        ...

    def continued(self, prompt: Prompt) -> Continued:
        """The prompt and its `response`. Raises DataError, naming the prompt's row."""
        ...

    def text(self, ids: Ids) -> str:
        """The exact text of sampled tokens; special tokens have none, bytes that are no character become U+FFFD."""
        ...

    def tool_calls(self, ids: Ids, start: int, tools: Tools) -> list[Message]:
        """The calls in the turn [start, S) of ids [S], as of a message; see nemo_opd.rollout.tool_calls."""
        ...

    def between(self, messages: Sequence[Message], new: Sequence[Message], tools: Tools) -> Ids:
        """Tokens from the end of the last of `messages`, the student's turn, over the new ones to its next turn.

        Raises RolloutError where the chat template refuses them.
        """
        ...

    def shows_tools(self, tools: Tools) -> bool:
        """Whether the chat template tells the student of them."""
        ...

    def num_tokens(self, text: str) -> int:
        """Of a text on its own."""
        ...

    def shortened(self, text: str, max_tokens: int) -> str:
        """The longest beginning of a text that has so many tokens at most; the text itself where it fits."""
        ...


@dataclass(frozen=True, slots=True)
class Kept:
    prompts: tuple[Prompt, ...]
    num_dropped: int
    """Too long."""


def drop_long(prompts: Sequence[Prompt], renderer: Renderer, max_tokens: int | None, *, key: str, way_out: str) -> Kept:
    """The prompts of `max_tokens` at most, None being any number, in order and uncut.

    key: where they stand in the config. way_out: what can be changed there. Raises DataError where none is left.
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
    """The prompt with the dataset's own continuation, cut to `max_length`, as if it had been sampled by version −1.

    Raises DataError where the row has none, or a template or the model refuses it.
    """
    continued = renderer.continued(prompt)
    ids = continued.ids[:max_length]
    stop = len(ids)
    is_ended = continued.is_ended and stop == len(continued.ids)
    response = renderer.text(ids[continued.start : stop - is_ended])
    said = {"role": "assistant", "content": response}
    return Rollout(
        prompt=prompt,
        sample=0,
        ids=ids,
        loss_mask=np.arange(stop) >= continued.start,
        logprobs=np.zeros(stop, np.float32),
        behaviour_logprobs=np.zeros(stop, np.float32),
        turns=np.array([[min(continued.start, stop), stop]], np.int32),
        responses=(response,),
        messages=() if isinstance(prompt.content, str) else (*prompt.content, said),
        finish_reason="stop" if is_ended else "length",
        version=-1,
    )
