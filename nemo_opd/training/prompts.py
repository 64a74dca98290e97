"""The prompts of a run, as the student reads them, and what becomes of what it makes of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from datasets import Dataset

from nemo_opd.config.data import Source
from nemo_opd.config.on_policy import longest_prompt
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import CrossTokenizerTeacher
from nemo_opd.data.chat import CrossTokenizerChat
from nemo_opd.data.collate import collate
from nemo_opd.data.documents import TEACHER
from nemo_opd.data.encoders import ChatEncoder
from nemo_opd.data.prompts import read_prompts
from nemo_opd.data.record import Prompt, Rollout
from nemo_opd.data.rollouts import CrossTokenizerReader, CrossTokenizerText, RolloutSampleMaker
from nemo_opd.data.samples import SameTokenizer, Sample
from nemo_opd.data.sources import load_documents
from nemo_opd.errors import DataError
from nemo_opd.progress import working
from nemo_opd.rewards.build import build_reward, check_answers, compares_answers
from nemo_opd.rollout.environments import build_environment
from nemo_opd.rollout.prompts import dataset_rollout, drop_long
from nemo_opd.rollout.renderer import Renderer
from nemo_opd.training.columns import layout_of
from nemo_opd.training.same_tokenizer import same_tokenizer_reader
from nemo_opd.training.sampled_models import SampledModel, evaluated_teachers, sampled_model
from nemo_opd.training.side import Side
from nemo_opd.training.sides import aligner, longest
from nemo_opd.types import Batch


@dataclass(frozen=True)
class PromptSet:
    """Prompts that leave room for a response."""

    documents: Dataset
    rows: tuple[int, ...]
    """Of the documents that are kept."""
    num_dropped: int

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: Sequence[int]) -> list[Prompt]:
        return read_prompts(self.documents, [self.rows[i] for i in indices])

    def all(self) -> list[Prompt]:
        return self.read(range(len(self)))


@dataclass(frozen=True)
class Prompts:
    """All that turns prompts into what the student learns from."""

    train: PromptSet
    evaluation: PromptSet | None
    validation: PromptSet | None
    """With the dataset's own responses."""
    student: SampledModel
    evaluated_teachers: tuple[SampledModel, ...]
    """Active teachers, where they answer the questions of the evaluation."""
    sample_maker: RolloutSampleMaker
    teachers: tuple[str, ...]
    """Names, where the data name the teacher of each prompt."""
    noun: ClassVar[str] = "prompts"

    @property
    def renderer(self) -> Renderer:
        """The student's."""
        return self.student.renderer

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end what the student samples."""
        return self.student.end_ids

    def from_dataset(self, prompt: Prompt) -> Rollout:
        """With the continuation that the dataset has. Raises DataError where it has none."""
        return dataset_rollout(prompt, self.renderer, self.student.max_length)

    def make_sample(self, rollout: Rollout) -> Sample:
        """Raises AlignmentError where a teacher's chat template refuses the conversation."""
        sample = self.sample_maker(rollout)
        return replace(sample, route=self._routes[rollout.prompt.index]) if self.teachers else sample

    @cached_property
    def questions(self) -> list[Prompt]:
        """Of the evaluation."""
        assert self.evaluation is not None
        return self.evaluation.all()

    @cached_property
    def _routes(self) -> list[int]:
        """Of each row of the training prompts the teacher that it names."""
        return [self.teachers.index(name) for name in self.train.documents[TEACHER]]

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """All validation prompts with their responses once, in order."""
        assert self.validation is not None
        prompts = self.validation.all()
        for start in range(0, len(prompts), batch_size):
            part = prompts[start : start + batch_size]
            yield collate([self.sample_maker(self.from_dataset(prompt)) for prompt in part])


def check_users_code(config: RunConfig) -> None:
    """Raise ConfigError for a reward or an environment of the user's that cannot be imported, or is none."""
    if config.reward is not None:
        build_reward(config.reward).close()
    if config.environment is not None:
        build_environment(config.environment)


def load_prompts(config: RunConfig, student: Side, teachers: Sequence[Side]) -> Prompts:
    """Raises DataError for prompts that cannot be read, do not fit the reward, or of which none is left, and what
    `evaluated_teachers` raises.
    """
    assert config.rollout is not None
    own = sampled_model(config, config.student, student, "student", config.train.max_length)
    renderer = own.renderer
    train = prompt_set(config, renderer, config.data.train, "data.train")
    if config.rollout.on_policy_share < 1:
        require_responses(train, renderer, "data.train")
    validation = None
    if config.data.validation.given:
        validation = prompt_set(config, renderer, config.data.validation, "data.validation")
        require_responses(validation, renderer, "data.validation")
    evaluation = None
    evaluated: tuple[SampledModel, ...] = ()
    if config.evaluation is not None:
        evaluation = prompt_set(config, renderer, config.evaluation.data, "evaluation.data")
        if config.evaluation.teachers:
            evaluated = evaluated_teachers(config, teachers, evaluation.all())
    return Prompts(
        train=train,
        validation=validation,
        evaluation=evaluation,
        student=own,
        evaluated_teachers=evaluated,
        sample_maker=RolloutSampleMaker(
            student.pieces.lengths[: student.vocab_size],
            tuple(reader(config, i, student, teachers) for i in range(len(teachers))),
        ),
        teachers=config.active_names if config.routing is not None else (),
    )


def prompt_set(config: RunConfig, renderer: Renderer, source: Source, key: str) -> PromptSet:
    """Those that leave room for a response. Raises DataError, with the row, for what cannot be used."""
    with working(f"reading {key}"):
        documents = load_documents(source, layout_of(config), key=key)
        prompts = read_prompts(documents, range(len(documents)))
    if config.reward is not None and compares_answers(config.reward):
        check_answers(config.reward, prompts, source=key)
    way_out = "raise rollout.max_prompt_length or train.max_length, or lower rollout.max_new_tokens"
    kept = drop_long(prompts, renderer, longest_prompt(config), key=key, way_out=way_out)
    return PromptSet(documents, tuple(prompt.index for prompt in kept.prompts), kept.num_dropped)


def require_responses(prompts: PromptSet, renderer: Renderer, key: str) -> None:
    """Raises DataError, with the row, for the first that has none."""
    for prompt in prompts.all():
        if prompt.response is None:
            raise DataError(
                f"{key}: row {prompt.index} (counted from 0 over all files) has no response to learn from; name the "
                "column as data.response_key (texts), end the conversation with the assistant's message, or leave the "
                "row out"
            )


def reader(config: RunConfig, i: int, student: Side, teachers: Sequence[Side]) -> SameTokenizer | CrossTokenizerReader:
    """How teacher i reads what the student sampled."""
    settings, teacher = config.active_teachers[i], teachers[i]
    if not isinstance(settings, CrossTokenizerTeacher):
        return same_tokenizer_reader(config, i, student, teachers)
    length, between = longest(settings, teacher), aligner(settings, student, teacher)
    if config.data.messages_key is None:
        return CrossTokenizerText.of(teacher.tokenizer, length, between, teacher.vocab_size, settings.equal_history)
    encoder = ChatEncoder.of(teacher.tokenizer, length, settings.chat_template_kwargs, teacher.vocab_size)
    return CrossTokenizerChat(encoder, between, settings.equal_history)
