"""Evaluation on questions by the rewards of sampled and greedy answers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from nemo_opd.alignment.chat_template import content_text
from nemo_opd.config.evaluation import Questions, QuestionSet
from nemo_opd.config.rollout import Environment
from nemo_opd.data.context import Context
from nemo_opd.data.document_sources import load_documents
from nemo_opd.data.rollouts import read_prompts
from nemo_opd.data.row_types import Message, Prompt, Rollout
from nemo_opd.errors import DataError, RolloutError
from nemo_opd.evaluation.estimates import Estimate, maj_at_k, mean_with_interval, named, pass_at_k, with_bounds
from nemo_opd.evaluation.question_sets import ResolvedSet
from nemo_opd.logging.scores import ShownAnswer
from nemo_opd.progress import tracked, working
from nemo_opd.rewards import RewardFunction, check_answers
from nemo_opd.rollout.collect import Collector
from nemo_opd.rollout.engine_interface import Generator, Sampling
from nemo_opd.rollout.environment import build_environment
from nemo_opd.rollout.renderer import Renderer


@dataclass(frozen=True, slots=True)
class Answer:
    """A rollout and its reward."""

    rollout: Rollout
    reward: float
    vote: str | None
    """Text that is equal for equivalent answers, or None without an answer."""


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """A question with its answers."""

    prompt: Prompt
    sampled: tuple[Answer, ...]
    """n answers, in sample order."""
    greedy: Answer | None


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Estimates over questions, and all answers."""

    estimates: dict[str, Estimate]
    """pass@k, maj@k for k > 1 (for rewards that read an answer from a text), mean@n and greedy, over questions."""
    response_length: float
    """Mean number of tokens of sampled answers."""
    truncation_rate: float
    """Share of sampled answers that were truncated."""
    questions: tuple[AnsweredQuestion, ...]
    values: Mapping[str, tuple[float, ...]]
    """The values of all questions for each estimate, which is their mean."""
    name: str = ""
    """Name of the set, empty for the unnamed set."""
    levels: tuple[str, ...] = ()
    """Difficulty or kind of each question, if a column names it."""
    failures: tuple[str, ...] = ()
    """Errors of failed rewards; their answers count as wrong."""

    def failure_text(self, where: str) -> str:
        """Return a warning about failed rewards; there must be some. where: describes the answers."""
        return (
            f"{where}: the reward failed for {len(self.failures)} answers, which count as wrong; the first: "
            f"{self.failures[0]}"
        )

    @property
    def metrics(self) -> dict[str, float]:
        """Figures under their logged names: eval/<set>/pass@1, eval/<set>/pass@1_low, eval/<set>/pass@1_high, …"""
        figures = with_bounds(self.estimates)
        figures |= {"response_length": self.response_length, "truncation_rate": self.truncation_rate}
        if self.failures:
            figures["failed_rewards"] = len(self.failures)
        return named(figures, self.name)


def read_questions(resolved: ResolvedSet) -> list[Prompt]:
    """Return the questions, with the set's prompt around them.

    Raises DataError, naming the row, if a question cannot be read or does not fit the reward.
    """
    layout = resolved.layout
    with working(f"reading {resolved.key}"):
        documents = load_documents(resolved.settings.data, layout, key=resolved.key)
        prompts = read_prompts(documents, range(len(documents)), layout)
    check_answers(resolved.reward, prompts, source=resolved.key)
    settings = resolved.settings.context if isinstance(resolved.settings, QuestionSet) else None
    if settings is None:
        return prompts
    context = Context(settings, {name: name for name in settings.fields}, resolved.prefix.rstrip("."))
    return [_within(context, prompt, resolved.key) for prompt in prompts]


def _within(context: Context, prompt: Prompt, key: str) -> Prompt:
    try:
        return replace(prompt, content=context.content(prompt.content, prompt.row))
    except DataError as error:
        raise DataError(f"{key}: row {prompt.index} (counted from 0 over all files): {error}") from error


