"""Catches figures of the wrong answers, answers assigned to other questions, and missing answers without an error."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from nemo_opd.config.evaluation import Questions
from nemo_opd.config.reward import EnvironmentReward, NumericReward
from nemo_opd.data.row_types import Prompt, Rollout
from nemo_opd.errors import DataError, RolloutError
from nemo_opd.evaluation.estimates import wilson
from nemo_opd.evaluation.questions import EvaluationResult, all_answers, evaluate_task, shown_answers
from nemo_opd.rewards import build_reward
from nemo_opd.rewards.numeric import NumericMatch
from tests.rewards.rollouts import rollout

PROMPTS = [Prompt(4, "2 + 2 = ", answer="4"), Prompt(9, "3 + 3 = ", answer="6")]
ANSWERS = {4: ["4", "4", "5", "none"], 9: ["7", "6", "7", "8"]}


class Scripted:
    """Returns scripted answers keyed by question, in reverse order, without the first `leave_out`."""

    def __init__(self, answers: dict[int, list[str]], *, leave_out: int = 0) -> None:
        self.answers, self.leave_out, self.steps = answers, leave_out, list[int]()

    def collect(self, prompts: Sequence[Prompt], n: int, step: int) -> list[Rollout]:
        self.steps.append(step)
        rollouts = [self.one(prompt, sample) for prompt in prompts for sample in range(n)]
        return rollouts[::-1][self.leave_out :]

    def one(self, prompt: Prompt, sample: int) -> Rollout:
        answer = self.answers[prompt.index][sample]
        finish = "length" if answer == "none" else "stop"
        mask = np.arange(3) >= 3 - len(answer) // 2
        return replace(rollout(answer), prompt=prompt, sample=sample, finish_reason=finish, loss_mask=mask)


def evaluated(settings: Questions, *, greedy: bool = True) -> EvaluationResult:
    likeliest = Scripted({4: ["4"], 9: ["0"]}) if greedy else None
    return evaluate_task(likeliest, Scripted(ANSWERS), PROMPTS, build_reward(NumericReward()), settings)


def test_figures_of_answers_that_were_counted_by_hand() -> None:
    result = evaluated(Questions(n=4, k=(1, 2, 4)))
    values = {name: estimate.value for name, estimate in result.estimates.items()}

    assert list(values) == ["pass@1", "pass@2", "pass@4", "maj@2", "maj@4", "mean@4", "greedy"]
    assert values["pass@1"] == values["mean@4"] == pytest.approx(fmean([2 / 4, 1 / 4]))
    assert values["pass@2"] == pytest.approx(fmean([5 / 6, 3 / 6]))
    assert values["pass@4"] == 1
    # Pairs of 4 4 5 –: only (5, –) elects 5. Pairs of 7 6 7 8: only (6, 7) and (6, 8) have 6 first and elect it.
    assert values["maj@2"] == pytest.approx(fmean([5 / 6, 2 / 6]))
    assert values["maj@4"] == pytest.approx(fmean([1, 0]))
    assert values["greedy"] == 0.5
    assert result.estimates["greedy"] == wilson(1, 2, 0.95)
    assert result.truncation_rate == 1 / 8
    assert result.response_length == pytest.approx(2 / 8)  # `none` alone has two tokens by the fake's mask


def test_metrics_are_named_as_they_are_logged() -> None:
    metrics = evaluated(Questions(n=4, k=(4,))).metrics

    assert set(metrics) == {
        *(f"eval/{name}{end}" for name in ("pass@4", "maj@4", "mean@4", "greedy") for end in ("", "_low", "_high")),
        "eval/response_length",
        "eval/truncation_rate",
    }
    for name in ("pass@4", "maj@4", "mean@4", "greedy"):
        assert metrics[f"eval/{name}_low"] <= metrics[f"eval/{name}"] <= metrics[f"eval/{name}_high"]


def test_pass_compares_with_correct_reward_and_mean_averages_rewards() -> None:
    class Pays(Scripted):
        def one(self, prompt: Prompt, sample: int) -> Rollout:
            return replace(super().one(prompt, sample), env_reward=[0.0, 0.5, 0.7, -2.0][sample])

    result = evaluate_task(
        None, Pays(ANSWERS), PROMPTS, build_reward(EnvironmentReward()), Questions(n=4, k=(1,), correct_reward=0.5)
    )

    assert list(result.estimates) == ["pass@1", "mean@4"]  # rewards of an environment have no votes
    assert result.estimates["pass@1"].value == 0.5
    assert result.estimates["mean@4"].value == pytest.approx(-0.2)


def test_each_question_keeps_its_answers_in_order() -> None:
    result = evaluated(Questions(n=4))

    for question in result.questions:
        assert [answer.rollout.responses[0] for answer in question.sampled] == ANSWERS[question.prompt.index]


def test_every_evaluation_samples_as_in_step_0() -> None:
    """Bug: evaluations of a run that differ by their seeds as well as by the model."""
    collector = Scripted(ANSWERS)
    evaluate_task(None, collector, PROMPTS, build_reward(NumericReward()), Questions(n=1))

    assert collector.steps == [0]


def test_missing_answers_are_an_error() -> None:
    with pytest.raises(RolloutError, match="prompt 4 has 3 answers instead of 4"):
        evaluate_task(None, Scripted(ANSWERS, leave_out=5), PROMPTS, build_reward(NumericReward()), Questions(n=4))


class Fails(NumericMatch):
    """A reward that returns NaN for some answers."""

    def __init__(self, *answers: str) -> None:
        super().__init__(NumericReward())
        self.answers = answers

    def score(self, answer: Rollout) -> float:
        return math.nan if answer.responses[0] in self.answers else super().score(answer)


def test_an_answer_with_a_failed_reward_is_wrong_and_reported() -> None:
    """Bug: one failed reward ends the evaluation, or removes its question from the mean."""
    settings = Questions(n=4, k=(1,))
    result = evaluate_task(None, Scripted(ANSWERS), PROMPTS, Fails("5", "8"), settings, failures_are_wrong=True)

    assert result.estimates["pass@1"].value == pytest.approx(fmean([2 / 4, 1 / 4]))
    assert result.metrics["eval/failed_rewards"] == len(result.failures) == 2
    assert "prompt 9, sample 3: it returned nan" in " ".join(result.failures)
    assert "eval/failed_rewards" not in evaluated(settings).metrics


@pytest.mark.parametrize(
    ("answers", "tolerated", "message"),
    [(("5",), False, "prompt 4"), (("4", "5", "none", "7", "6", "8"), True, "all 8")],
)
def test_a_reward_that_always_fails_or_may_not_fail_is_an_error(
    answers: tuple[str, ...], tolerated: bool, message: str
) -> None:
    with pytest.raises(RolloutError, match=message):
        evaluate_task(None, Scripted(ANSWERS), PROMPTS, Fails(*answers), Questions(n=4), failures_are_wrong=tolerated)


def test_figures_of_a_set_have_its_name() -> None:
    result = evaluate_task(None, Scripted(ANSWERS), PROMPTS, Fails(), Questions(n=4, k=(4,)), name="sums")
    assert {"eval/sums/pass@4", "eval/sums/pass@4_low", "eval/sums/response_length"} <= result.metrics.keys()
    assert result.values["pass@4"] == (1, 1)


def test_no_questions_are_an_error() -> None:
    with pytest.raises(DataError, match="no questions"):
        evaluate_task(None, Scripted(ANSWERS), [], build_reward(NumericReward()), Questions())


def test_greedy_answers_are_shown_if_there_are_any() -> None:
    settings = Questions(n=4)
    answers = shown_answers(evaluated(settings), step=30, limit=1)

    assert [(answer.step, answer.question, answer.kind, answer.response, answer.reward) for answer in answers] == [
        (30, 4, "greedy", "4", 1)
    ]
    assert [answer.kind for answer in shown_answers(evaluated(settings, greedy=False), step=30, limit=5)] == [
        "sampled"
    ] * 2
    assert {answer.teacher for answer in answers} == {None}
    assert {answer.teacher for answer in shown_answers(evaluated(settings), 0, 5, "big")} == {"big"}
    assert len(list(all_answers(evaluated(settings)))) == 10


def test_a_conversation_is_shown_as_it_went() -> None:
    prompt = Prompt(4, [{"role": "user", "content": "2 + 2?"}], answer="4")
    reply = [{"role": "assistant", "content": "call"}, {"role": "tool", "content": "4"}]
    several = replace(
        rollout(""),
        prompt=prompt,
        sample=0,
        responses=("call", "It is 4"),
        messages=(*prompt.content, *reply, {"role": "assistant", "content": "It is 4"}),  # type: ignore[arg-type]
    )

    class Converses(Scripted):
        def one(self, prompt: Prompt, sample: int) -> Rollout:
            return several

    result = evaluate_task(None, Converses({}), [prompt], build_reward(NumericReward()), Questions())
    (answer,) = shown_answers(result, step=0, limit=1)

    assert answer.prompt == "2 + 2?"
    assert answer.response == "assistant: call\n\ntool: 4\n\nassistant: It is 4"
    assert answer.reward == 1
