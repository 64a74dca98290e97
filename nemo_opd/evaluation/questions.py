"""Questions from files, as a model that is evaluated by itself reads them."""

from collections.abc import Sequence

from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.data.prompts import read_prompts
from nemo_opd.data.record import Prompt
from nemo_opd.data.sources import load_documents
from nemo_opd.evaluation.columns import layout_of
from nemo_opd.rewards import check_answers
from nemo_opd.rollout.prompts import Kept, Renderer, drop_long


def read_questions(config: EvaluationConfig) -> list[Prompt]:
    """Raises DataError, with the row, for what cannot be read or does not fit the reward."""
    documents = load_documents(config.data, layout_of(config), key="data")
    prompts = read_prompts(documents, range(len(documents)))
    check_answers(config.reward, prompts, source="data")
    return prompts


def fitting(prompts: Sequence[Prompt], renderer: Renderer, config: EvaluationConfig, positions: int | None) -> Kept:
    """The questions that the model can read whole and answer; `positions`: it has, None where it names no limit.

    Raises DataError where none is left.
    """
    limits = [config.max_prompt_length, None if positions is None else positions - config.max_new_tokens]
    way_out = (
        f"the model has {'any number of' if positions is None else positions} positions, "
        f"max_new_tokens={config.max_new_tokens} of them are for the answer, and "
        f"max_prompt_length={config.max_prompt_length}; change one of these"
    )
    limit = min((limit for limit in limits if limit is not None), default=None)
    return drop_long(prompts, renderer, limit, key="data", way_out=way_out)
