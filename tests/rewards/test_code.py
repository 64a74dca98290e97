"""Catches programs that are read from the wrong part of a response."""

from dataclasses import replace
from typing import Any

import pytest

from nemo_opd.config.reward import CodeReward
from nemo_opd.config.sandbox import SandboxSettings
from nemo_opd.data.record import Prompt, Rollout
from nemo_opd.errors import RolloutError
from nemo_opd.rewards import build_reward, check_answer
from nemo_opd.rewards.code import last_block, program_of
from tests.rewards.rollouts import rollout

PROMPT = 'import math\n\ndef helper(x):\n    return math.floor(x)\n\ndef half(x):\n    """Half of x."""\n'
TESTS = "def check(candidate):\n    assert candidate(7) == 3\n"
SETTINGS = CodeReward(sandbox=SandboxSettings(isolation="process"))


def answered(response: str, content: Any, tests: str = TESTS) -> Rollout:
    return replace(rollout(response), prompt=Prompt(7, content, answer=tests))


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```python\na\n```\nthen\n```py\nb\n```\nas\n```\nc\n```\n```bash\nd\n```", "c"),
        ("I think\n```python\na\n\nb", "a\n\nb"),
        ("````\na\n```\nb\n````", "a\n```\nb"),
        ("no code", None),
    ],
)
def test_the_last_block_of_python_is_the_program(text: str, block: str | None) -> None:
    assert last_block(text) == block


def test_a_text_is_continued_unless_the_block_is_whole() -> None:
    assert program_of(answered("    return x\n", PROMPT), "half") == PROMPT + "    return x\n"
    assert program_of(answered("```python\ndef half(x): return x\n```", PROMPT), "half") == "def half(x): return x"
    assert program_of(answered("```python\n    return x\n```", PROMPT), "half") == f"{PROMPT}\n    return x"


@pytest.mark.world
def test_rewards_of_a_batch() -> None:
    """Texts and conversations, right and wrong, with the function that the question defines last."""
    asked = [{"role": "user", "content": f"Complete it:\n```python\n{PROMPT}```"}]
    right = "```python\ndef half(x):\n    return x // 2\n```"
    with build_reward(SETTINGS) as reward:
        given = [
            answered("    return helper(x / 2)\n\nprint(hal", PROMPT),
            answered("    return x / 2\n", PROMPT),
            answered(right, asked),
            answered(right.replace("//", "/"), asked),
            answered("def half(x): return 3", asked),
        ]
        assert reward.of_batch(given) == [1, 0, 1, 0, 1]
        assert reward(given[0]) == 1
        with pytest.raises(RolloutError, match="prompt 7, sample 2: the tests define check"):
            reward(answered(right, "Halve numbers."))
    check_answer(SETTINGS, TESTS)
