"""Catches figures of the wrong answers, answers that go to other questions, and missing ones that go unseen."""

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
SAID = {4: ["4", "4", "5", "none"], 9: ["7", "6", "7", "8"]}


class Speaks:
    """Says what it is told to, in another order than it was asked."""

    def __init__(self, said: dict[int, list[str]], *, leave_out: int = 0) -> None:
        self.said, self.leave_out, self.steps = said, leave_out, list[int]()

    def collect(self, prompts: Sequence[Prompt], n: int, step: int) -> list[Rollout]:
        self.steps.append(step)
        made = [self.one(prompt, sample) for prompt in prompts for sample in range(n)]
        return made[::-1][self.leave_out :]

    def one(self, prompt: Prompt, sample: int) -> Rollout:
        said = self.said[prompt.index][sample]
        finish = "length" if said == "none" else "stop"
        mask = np.arange(3) >= 3 - len(said) // 2
        return replace(rollout(said), prompt=prompt, sample=sample, finish_reason=finish, loss_mask=mask)


def evaluated(settings: Questions, *, greedy: bool = True) -> EvaluationResult:
    likeliest = Speaks({4: ["4"], 9: ["0"]}) if greedy else None
    return evaluate_task(likeliest, Speaks(SAID), PROMPTS, build_reward(NumericReward()), settings)


def test_figures_of_answers_that_were_counted_by_hand() -> None:
    found = evaluated(Questions(n=4, k=(1, 2, 4)))
    values = {name: estimate.value for name, estimate in found.estimates.items()}

    assert list(values) == ["pass@1", "pass@2", "pass@4", "maj@2", "maj@4", "mean@4", "greedy"]
    assert values["pass@1"] == values["mean@4"] == pytest.approx(fmean([2 / 4, 1 / 4]))
    assert values["pass@2"] == pytest.approx(fmean([5 / 6, 3 / 6]))
    assert values["pass@4"] == 1
    # Pairs of 4 4 5 –: only 5 – elects 5; of 7 6 7 8 the two of (6, 7) and (6, 8) in which 6 is first elect it.
    assert values["maj@2"] == pytest.approx(fmean([5 / 6, 2 / 6]))
    assert values["maj@4"] == pytest.approx(fmean([1, 0]))
    assert values["greedy"] == 0.5
    assert found.estimates["greedy"] == wilson(1, 2, 0.95)
    assert found.truncation_rate == 1 / 8
    assert found.response_length == pytest.approx(2 / 8)  # `none` alone has two tokens by the fake's mask


def test_metrics_are_named_as_they_are_logged() -> None:
    metrics = evaluated(Questions(n=4, k=(4,))).metrics

    assert set(metrics) == {
        *(f"eval/{name}{end}" for name in ("pass@4", "maj@4", "mean@4", "greedy") for end in ("", "_low", "_high")),
        "eval/response_length",
        "eval/truncation_rate",
    }
    for name in ("pass@4", "maj@4", "mean@4", "greedy"):
        assert metrics[f"eval/{name}_low"] <= metrics[f"eval/{name}"] <= metrics[f"eval/{name}_high"]


def test_what_counts_as_correct_is_a_reward_and_mean_is_of_rewards() -> None:
    class Pays(Speaks):
        def one(self, prompt: Prompt, sample: int) -> Rollout:
            return replace(super().one(prompt, sample), env_reward=[0.0, 0.5, 0.7, -2.0][sample])

    found = evaluate_task(
        None, Pays(SAID), PROMPTS, build_reward(EnvironmentReward()), Questions(n=4, k=(1,), correct_reward=0.5)
    )

    assert list(found.estimates) == ["pass@1", "mean@4"]  # what an environment pays for has no votes
    assert found.estimates["pass@1"].value == 0.5
    assert found.estimates["mean@4"].value == pytest.approx(-0.2)


def test_each_question_keeps_its_answers_in_order() -> None:
    found = evaluated(Questions(n=4))

    for question in found.questions:
        assert [answer.rollout.responses[0] for answer in question.sampled] == SAID[question.prompt.index]


