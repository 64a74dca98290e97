"""Renderers and limits of models that generate: the student, and teachers that answer evaluation questions."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import GenerationConfig

from nemo_opd.config.model import Student
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import CrossTokenizerTeacher, Teacher
from nemo_opd.data.record import Prompt
from nemo_opd.errors import AlignmentError, DataError
from nemo_opd.evaluation.inputs import ResolvedSet
from nemo_opd.models.load import load_config
from nemo_opd.rollout.conversation import build_renderer
from nemo_opd.rollout.hf import end_ids
from nemo_opd.rollout.renderer import Renderer
from nemo_opd.training.model_info import ModelInfo


@dataclass(frozen=True, slots=True)
class SampledModel:
    """Renderer and limits of a model that generates."""

    renderer: Renderer
    end_ids: frozenset[int]
    """Tokens that end a response."""
    max_length: int
    """Most tokens of prompt and response together."""


def sampled_model(
    settings: Student | Teacher, info: ModelInfo, key: str, max_length: int, *, is_chat: bool
) -> SampledModel:
    """Return a model's renderer and limits. key: its section in the settings, such as `student` or `teachers.0`.

    Raises AlignmentError if prompts are conversations and the model has no chat template.
    """
    renderer = build_renderer(info.tokenizer, is_chat, settings.chat_template_kwargs, info.vocab_size, key=key)
    model = load_config(settings.reference, key=f"{key}.model")
    return SampledModel(renderer, end_ids(info.tokenizer, GenerationConfig.from_model_config(model)), max_length)


def evaluated_teachers(
    config: RunConfig, teachers: Sequence[ModelInfo], resolved: ResolvedSet, questions: Sequence[Prompt]
) -> tuple[SampledModel, ...]:
    """Return every active teacher's renderer and limits for a question set.

    Raises AlignmentError as `sampled_model` does, and DataError, with the row, if a question leaves a teacher no room
    for an answer.
    """
    return tuple(
        _evaluated_teacher(config, i, settings, info, resolved, questions)
        for i, (settings, info) in enumerate(zip(config.active_teachers, teachers, strict=True))
    )


def _evaluated_teacher(
    config: RunConfig, i: int, settings: Teacher, info: ModelInfo, resolved: ResolvedSet, questions: Sequence[Prompt]
) -> SampledModel:
    max_length = settings.max_length if isinstance(settings, CrossTokenizerTeacher) else None
    max_length = max_length or config.train.max_length
    try:
        limit = min(max_length, info.positions or max_length)
        model = sampled_model(settings, info, f"teachers.{i}", limit, is_chat=resolved.is_chat)
        _require_room(model, questions)
    except (AlignmentError, DataError) as error:
        raise type(error)(
            f"teachers.{i} ({settings.name}) cannot be asked the questions of {resolved.key}: {error}; or ask only the "
            "student, with evaluation.teachers=false"
        ) from error
    return model


def _require_room(model: SampledModel, questions: Sequence[Prompt]) -> None:
    """Raise DataError, with the row, if a question leaves no room for an answer."""
    for question in questions:
        if (length := len(model.renderer.prompt_ids(question))) >= model.max_length:
            raise DataError(
                f"prompt {question.index} (row, counted from 0) has {length} of the teacher's tokens and leaves no "
                f"room for an answer in {model.max_length}; leave the row out, or raise train.max_length up to the "
                "model's limit"
            )