def ask(
    resolved: ResolvedSet,
    questions: Sequence[Prompt],
    reward: RewardFunction,
    engine: Generator,
    renderer: Renderer,
    *,
    max_new_tokens: int,
    max_length: int,
    environment: Environment | None,
    seed: int,
    failures_are_wrong: bool,
) -> EvaluationResult:
    """Ask a model the questions of a set.

    max_new_tokens: limit for a turn. max_length: limit for a sequence. Raises the errors of the engine, the environment
    and `evaluate_task`.
    """
    settings = resolved.settings
    collector = partial(
        Collector,
        engine,
        renderer,
        max_new_tokens=max_new_tokens,
        max_length=max_length,
        environment=None if environment is None else build_environment(environment),
        seed=seed,
        stop=settings.stop,
    )
    sampled = collector(sampling=Sampling(settings.temperature, settings.top_p, settings.top_k, needs_raw=False))
    greedy = collector(sampling=Sampling(temperature=0.0, needs_raw=False)) if settings.greedy else None
    result = evaluate_task(
        greedy, sampled, questions, reward, settings, name=resolved.name, failures_are_wrong=failures_are_wrong
    )
    return replace(result, levels=resolved.levels(questions))


def evaluate_task(
    collector_greedy: Collector | None,
    collector_sampled: Collector,
    prompts: Sequence[Prompt],
    reward: RewardFunction,
    settings: Questions,
    *,
    name: str = "",
    failures_are_wrong: bool = False,
) -> EvaluationResult:
    """Ask each question n times, and once more for the greedy answer if there is a `collector_greedy`.

    name: name of the set. failures_are_wrong: count answers whose reward fails as wrong, with reward 0, unless all
    fail. Raises DataError without prompts, and RolloutError if answers are missing or a reward fails.
    """
    if not prompts:
        raise DataError("there are no questions to evaluate on; name some under evaluation.data")
    judge = _Judge(reward, failures_are_wrong)
    sampled = _answers(collector_sampled, prompts, settings.n, judge)
    greedy = {} if collector_greedy is None else _answers(collector_greedy, prompts, 1, judge)
    judge.require_some()
    questions = tuple(
        AnsweredQuestion(prompt, sampled[prompt.index], greedy[prompt.index][0] if greedy else None)
        for prompt in prompts
    )
    rollouts = [answer.rollout for question in questions for answer in question.sampled]
    values = _values(questions, settings, has_votes=reward.votes)
    return EvaluationResult(
        {name: mean_with_interval(by_question, settings.confidence) for name, by_question in values.items()},
        response_length=fmean(rollout.num_sampled for rollout in rollouts),
        truncation_rate=fmean(rollout.finish_reason == "length" for rollout in rollouts),
        questions=questions,
        values=values,
        name=name,
        failures=tuple(judge.failures),
    )


class _Judge:
    """A reward, with its failures."""

    def __init__(self, reward: RewardFunction, failures_are_wrong: bool) -> None:
        self.reward, self._failures_are_wrong = reward, failures_are_wrong
        self.failures: list[str] = []
        self._num_judged = 0

    def __call__(self, rollout: Rollout) -> Answer:
        """Judge an answer. Raises RolloutError if the reward fails, unless such answers count as wrong."""
        self._num_judged += 1
        try:
            return Answer(rollout, self.reward(rollout), self.reward.vote(rollout))
        except RolloutError as error:
            if not self._failures_are_wrong:
                raise
            self.failures.append(str(error))
            return Answer(rollout, 0.0, None)

    def require_some(self) -> None:
        """Raise RolloutError if the reward failed for every answer."""
        if self.failures and len(self.failures) == self._num_judged:
            raise RolloutError(f"the reward failed for all {self._num_judged} answers; the first: {self.failures[0]}")


