"""An environment that answers once, imported by the runs of tests."""

from collections.abc import Sequence

from nemo_opd.data.row_types import Message, Prompt
from nemo_opd.rollout.environment import EnvironmentStep


class AnswersBack:
    """Asks for more after the first turn, and pays for the second."""

    def reset(self, prompt: Prompt) -> list[Message]:
        self.turns = 0
        return []

    def step(self, messages: Sequence[Message]) -> EnvironmentStep:
        self.turns += 1
        if self.turns == 1:
            return EnvironmentStep([{"role": "user", "content": "more"}], done=False)
        return EnvironmentStep([], done=True, reward=1.0)
