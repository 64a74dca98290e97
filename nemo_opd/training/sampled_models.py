"""Models that generate: the student, and teachers that answer the questions of the evaluation."""

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
    """Largest number of tokens of prompt and response together."""


def sampled_model(
    settings: Student | Teacher, info: ModelInfo, key: str, max_length: int, *, is_chat: bool
) -> SampledModel:
    """Return a model's renderer and limits; key: its section in the settings, such as `student` or `teachers.0`.

    Raises AlignmentError where prompts are conversations and the model has no chat template.
    """
    renderer = build_renderer(info.tokenizer, is_chat, settings.chat_template_kwargs, info.vocab_size, key=key)
    model = load_config(settings.reference, key=f"{key}.model")
    return SampledModel(renderer, end_ids(info.tokenizer, GenerationConfig.from_model_config(model)), max_length)


def evaluated_teachers(
    config: RunConfig, teachers: Sequence[ModelInfo], resolved: ResolvedSet, questions: Sequence[Prompt]
) -> tuple[SampledModel, ...]:
    """Return every active teacher's renderer and limits for a set of questions.

    Raises AlignmentError as `sampled_model` does, and DataError, with the row, for a question that leaves a teacher no
    room for an answer.
    """
    return tuple(
        _evaluated_teacher(config, i, settings, info, resolved, questions)
        for i, (settings, info) in enumerate(zip(config.active_teachers, teachers, strict=True))
    )


def _evaluated_teacher(
    config: RunConfig, i: int, settings: Teacher, info: ModelInfo, resolved: ResolvedSet, questions: Sequence[Prompt]
) -> SampledModel:
    own = settings.max_length if isinstance(settings, CrossTokenizerTeacher) else None
    length = own or config.train.max_length
    try:
        limit = min(length, info.positions or length)
        model = sampled_model(settings, info, f"teachers.{i}", limit, is_chat=resolved.is_chat)
        _require_room(model, questions)
    except (AlignmentError, DataError) as error:
        raise type(error)(
            f"teachers.{i} ({settings.name}) cannot be asked the questions of {resolved.key}: {error}; or ask the "
            "student alone, with evaluation.teachers=false"
        ) from error
    return model


def _require_room(model: SampledModel, questions: Sequence[Prompt]) -> None:
    """Raise DataError, with the row, for the first question that leaves no room for an answer."""
    for question in questions:
        if (length := len(model.renderer.prompt_ids(question))) >= model.max_length:
            raise DataError(
                f"prompt {question.index} (row, counted from 0) has {length} of its tokens and leaves no room for an "
                f"answer in {model.max_length}; leave the row out, or raise train.max_length as far as the model goes"
            )
