"""Evaluation on questions: sampled answers, the likeliest one, and their rewards."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from nemo_opd.config.evaluation import Questions
from nemo_opd.data.record import Prompt, Rollout
from nemo_opd.errors import DataError, RolloutError
from nemo_opd.evaluation.estimates import Estimate, maj_at_k, mean_with_interval, pass_at_k
from nemo_opd.progress import tracked
from nemo_opd.rewards import RewardFunction
from nemo_opd.rollout.collect import Collector

PREFIX = "eval/"


@dataclass(frozen=True, slots=True)
class Answer:
    """A rollout and its reward."""

    rollout: Rollout
    reward: float
    vote: str | None
    """Text that is equal for answers that mean the same; None where there is no answer."""


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """A question with its answers."""

    prompt: Prompt
    sampled: tuple[Answer, ...]
    """n answers, in the order of samples."""
    greedy: Answer | None


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Estimates over questions, and all answers."""

    estimates: dict[str, Estimate]
    """pass@k, maj@k for k > 1 (for rewards that read an answer from a text), mean@n and greedy, over questions."""
    response_length: float
    """Tokens; mean over sampled answers."""
    truncation_rate: float
    """Share of sampled answers that were cut."""
    questions: tuple[AnsweredQuestion, ...]

    @property
    def metrics(self) -> dict[str, float]:
        """Figures as they are logged: eval/pass@1, eval/pass@1_low, eval/pass@1_high, …"""
        figures: dict[str, float] = {}
        for name, estimate in self.estimates.items():
            figures[f"{PREFIX}{name}"] = estimate.value
            figures[f"{PREFIX}{name}_low"], figures[f"{PREFIX}{name}_high"] = estimate.low, estimate.high
        return figures | {
            f"{PREFIX}response_length": self.response_length,
            f"{PREFIX}truncation_rate": self.truncation_rate,
        }


def evaluate_task(
    collector_greedy: Collector | None,
    collector_sampled: Collector,
    prompts: Sequence[Prompt],
    reward: RewardFunction,
    settings: Questions,
    step: int = 0,
) -> EvaluationResult:
    """Ask each question n times, and once more for the likeliest answer where there is a `collector_greedy`.

    `step` is passed to the collectors: with the same one, evaluations differ by the model alone. Raises DataError
    without prompts, and RolloutError where answers are missing or a reward is no number.
    """
    if not prompts:
        raise DataError("there are no questions to evaluate on; name some under evaluation.data")
    sampled = _answers(collector_sampled, prompts, settings.n, step, reward)
    greedy = {} if collector_greedy is None else _answers(collector_greedy, prompts, 1, step, reward)
    questions = tuple(
        AnsweredQuestion(prompt, sampled[prompt.index], greedy[prompt.index][0] if greedy else None)
        for prompt in prompts
    )
    rollouts = [answer.rollout for question in questions for answer in question.sampled]
    return EvaluationResult(
        _estimates(questions, settings, has_votes=reward.votes),
        response_length=fmean(rollout.num_sampled for rollout in rollouts),
        truncation_rate=fmean(rollout.finish_reason == "length" for rollout in rollouts),
        questions=questions,
    )


def _answers(
    collector: Collector, prompts: Sequence[Prompt], n: int, step: int, reward: RewardFunction
) -> dict[int, tuple[Answer, ...]]:
    """Return the answers by the prompt's index."""
    answers: dict[int, list[Answer]] = {prompt.index: [] for prompt in prompts}
    reward.begin()
    for rollout in tracked(collector.collect(prompts, n, step), "judging answers", "answers", len(prompts) * n):
        answers[rollout.prompt.index].append(Answer(rollout, reward(rollout), reward.vote(rollout)))
    for index, own in answers.items():
        if len(own) != n:
            raise RolloutError(f"evaluation: prompt {index} came back with {len(own)} answers instead of {n}")
    return {index: tuple(sorted(own, key=lambda answer: answer.rollout.sample)) for index, own in answers.items()}


def _estimates(questions: Sequence[AnsweredQuestion], settings: Questions, *, has_votes: bool) -> dict[str, Estimate]:
    """Return means over questions by name, in the order in which they are shown."""
    values: dict[str, list[float]] = {}
    for k in settings.k:
        values[f"pass@{k}"] = [_pass(question, settings, k) for question in questions]
    for k in (k for k in settings.k if has_votes and k > 1):  # maj@1 is pass@1
        values[f"maj@{k}"] = [_majority(question, settings, k) for question in questions]
    values[f"mean@{settings.n}"] = [fmean(answer.reward for answer in question.sampled) for question in questions]
    greedy = [float(_is_correct(question.greedy, settings)) for question in questions if question.greedy is not None]
    if greedy:
        values["greedy"] = greedy
    return {name: mean_with_interval(own, settings.confidence) for name, own in values.items()}


def _is_correct(answer: Answer, settings: Questions) -> bool:
    return answer.reward >= settings.correct_reward


def _pass(question: AnsweredQuestion, settings: Questions, k: int) -> float:
    return pass_at_k(sum(_is_correct(answer, settings) for answer in question.sampled), settings.n, k)


def _majority(question: AnsweredQuestion, settings: Questions, k: int) -> float:
    votes = [answer.vote for answer in question.sampled]
    correct = [_is_correct(answer, settings) for answer in question.sampled]
    # With one seed for all, the same subsets would be drawn for every question, and their errors would add up.
    return maj_at_k(votes, correct, k, seed=question.prompt.index)
