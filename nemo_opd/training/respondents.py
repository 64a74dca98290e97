"""Models as they are asked questions."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import GenerationConfig

from nemo_opd.config.model import Student
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import CrossTokenizerTeacher, Teacher
from nemo_opd.data.record import Prompt
from nemo_opd.errors import AlignmentError, DataError
from nemo_opd.models.load import load_config
from nemo_opd.rollout.conversation import ConversationRenderer
from nemo_opd.rollout.hf import end_ids
from nemo_opd.rollout.renderer import Renderer, TextRenderer
from nemo_opd.training.side import Side


@dataclass(frozen=True, slots=True)
class Respondent:
    """A model's own tokenizer around what it samples."""

    renderer: Renderer
    end_ids: frozenset[int]
    """Tokens that end what it samples."""
    max_length: int
    """Tokens of a whole sequence."""


def respondent(config: RunConfig, settings: Student | Teacher, side: Side, key: str, max_length: int) -> Respondent:
    """key: `student`, `teachers.0`.

    Raises AlignmentError where prompts are conversations and the model has no chat template.
    """
    if config.data.messages_key is None:
        renderer: Renderer = TextRenderer(side.tokenizer, side.vocab_size)
    else:
        renderer = ConversationRenderer(side.tokenizer, settings.chat_template_kwargs, side.vocab_size, key=key)
    model = load_config(settings.model, key=f"{key}.model")
    return Respondent(renderer, end_ids(side.tokenizer, GenerationConfig.from_model_config(model)), max_length)


def asked_teachers(config: RunConfig, teachers: Sequence[Side], questions: Sequence[Prompt]) -> tuple[Respondent, ...]:
    """Every active teacher.

    Raises AlignmentError as `respondent` does, and DataError, with the row, for a question that one of them cannot
    answer.
    """
    return tuple(
        _asked(config, i, settings, side, questions)
        for i, (settings, side) in enumerate(zip(config.active_teachers, teachers, strict=True))
    )


def _asked(config: RunConfig, i: int, settings: Teacher, side: Side, questions: Sequence[Prompt]) -> Respondent:
    own = settings.max_length if isinstance(settings, CrossTokenizerTeacher) else None
    length = own or config.train.max_length
    try:
        asked = respondent(config, settings, side, f"teachers.{i}", min(length, side.positions or length))
        require_room(asked, questions)
    except (AlignmentError, DataError) as error:
        raise type(error)(
            f"teachers.{i} ({settings.name}) cannot be asked the questions of evaluation.data: {error}; or ask the "
            "student alone, with evaluation.teachers=false"
        ) from error
    return asked


def require_room(asked: Respondent, questions: Sequence[Prompt]) -> None:
    """Raises DataError, with the row, for the first question that leaves no room for an answer."""
    for question in questions:
        if (length := len(asked.renderer.prompt_ids(question))) >= asked.max_length:
            raise DataError(
                f"prompt {question.index} (row, counted from 0) has {length} of its tokens and leaves no room for an "
                f"answer in {asked.max_length}; leave the row out, or raise train.max_length as far as the model goes"
            )
