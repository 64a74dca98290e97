"""Questions from files, as a model that is evaluated by itself reads them."""

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.data.layout import ChatLayout, TextLayout
from nemo_opd.data.prompts import PromptLayout, read_prompts
from nemo_opd.data.sources import load_documents
from nemo_opd.errors import DataError
from nemo_opd.rewards import check_answers
from nemo_opd.rollout.prompts import Renderer
from nemo_opd.rollout.record import Prompt


@dataclass(frozen=True, slots=True)
class Fitting:
    prompts: tuple[Prompt, ...]
    num_dropped: int
    """Longer than `max_prompt_length`, or than leaves room for an answer."""


def read_questions(config: EvaluationConfig) -> list[Prompt]:
    """Raises DataError, with the row, for what cannot be read or does not fit the reward."""
    data = config.data
    chat = None if data.messages_key is None else ChatLayout(data.messages_key, data.tools_key)
    layout = PromptLayout(chat or TextLayout(data.text_key), config.reward.answer_key)
    documents = load_documents(data, layout, key="data")
    prompts = read_prompts(documents, range(len(documents)))
    check_answers(config.reward, prompts, source="data")
    return prompts


def fitting(prompts: Sequence[Prompt], renderer: Renderer, config: EvaluationConfig, positions: int | None) -> Fitting:
    """The questions that the model can read whole and answer; `positions`: it has, None where it names no limit.

    Raises DataError where none is left.
    """
    limits = [config.max_prompt_length, None if positions is None else positions - config.max_new_tokens]
    limit = min((limit for limit in limits if limit is not None), default=None)
    if limit is None:
        return Fitting(tuple(prompts), 0)
    lengths = [len(renderer.prompt_ids(prompt)) for prompt in prompts]
    kept = tuple(prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= limit)
    if not kept:
        room = "any number of" if positions is None else positions
        raise DataError(
            f"data: none of {len(prompts)} questions has {limit} tokens or less; the shortest has {min(lengths)}. The "
            f"model has {room} positions, max_new_tokens={config.max_new_tokens} of them are for the answer, and "
            f"max_prompt_length={config.max_prompt_length}; change one of these"
        )
    return Fitting(kept, len(prompts) - len(kept))
