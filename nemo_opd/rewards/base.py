"""What every reward does: score a rollout, and stand for the number it gives."""

import numbers
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar, Self

import numpy as np

from nemo_opd.data.record import Rollout
from nemo_opd.errors import RolloutError
from nemo_opd.users_code import LARGEST_REWARD, is_reward, shown


class RewardFunction(ABC):
    """Called with a rollout, gives its reward. Leaving the `with`, or `close`, frees what it holds."""

    name: str
    """How errors call it: the value of `reward.type`, or the user's function."""
    votes: ClassVar[bool] = False
    """Whether it reads an answer out of a rollout, so that answers of several rollouts can be counted."""

    def __call__(self, rollout: Rollout) -> float:
        """Raises RolloutError, with the prompt and the sample, for what is no number or too large for one."""
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
        """As computed, before it is checked."""

    def of_batch(self, rollouts: Iterable[Rollout]) -> list[float]:
        """Score the rollouts of one batch."""
        self.begin()
        return [self(rollout) for rollout in rollouts]

    def begin(self) -> None:  # noqa: B027  most need not know
        """To be called before the rollouts of a batch, or of an evaluation."""

    def vote(self, rollout: Rollout) -> str | None:
        """The answer that the rollout gives, equal for answers that mean the same; None where it gives none."""
        return None

    def close(self) -> None:  # noqa: B027  most have nothing to close
        """Ends processes it started."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def at(self, rollout: Rollout) -> str:
        """The start of a message about one rollout."""
        return f"reward {self.name}, prompt {rollout.prompt.index}, sample {rollout.sample}"


def answer_of(rollout: Rollout, reward: RewardFunction) -> str:
    """What the reward compares with. Raises RolloutError where the prompt has none."""
    if rollout.prompt.answer is None:
        raise RolloutError(
            f"{reward.at(rollout)}: the prompt has no answer; set reward.answer_key to the column that holds it"
        )
    return rollout.prompt.answer


def last_turn(rollout: Rollout) -> str:
    """Empty where the student has said nothing."""
    return rollout.responses[-1] if rollout.responses else ""
