"""Catches rewards that judge the wrong text, results that are not numbers, and answers that cannot be compared with."""

import math
import re
import signal
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from nemo_opd.config.reward import Reward, SourceReward, WeightedReward
from nemo_opd.config.settings import YEAR_S
from nemo_opd.data.row_types import Prompt
from nemo_opd.errors import ConfigError, DataError, RolloutError
from nemo_opd.rewards import RewardFunction, build_reward, check_answer, check_answers
from nemo_opd.rewards.configured import REWARDS
from tests.rewards.rollouts import rollout

mine = types.ModuleType("rewards_of_a_test")


def settings(**values: Any) -> Any:
    return TypeAdapter(Reward).validate_python(values)


def users_reward(**options: Any) -> RewardFunction:
    return build_reward(settings(type="function", function=f"{mine.__name__}:judge", **options))


@pytest.fixture(autouse=True)
def users_module() -> Iterator[types.ModuleType]:
    sys.modules[mine.__name__] = mine
    yield mine
    del sys.modules[mine.__name__]


def test_every_type_of_reward_can_be_built() -> None:
    union, _ = get_args(Reward)
    assert set(get_args(union)) == REWARDS.keys() | {WeightedReward, SourceReward}


@pytest.mark.parametrize(
    ("reward", "response", "answer", "value"),
    [
        ({"type": "exact"}, " Paris\n", "Paris", 1),
        ({"type": "exact"}, "paris", "Paris", 0),
        ({"type": "exact", "ignore_case": True}, "paris", "Paris", 1),
        ({"type": "numeric"}, "3 + 4 = 7", "7", 1),
        ({"type": "numeric"}, "7, not 8", "7", 0),
        ({"type": "numeric"}, "I do not know", "7", 0),
        ({"type": "numeric", "tolerance": 0.01}, "99.5", "100", 1),
        ({"type": "numeric"}, "It costs $1,200.", "#### 1200", 1),
        ({"type": "math"}, r"\boxed{1} no, \boxed{2}", "2", 1),
        ({"type": "math"}, "2", "2", 0),
        ({"type": "math"}, r"\boxed{2}", r"\boxed{2}", 1),
        ({"type": "math"}, r"\boxed{2}", r"$2$", 1),
    ],
)
def test_the_last_turn_is_compared_with_the_answer(
    reward: dict[str, Any], response: str, answer: str, value: float
) -> None:
    with build_reward(settings(**reward)) as judge:
        assert judge(rollout(response, answer)) == value


def test_the_environment_pays() -> None:
    judge = build_reward(settings(type="environment"))

    assert judge(rollout("", env_reward=-0.5)) == -0.5
    with pytest.raises(RolloutError, match="no environment"):
        judge(rollout(""))


@pytest.mark.parametrize("value", [1, True, 0.5, np.float32(0.5), np.bool_(True), np.int64(3)])
def test_a_users_function_is_called_with_the_rollout(users_module: types.ModuleType, value: Any) -> None:
    users_module.judge = lambda answered: value if answered.responses == ("hello",) else None  # type: ignore[attr-defined]
    judged = users_reward()(rollout("hello"))

    assert type(judged) is float
    assert judged == float(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "1", [1.0], 10**400, 1e300, np.float32("nan")])
def test_a_result_that_is_not_a_finite_number_is_an_error_with_the_sample(
    users_module: types.ModuleType, value: Any
) -> None:
    users_module.judge = lambda _: value  # type: ignore[attr-defined]
    judge = users_reward()

    with pytest.raises(RolloutError, match=r"reward rewards_of_a_test:judge, prompt 7, sample 2: it returned"):
        judge(rollout("hello"))


@pytest.mark.parametrize("end", ["raise SystemExit(0)", "import sys; sys.exit('bye')", "raise GeneratorExit"])
def test_a_function_that_exits_is_an_error_with_the_sample(users_module: types.ModuleType, end: str) -> None:
    """Bug: the run exits with status 0, without a message or a checkpoint."""
    exec(f"def judge(rollout): {end}", vars(users_module))
    with pytest.raises(RolloutError, match=r"reward rewards_of_a_test:judge, prompt 7, sample 2: it raised \w+Exit"):
        users_reward()(rollout("hello"))


SPELLINGS = {
    "loop": "while not ended.is_set(): pass",
    "waits": "ended.wait()",
    "handles all": "exec('while 1:\\n try:\\n  while not ended.is_set(): pass\\n  break\\n except Exception: pass')",
    "handles it once": "exec('try:\\n while not ended.is_set(): pass\\nexcept BaseException: pass')",
}
"""Bodies that end only with the test: a thread that went on would slow later tests in this process."""


