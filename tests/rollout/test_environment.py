"""Environments that are loaded by name, and faulty environments."""

import math
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from nemo_opd.config.rollout import CalculatorEnvironment, FunctionEnvironment
from nemo_opd.config.rollout import Environment as Settings
from nemo_opd.data.row_types import Message, Prompt
from nemo_opd.errors import ConfigError, RolloutError
from nemo_opd.rollout.environment import (
    ENVIRONMENTS,
    Calculator,
    CheckedEnvironment,
    EnvironmentStep,
    build_environment,
)

PROMPT = Prompt(11, [{"role": "user", "content": "?"}])


class Echo:
    """An environment that returns the given opening and step."""

    def __init__(self, opening: Any = (), step: Any = None) -> None:
        self.opening, self.answer = opening, step

    def reset(self, prompt: Prompt) -> list[Message]:
        return self.opening

    def step(self, messages: Sequence[Message]) -> EnvironmentStep:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def test_a_limit_beyond_a_year_is_refused() -> None:
    with pytest.raises(ValidationError, match="less than or equal to 31536000"):
        CalculatorEnvironment(call_timeout_s=1e12)


def test_environments_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: modules in the working folder are not found, unlike with `python -m`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_exiting_world.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "my_world.py").write_text("from tests.rollout.test_environment import Echo as World\nx = 3\n")
    assert build_environment(FunctionEnvironment(type="function", function="my_world:World")).make is Echo
    assert build_environment(CalculatorEnvironment(type="calculator")).make is Calculator
    for reference, reason in (
        ("my_world:Nothing", "cannot be imported .AttributeError"),
        ("no_such_world:World", r"imported \(ModuleNotFoundError: No module named 'no_such_world'\); give"),
        ("my_exiting_world:World", "cannot be imported .SystemExit: 0"),
        ("my_world:x", "it is a int"),
        ("pathlib:Path", "without reset and step"),
    ):
        with pytest.raises(ConfigError, match=f"environment.function={reference}: .*{reason}"):
            build_environment(FunctionEnvironment(type="function", function=reference))


def test_every_type_of_environment_can_be_built() -> None:
    union, _ = get_args(Settings)
    assert set(get_args(union)) == ENVIRONMENTS.keys()


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (KeyError("boom"), "step raised KeyError: 'boom'"),
        (SystemExit(0), "step raised SystemExit: 0"),
        (EnvironmentStep((), done=True, reward=math.nan), "its reward is nan"),
        (EnvironmentStep((), done=True, reward=10**400), "its reward is 1000.*; return a finite"),
        (EnvironmentStep((), done=True, reward="1"), "its reward is '1'"),  # type: ignore[arg-type]
        (EnvironmentStep((), done=False), "it returned no messages"),
        (EnvironmentStep("hello", done=False), "it returned 'hello' as messages"),  # type: ignore[arg-type]
        (EnvironmentStep([{"role": "user"}], done=False), "`content` must be strings"),
        (EnvironmentStep([{"role": "tool", "content": 3}], done=False), "`content` must be strings"),
        (EnvironmentStep([{"role": "assistant", "content": "I"}], done=False), "as the assistant"),
        (None, "step returned None"),
    ],
)
def test_a_failing_step_names_environment_prompt_and_turn(step: Any, reason: str) -> None:
    environment = CheckedEnvironment(
        lambda: Echo(step=EnvironmentStep([{"role": "user", "content": "go on"}], done=False)), 11, 60
    )
    environment.step([])
    environment._environment.answer = step  # type: ignore[attr-defined]
    with pytest.raises(RolloutError, match=f"prompt 11, turn 2: .*{reason}"):
        environment.step([])


def test_a_failure_before_the_first_turn_names_environment_and_prompt() -> None:
    with pytest.raises(RolloutError, match="environment Mute, prompt 11, before the first turn: it returned 3"):
        CheckedEnvironment(Mute, 11, 60).reset(PROMPT)
    with pytest.raises(RolloutError, match="prompt 11, before the first turn: making it raised ZeroDivisionError"):
        CheckedEnvironment(lambda: 1 / 0, 11, 60)  # type: ignore[arg-type, return-value]


def test_an_environment_that_does_not_return_has_a_limit() -> None:
    environment = CheckedEnvironment(Waiting, 11, 0.1)
    with pytest.raises(RolloutError, match=r"turn 1: step did not return in 0.1 s \(environment.call_timeout_s\)$"):
        environment.step([])


class Waiting(Echo):
    def step(self, messages: Sequence[Message]) -> EnvironmentStep:
        threading.Event().wait()
        raise AssertionError


class Mute(Echo):
    def reset(self, prompt: Prompt) -> Any:
        return 3
