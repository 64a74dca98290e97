"""Evaluation on questions by the rewards of sampled and greedy answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from nemo_opd.config.evaluation import Questions
from nemo_opd.data.record import Prompt, Rollout
from nemo_opd.errors import DataError, RolloutError
from nemo_opd.evaluation.estimates import Estimate, maj_at_k, mean_with_interval, pass_at_k
from nemo_opd.logging.score_keys import PREFIX
from nemo_opd.progress import tracked
from nemo_opd.rewards import RewardFunction
from nemo_opd.rollout.collect import Collector


def named(figures: Mapping[str, float], name: str) -> dict[str, float]:
    """Return a set's figures under their logged names, such as eval/<set>/pass@1; name: '' for the unnamed set."""
    prefix = f"{PREFIX}{name}/" if name else PREFIX
    return {f"{prefix}{figure}": value for figure, value in figures.items()}


def with_bounds(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """Return each estimate's value and the bounds of its interval: pass@1, pass@1_low, pass@1_high, …"""
    figures: dict[str, float] = {}
    for name, estimate in estimates.items():
        figures |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return figures


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
    for k in settings.k:
        values[f"pass@{k}"] = [_pass(question, settings, k) for question in questions]
    for k in (k for k in settings.k if has_votes and k > 1):  # maj@1 is pass@1
        values[f"maj@{k}"] = [_majority(question, settings, k) for question in questions]
    values[f"mean@{settings.n}"] = [fmean(answer.reward for answer in question.sampled) for question in questions]
    greedy = [float(_is_correct(question.greedy, settings)) for question in questions if question.greedy is not None]
    if greedy:
        values["greedy"] = greedy
    return {name: tuple(by_question) for name, by_question in values.items()}


def _is_correct(answer: Answer, settings: Questions) -> bool:
    return answer.reward >= settings.correct_reward


def _pass(question: AnsweredQuestion, settings: Questions, k: int) -> float:
    return pass_at_k(sum(_is_correct(answer, settings) for answer in question.sampled), settings.n, k)


def _majority(question: AnsweredQuestion, settings: Questions, k: int) -> float:
    votes = [answer.vote for answer in question.sampled]
    correct = [_is_correct(answer, settings) for answer in question.sampled]
    # A single seed would draw the same subsets for every question, so that their errors would add up.
    return maj_at_k(votes, correct, k, seed=question.prompt.index)
