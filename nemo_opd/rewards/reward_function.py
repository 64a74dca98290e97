"""Base classes of rewards."""

import numbers
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from nemo_opd.data.row_types import Rollout
from nemo_opd.errors import RolloutError
from nemo_opd.progress import tracked
from nemo_opd.types import Closing
from nemo_opd.users_code import LARGEST_REWARD, is_reward, shown


class RewardFunction(Closing):
    """A function Rollout → float. `close`, or the end of its `with`, frees its resources."""

    votes: bool = False
    """Whether it extracts an answer from a rollout, so that equal answers of several rollouts can be counted."""

    def __init__(self, settings: Any) -> None:
        """settings: their `type` names this reward."""
        self.name: str = settings.type
        """Name in errors: the value of `reward.type`, or the user's function."""

    @classmethod
    def check_answer(cls, answer: str) -> None:
        """Raise DataError if it cannot compare with this answer of a dataset."""

    def __call__(self, rollout: Rollout) -> float:
        """Return the reward. Raises RolloutError, naming prompt and sample, unless it is a finite number."""
        value = self.score(rollout)
        if not isinstance(value, numbers.Real | np.bool_):
            raise RolloutError(
                f"{self.at(rollout)}: it returned {shown(value)} ({type(value).__name__}), which is not a number; "
                "return a float"
            )
        if not is_reward(value):
            raise RolloutError(
                f"{self.at(rollout)}: it returned {shown(value)}; return a finite number within ±{LARGEST_REWARD:g}"
            )
        return float(value)

    @abstractmethod
    def score(self, rollout: Rollout) -> float:
        """Compute the reward, which `__call__` checks."""

    def of_batch(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Return the rewards of a batch of rollouts."""
        self.begin()
        self.expect(rollouts)
        return [self(rollout) for rollout in tracked(rollouts, "rewarding", "rollouts")]

    def expect(self, rollouts: Sequence[Rollout]) -> None:
        """Start slow work for rollouts that will be scored one by one afterwards."""

    def begin(self) -> None:
        """Prepare for the rollouts of a batch or of an evaluation."""

    def vote(self, rollout: Rollout) -> str | None:
        """Return the rollout's answer, equal for equivalent answers, or None."""
        return None

    def close(self) -> None:
        """End the processes that it started."""

    def at(self, rollout: Rollout) -> str:
        """Return the start of a message about a rollout."""
        return f"reward {self.name}, prompt {rollout.prompt.index}, sample {rollout.sample}"

    def answer(self, rollout: Rollout) -> str:
        """Return the answer to compare with. Raises RolloutError if the prompt has none."""
        if rollout.prompt.answer is None:
            raise RolloutError(
                f"{self.at(rollout)}: the prompt has no answer; set reward.answer_key to the column that holds it"
            )
        return rollout.prompt.answer


class Compound(RewardFunction):
    """The base class of rewards that combine other rewards."""

    def __init__(self, settings: Any, rewards: Sequence[RewardFunction]) -> None:
        super().__init__(settings)
        self.rewards = tuple(rewards)

    @property
    def votes(self) -> bool:  # type: ignore[override]
        return any(reward.votes for reward in self.rewards)

    def begin(self) -> None:
        for reward in self.rewards:
            reward.begin()

    def close(self) -> None:
        for reward in self.rewards:
            reward.close()


def last_turn(rollout: Rollout) -> str:
    """Return the text of the student's last turn; empty without a turn."""
    return rollout.responses[-1] if rollout.responses else ""