def _answers(collector: Collector, prompts: Sequence[Prompt], n: int, judge: _Judge) -> dict[int, tuple[Answer, ...]]:
    """Return n answers to each prompt in sample order, keyed by the prompt's index."""
    answers: dict[int, list[Answer]] = {prompt.index: [] for prompt in prompts}
    # Always step 0, so that evaluations use the same randomness and differ only by the model.
    rollouts = collector.collect(prompts, n, 0)
    judge.reward.begin()
    judge.reward.expect(rollouts)
    for rollout in tracked(rollouts, "judging answers", "answers"):
        answers[rollout.prompt.index].append(judge(rollout))
    for index, prompt_answers in answers.items():
        if len(prompt_answers) != n:
            raise RolloutError(f"evaluation: prompt {index} has {len(prompt_answers)} answers instead of {n}")
        prompt_answers.sort(key=lambda answer: answer.rollout.sample)
    return {index: tuple(prompt_answers) for index, prompt_answers in answers.items()}


def _values(
    questions: Sequence[AnsweredQuestion], settings: Questions, *, has_votes: bool
) -> dict[str, tuple[float, ...]]:
    """Return the value of each question, keyed by estimate in display order."""
    values: dict[str, list[float]] = {}
    correct = [[_is_correct(answer, settings) for answer in question.sampled] for question in questions]
    for k in settings.k:
        values[f"pass@{k}"] = [pass_at_k(sum(is_correct), settings.n, k) for is_correct in correct]
    for k in (k for k in settings.k if has_votes and k > 1):  # maj@1 is pass@1
        values[f"maj@{k}"] = [
            # A single seed would draw the same subsets for every question, so that their errors would add up.
            maj_at_k([answer.vote for answer in question.sampled], is_correct, k, seed=question.prompt.index)
            for question, is_correct in zip(questions, correct, strict=True)
        ]
    values[f"mean@{settings.n}"] = [fmean(answer.reward for answer in question.sampled) for question in questions]
    greedy = [float(_is_correct(question.greedy, settings)) for question in questions if question.greedy is not None]
    if greedy:
        values["greedy"] = greedy
    return {name: tuple(by_question) for name, by_question in values.items()}


def _is_correct(answer: Answer, settings: Questions) -> bool:
    return answer.reward >= settings.correct_reward


def shown_answers(result: EvaluationResult, step: int, limit: int, teacher: str | None = None) -> list[ShownAnswer]:
    """Return one answer to each of the first `limit` questions: the greedy one if there is one, else the first sample.

    teacher: name of the teacher that answered, or None for the student.
    """
    return [
        _convert(question, question.greedy or question.sampled[0], step, result.name, teacher)
        for question in result.questions[:limit]
    ]


def all_answers(result: EvaluationResult) -> Iterator[ShownAnswer]:
    """Yield all answers, question by question, with step 0."""
    for question in result.questions:
        for answer in (question.greedy, *question.sampled):
            if answer is not None:
                yield _convert(question, answer, 0, result.name)


def _convert(
    question: AnsweredQuestion, answer: Answer, step: int, name: str, teacher: str | None = None
) -> ShownAnswer:
    rollout, content = answer.rollout, question.prompt.content
    return ShownAnswer(
        step=step,
        question=question.prompt.index,
        kind="greedy" if answer is question.greedy else "sampled",
        sample=rollout.sample,
        prompt=content if isinstance(content, str) else _conversation(content),
        answer=question.prompt.answer,
        response=_response_text(rollout),
        reward=answer.reward,
        finish_reason=rollout.finish_reason,
        num_tokens=rollout.num_sampled,
        teacher=teacher,
        set=name,
    )


def _response_text(rollout: Rollout) -> str:
    """Return the model's text, or the conversation after the prompt if an environment took part."""
    if len(rollout.responses) == 1 or isinstance(rollout.prompt.content, str):
        return "\n".join(rollout.responses)
    return _conversation(rollout.messages[len(rollout.prompt.content) :])


def _conversation(messages: Sequence[Message]) -> str:
    """Join messages as `role: content` with blank lines between; return a single user message's content only."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return content_text(messages[0])
    return "\n\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)
