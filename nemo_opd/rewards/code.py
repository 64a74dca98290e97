"""A reward of 1 if a program passes its tests in a sandbox."""

import re
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress

from nemo_opd.config.reward import CodeReward
from nemo_opd.data.row_types import Prompt, Rollout
from nemo_opd.errors import DataError, RolloutError
from nemo_opd.rewards.reward_function import RewardFunction, last_turn
from nemo_opd.sandbox.checker import Checker, Verdict, read_tests

_FENCE = re.compile(r"\s{0,3}(`{3,}|~{3,})\s*([\w+.-]*)")
_PYTHON = ("", "python", "python3", "py", "Python")
_FUNCTION = re.compile(r"^(?:async\s+)?def\s+(\w+)", re.MULTILINE)


class CodePasses(RewardFunction):
    """A reward of 1 if the program in the last turn passes the row's tests, else 0."""

    def __init__(self, settings: CodeReward) -> None:
        """Create the checker of programs. Raises ConfigError if sandboxes do not work here."""
        super().__init__(settings)
        self._entry_point_key = settings.entry_point_key
        self._checker = Checker(settings.sandbox, "reward.sandbox")

    @classmethod
    def check_answer(cls, answer: str) -> None:
        read_tests(answer, "candidate")

    def expect(self, rollouts: Sequence[Rollout]) -> None:
        """Start to run the programs, with one program per worker at a time."""
        for rollout in rollouts:
            with suppress(RolloutError):  # raised again when the rollout is scored
                self._submit(rollout)

    def score(self, rollout: Rollout) -> float:
        verdict = self._submit(rollout)
        try:
            return float(verdict.result().passed)
        except RolloutError as error:
            raise RolloutError(f"{self.at(rollout)}: {error}") from error

    def close(self) -> None:
        self._checker.close()

    def _submit(self, rollout: Rollout) -> Future[Verdict]:
        """Return the future verdict; each program runs once. Raises RolloutError for unusable tests."""
        entry_point = _entry_point_of(rollout.prompt, self._entry_point_key)
        try:
            tests = read_tests(self.answer(rollout), entry_point)
        except DataError as error:
            raise RolloutError(f"{self.at(rollout)}: {error}") from error
        return self._checker.submit(program_of(rollout, entry_point), tests)


def program_of(rollout: Rollout, entry_point: str | None) -> str:
    """Return the program in a response: its last block of Python or, without a block, the whole response.

    A plain-text prompt is prepended, unless the block defines `entry_point` itself.
    """
    response = last_turn(rollout)
    block = last_block(response)
    prompt = rollout.prompt.content
    if not isinstance(prompt, str):
        return response if block is None else block
    if block is None:
        return prompt + response
    is_complete = entry_point is None or entry_point in _FUNCTION.findall(block)
    return block if is_complete else f"{prompt}\n{block}"


def last_block(text: str) -> str | None:
    """Return the last closed Python block, or an unclosed one if no block is closed, or None."""
    last, block, fence = None, list[str](), ""
    for line in text.splitlines():
        mark = _FENCE.match(line)
        if fence and mark and mark[1].startswith(fence) and not mark[2]:
            last, fence = "\n".join(block), ""
        elif fence:
            block.append(line)
        elif mark and mark[2] in _PYTHON:
            block, fence = [], mark[1]
    return "\n".join(block) if fence and last is None else last


def _entry_point_of(prompt: Prompt, key: str | None) -> str | None:
    """Return the function named in column `key`; without a key, the last function that the question defines."""
    if key is not None:
        return str(prompt.row[key])
    functions = _FUNCTION.findall(_question(prompt))
    return functions[-1] if functions else None


def _question(prompt: Prompt) -> str:
    """Return a plain-text prompt, or the user's last message."""
    if isinstance(prompt.content, str):
        return prompt.content
    return next((message["content"] or "" for message in reversed(prompt.content) if message["role"] == "user"), "")