@pytest.mark.parametrize("body", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_function_that_does_not_return_has_a_limit(
    users_module: types.ModuleType, body: str, in_thread: bool
) -> None:
    """Bug: no limit in the thread that samples ahead."""
    users_module.ended = threading.Event()  # type: ignore[attr-defined]
    exec(f"def judge(rollout):\n {body}", vars(users_module))
    judge = users_reward(call_timeout_s=0.1)
    try:
        with ThreadPoolExecutor(1) as thread, pytest.raises(RolloutError) as caught:
            thread.submit(judge, rollout("hello")).result() if in_thread else judge(rollout("hello"))
    finally:
        users_module.ended.set()
    assert str(caught.value) == (
        "reward rewards_of_a_test:judge, prompt 7, sample 2: it did not return in 0.1 s (reward.call_timeout_s)"
    )


@pytest.mark.parametrize("in_thread", [False, True])
def test_the_longest_limit_works(users_module: types.ModuleType, in_thread: bool) -> None:
    """Bug: a limit that the timer cannot hold was reported as an error of the function."""
    users_module.judge = lambda _: 1.0  # type: ignore[attr-defined]
    judge = users_reward(call_timeout_s=YEAR_S)
    with ThreadPoolExecutor(1) as thread:
        assert (thread.submit(judge, rollout("hello")).result() if in_thread else judge(rollout("hello"))) == 1


@pytest.mark.parametrize(
    "limit", [{"type": "function", "function": "a:b", "call_timeout_s": 1e12}, {"type": "math", "timeout_s": 1e12}]
)
def test_a_limit_beyond_a_year_is_refused(limit: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="less than or equal to 31536000"):
        settings(**limit)


def test_a_regular_expression_that_does_not_end_has_a_limit(users_module: types.ModuleType) -> None:
    """Bug: a limit enforced by another thread, which cannot run as the expression holds the interpreter's lock."""
    users_module.judge = lambda _: bool(re.fullmatch("(a+)+b", "a" * 60))  # type: ignore[attr-defined]
    judge = users_reward(call_timeout_s=0.1)
    with pytest.raises(RolloutError, match=r"it did not return in 0\.1 s"):
        judge(rollout("hello"))


def test_the_limit_restores_another_alarm(users_module: types.ModuleType) -> None:
    users_module.judge = lambda _: 1.0  # type: ignore[attr-defined]
    judge = users_reward()
    previous = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 5000)
    try:
        assert judge(rollout("hello")) == 1
        assert signal.getsignal(signal.SIGALRM) == previous[0]
        assert 4000 < signal.getitimer(signal.ITIMER_REAL)[0] <= 5000
    finally:
        signal.setitimer(signal.ITIMER_REAL, *previous[1])


def test_ctrl_c_in_a_function_ends_the_run(users_module: types.ModuleType) -> None:
    def judge(_: object) -> float:
        raise KeyboardInterrupt

    users_module.judge = judge  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        users_reward()(rollout("hello"))


@pytest.mark.parametrize("parameters", ["", "a, b", "*, a"])
def test_a_function_that_does_not_take_one_rollout_is_refused(users_module: types.ModuleType, parameters: str) -> None:
    exec(f"def judge({parameters}): return 1.0", vars(users_module))
    with pytest.raises(ConfigError, match=r"reward.function=rewards_of_a_test:judge: it is called with a Rollout and"):
        users_reward()


def test_an_exception_of_a_users_function_is_reported_with_the_sample(users_module: types.ModuleType) -> None:
    users_module.judge = lambda _: 1 / 0  # type: ignore[attr-defined]
    judge = users_reward()

    with pytest.raises(RolloutError, match=r"prompt 7, sample 2: it raised ZeroDivisionError"):
        judge(rollout("hello"))


@pytest.mark.parametrize("function", ["no.such.package:judge", "math:no_such", "math:pi"])
def test_a_missing_function_is_an_error_of_the_config(function: str) -> None:
    with pytest.raises(ConfigError, match=f"reward.function={function}"):
        build_reward(settings(type="function", function=function))


@pytest.mark.parametrize(
    ("kind", "answer", "message"),
    [
        ("exact", None, "no answer"),
        ("exact", " ", "empty"),
        ("numeric", "many", "no number"),
        ("math", "", "no formula"),
        ("math", r"\frac{1}{2", "not balanced"),
    ],
)
def test_an_answer_that_cannot_be_compared_with_is_reported_with_its_row(
    kind: str, answer: str | None, message: str
) -> None:
    prompts = [Prompt(0, "Q", answer="1"), Prompt(4, "Q", answer=answer)]

    with pytest.raises(DataError, match=message):
        check_answer(settings(type=kind), answer)
    with pytest.raises(DataError, match=rf"data.train: row 4 .*'answer': .*{message}"):
        check_answers(settings(type=kind), prompts, source="data.train")


def test_rewards_that_compare_nothing_need_no_answer() -> None:
    check_answer(settings(type="environment"), None)
    check_answer(settings(type="function", function="a:b"), None)
    check_answer(settings(type="math"), r"\{1, 2\}")


def test_equal_answers_have_the_same_vote() -> None:
    numeric = build_reward(settings(type="numeric"))
    exact = build_reward(settings(type="exact", ignore_case=True))

    assert numeric.vote(rollout("so 1,000.0")) == numeric.vote(rollout("10^2 is not it: 1e3"))
    assert numeric.vote(rollout("no idea")) is None
    assert exact.vote(rollout(" Yes")) == exact.vote(rollout("yes "))
    assert exact.vote(rollout("  ")) is None