def test_every_evaluation_samples_as_in_step_0() -> None:
    """Bug: evaluations of a run that differ by their randomness, and not by the model alone."""
    collector = Speaks(SAID)
    evaluate_task(None, collector, PROMPTS, build_reward(NumericReward()), Questions(n=1))

    assert collector.steps == [0]


def test_missing_answers_are_an_error() -> None:
    with pytest.raises(RolloutError, match="prompt 4 has 3 answers instead of 4"):
        evaluate_task(None, Speaks(SAID, leave_out=5), PROMPTS, build_reward(NumericReward()), Questions(n=4))


class Fails(NumericMatch):
    """For some answers."""

    def __init__(self, *answers: str) -> None:
        super().__init__(NumericReward())
        self.answers = answers

    def score(self, given: Rollout) -> float:
        return math.nan if given.responses[0] in self.answers else super().score(given)


def test_an_answer_whose_reward_fails_is_wrong_and_told() -> None:
    """Bug: one row of many that ends the evaluation, or leaves its question out of the mean."""
    settings = Questions(n=4, k=(1,))
    found = evaluate_task(None, Speaks(SAID), PROMPTS, Fails("5", "8"), settings, failures_are_wrong=True)

    assert found.estimates["pass@1"].value == pytest.approx(fmean([2 / 4, 1 / 4]))
    assert found.metrics["eval/failed_rewards"] == len(found.failures) == 2
    assert "prompt 9, sample 3: it returned nan" in " ".join(found.failures)
    assert "eval/failed_rewards" not in evaluated(settings).metrics


@pytest.mark.parametrize(
    ("fails", "bears", "says"), [(("5",), False, "prompt 4"), (("4", "5", "none", "7", "6", "8"), True, "all 8")]
)
def test_a_reward_that_fails_always_or_may_not_fail_is_an_error(fails: tuple[str, ...], bears: bool, says: str) -> None:
    with pytest.raises(RolloutError, match=says):
        evaluate_task(None, Speaks(SAID), PROMPTS, Fails(*fails), Questions(n=4), failures_are_wrong=bears)


def test_figures_of_a_set_have_its_name() -> None:
    found = evaluate_task(None, Speaks(SAID), PROMPTS, Fails(), Questions(n=4, k=(4,)), name="sums")
    assert {"eval/sums/pass@4", "eval/sums/pass@4_low", "eval/sums/response_length"} <= found.metrics.keys()
    assert found.values["pass@4"] == (1, 1)


def test_no_questions_are_an_error() -> None:
    with pytest.raises(DataError, match="no questions"):
        evaluate_task(None, Speaks(SAID), [], build_reward(NumericReward()), Questions())


def test_shown_are_the_likeliest_answers_where_there_are() -> None:
    settings = Questions(n=4)
    shown = shown_answers(evaluated(settings), step=30, limit=1)

    assert [(one.step, one.question, one.kind, one.response, one.reward) for one in shown] == [
        (30, 4, "greedy", "4", 1)
    ]
    assert [one.kind for one in shown_answers(evaluated(settings, greedy=False), step=30, limit=5)] == ["sampled"] * 2
    assert {one.teacher for one in shown} == {None}
    assert {one.teacher for one in shown_answers(evaluated(settings), 0, 5, "big")} == {"big"}
    assert len(list(all_answers(evaluated(settings)))) == 10


def test_a_conversation_is_shown_as_it_went() -> None:
    prompt = Prompt(4, [{"role": "user", "content": "2 + 2?"}], answer="4")
    said = [{"role": "assistant", "content": "call"}, {"role": "tool", "content": "4"}]
    several = replace(
        rollout(""),
        prompt=prompt,
        sample=0,
        responses=("call", "It is 4"),
        messages=(*prompt.content, *said, {"role": "assistant", "content": "It is 4"}),  # type: ignore[arg-type]
    )

    class Converses(Speaks):
        def one(self, prompt: Prompt, sample: int) -> Rollout:
            return several

    found = evaluate_task(None, Converses({}), [prompt], build_reward(NumericReward()), Questions())
    (shown,) = shown_answers(found, step=0, limit=1)

    assert shown.prompt == "2 + 2?"
    assert shown.response == "assistant: call\n\ntool: 4\n\nassistant: It is 4"
    assert shown.reward == 1
