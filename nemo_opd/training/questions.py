"""Question sets that a run asks its student and teachers."""

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_opd.config.on_policy import longest_prompt
from nemo_opd.config.run import RunConfig
from nemo_opd.data.record import Prompt
from nemo_opd.evaluation.inputs import ResolvedSet
from nemo_opd.evaluation.sets import read_questions
from nemo_opd.rollout.prompts import drop_long
from nemo_opd.training.inputs import sets_of
from nemo_opd.training.model_info import ModelInfo
from nemo_opd.training.sampled_models import SampledModel, evaluated_teachers, sampled_model


@dataclass(frozen=True, slots=True)
class LoadedSet:
    """Question set with the models that answer it."""

    resolved: ResolvedSet
    prompts: tuple[Prompt, ...]
    num_dropped: int
    """Number of questions that are too long."""
    student: SampledModel
    teachers: tuple[SampledModel, ...]
    """Active teachers; empty if only the student is asked."""


def load_sets(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> tuple[LoadedSet, ...]:
    """Load all question sets.

    Raises DataError if questions cannot be read or do not fit the reward, or if all are too long; also the errors of
    `evaluated_teachers`.
    """
    return tuple(_load(config, resolved, student, teachers) for resolved in sets_of(config))


def _load(config: RunConfig, resolved: ResolvedSet, student: ModelInfo, teachers: Sequence[ModelInfo]) -> LoadedSet:
    limit = min(config.train.max_length, student.positions or config.train.max_length)
    model = sampled_model(config.student, student, "student", limit, is_chat=resolved.is_chat)
    prompts = read_questions(resolved)
    longest = longest_prompt(config) if config.rollout is not None else limit - config.new_tokens(resolved.name)
    keys = "rollout.max_prompt_length or train.max_length, or lower rollout.max_new_tokens"
    if config.rollout is None:
        keys = f"train.max_length, or lower {resolved.prefix}max_new_tokens"
    fitting = drop_long(prompts, model.renderer, longest, key=resolved.key, way_out=f"raise {keys}")
    assert config.evaluation is not None
    answering = evaluated_teachers(config, teachers, resolved, fitting.prompts) if config.evaluation.teachers else ()
    return LoadedSet(resolved, fitting.prompts, fitting.num_dropped, model, answering)
