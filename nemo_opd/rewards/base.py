"""The base of all rewards."""

import numbers
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from nemo_opd.data.record import Rollout
from nemo_opd.errors import RolloutError
from nemo_opd.progress import tracked
from nemo_opd.users_code import LARGEST_REWARD, is_reward, shown


class RewardFunction(ABC):
    """Function Rollout → float. Leaving the `with`, or `close`, frees what it holds."""

    votes: ClassVar[bool] = False
    """Whether it reads an answer from a rollout, so that equal answers of several rollouts can be counted."""

    def __init__(self, settings: Any) -> None:
        """Take the settings whose `type` names this reward."""
        self.name: str = settings.type
        """Name in errors: the value of `reward.type`, or the user's function."""

    @classmethod  # noqa: B027  most need no check
    def check_answer(cls, answer: str) -> None:
        """Raise DataError for an answer of a dataset that it cannot compare with."""

    def __call__(self, rollout: Rollout) -> float:
        """Return the reward. Raises RolloutError, with the prompt and the sample, unless it is a finite number."""
        value = self.score(rollout)
        if not isinstance(value, numbers.Real | np.bool_):
            raise RolloutError(
                f"{self.at(rollout)}: it returned {shown(value)} ({type(value).__name__}), no number; return a float"
            )
        if not is_reward(value):
            raise RolloutError(
                f"{self.at(rollout)}: it returned {shown(value)}; return a finite number, ±{LARGEST_REWARD:g} at most"
            )
        return float(value)

    @abstractmethod
    def score(self, rollout: Rollout) -> float:
        """Compute the reward, which `__call__` checks."""

    def of_batch(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Return the rewards of one batch of rollouts."""
        self.begin()
        self.expect(rollouts)
        return [self(rollout) for rollout in tracked(rollouts, "rewarding", "rollouts")]

    def expect(self, rollouts: Iterable[Rollout]) -> None:  # noqa: B027  most take no time
        """Begin what takes time for rollouts that it is called with afterwards, one by one."""

    def begin(self) -> None:  # noqa: B027  most need not know
        """Prepare for the rollouts of a batch or of an evaluation."""

    def vote(self, rollout: Rollout) -> str | None:
        """Return the rollout's answer, equal for answers that mean the same; None where it has none."""
        return None

    def close(self) -> None:  # noqa: B027  most have nothing to close
        """End the processes it started."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def at(self, rollout: Rollout) -> str:
        """Return the start of a message about one rollout."""
        return f"reward {self.name}, prompt {rollout.prompt.index}, sample {rollout.sample}"

    def answer(self, rollout: Rollout) -> str:
        """Return the answer to compare with. Raises RolloutError where the prompt has none."""
        if rollout.prompt.answer is None:
            raise RolloutError(
                f"{self.at(rollout)}: the prompt has no answer; set reward.answer_key to the column that holds it"
            )
        return rollout.prompt.answer


def last_turn(rollout: Rollout) -> str:
    """Return the text of the student's last turn; empty where it had none."""
    return rollout.responses[-1] if rollout.responses else ""
