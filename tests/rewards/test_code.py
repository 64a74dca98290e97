"""Catches programs that are read from the wrong part of a response."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_opd.config.data import Data
from nemo_opd.config.evaluation import Evaluation
from nemo_opd.config.reward import CodeReward
from nemo_opd.data.row_types import Prompt, Rollout
from nemo_opd.errors import DataError, RolloutError
from nemo_opd.evaluation.question_sets import build_set_reward, resolved_sets
from nemo_opd.evaluation.questions import read_questions
from nemo_opd.rewards import RewardFunction, build_reward, check_answer
from nemo_opd.rewards.code import last_block, program_of
from tests.rewards.rollouts import rollout

PROMPT = 'import math\n\ndef helper(x):\n    return math.floor(x)\n\ndef half(x):\n    """Half of x."""\n'
TESTS = "def check(candidate):\n    assert candidate(7) == 3\n"
SANDBOX: dict[str, Any] = {"sandbox": {"isolation": "none"}}
SETTINGS = CodeReward(**SANDBOX)


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
def test_the_program_is_the_last_block_of_python(text: str, block: str | None) -> None:
    assert last_block(text) == block


def test_a_text_is_continued_unless_the_block_is_complete() -> None:
    assert program_of(answered("    return x\n", PROMPT), "half") == PROMPT + "    return x\n"
    assert program_of(answered("```python\ndef half(x): return x\n```", PROMPT), "half") == "def half(x): return x"
    assert program_of(answered("```python\n    return x\n```", PROMPT), "half") == f"{PROMPT}\n    return x"


@pytest.mark.world
def test_rewards_of_a_batch() -> None:
    """Bug: a continuation or block is joined to the wrong prompt, or another function than the last one is tested."""
    messages = [{"role": "user", "content": f"Complete it:\n```python\n{PROMPT}```"}]
    right = "```python\ndef half(x):\n    return x // 2\n```"
    with build_reward(SETTINGS) as reward:
        rollouts = [
            answered("    return helper(x / 2)\n\nprint(hal", PROMPT),
            answered("    return x / 2\n", PROMPT),
            answered(right, messages),
            answered(right.replace("//", "/"), messages),
            answered("def half(x): return 3", messages),
        ]
        assert reward.of_batch(rollouts) == [1, 0, 1, 0, 1]
        assert reward(rollouts[0]) == 1
        with pytest.raises(RolloutError, match="prompt 7, sample 2: the tests define check"):
            reward(answered(right, "Halve numbers."))
    check_answer(SETTINGS, TESTS)


HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'from typing import List\n\n\ndef half(x: int) -> int:\n    """Half of x.\n    >>> half(7)\n    """\n',
    "canonical_solution": "    return x // 2\n",
    "test": "METADATA = {'author': 'x'}\n\n\n" + TESTS,
    "entry_point": "half",
}
MBPP = {
    "task_id": 11,
    "prompt": "Write a python function to remove the first and last occurrence of a character.",
    "test_imports": [],
    "test_list": ['assert remove_Occ("hello","l") == "heo"', 'assert remove_Occ("abcda","a") == "bcd"'],
}


def reward_and_prompt(folder: Path, row: dict[str, Any], reward: dict[str, Any]) -> tuple[RewardFunction, Prompt]:
    """Return the reward and the question of a set with this row."""
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    settings = {
        "data": {"jsonl_files": str(file), "text_key": "prompt"},
        "reward": {"type": "code", **SANDBOX, **reward},
    }
    (question_set,) = resolved_sets(Evaluation(sets={"programs": settings}), Data(), None, "evaluation.")
    (prompt,) = read_questions(question_set)
    return build_set_reward(question_set), prompt


@pytest.mark.world
def test_rows_of_human_eval(tmp_path: Path) -> None:
    """Bug: the tests check the question's last function instead of the row's entry point."""
    row = {**HUMAN_EVAL, "prompt": HUMAN_EVAL["prompt"] + "\n\ndef helper(y: int) -> int:\n"}
    body = "    return y // 2\n\n\ndef half(x: int) -> int:\n    return helper(x)\n"
    reward, prompt = reward_and_prompt(tmp_path, row, {"entry_point_key": "entry_point"})
    with reward:
        rollouts = [replace(rollout(text), prompt=prompt) for text in (body, body.replace("//", "/"))]
        assert reward.of_batch(rollouts) == [1, 0]
    reward, prompt = reward_and_prompt(tmp_path, HUMAN_EVAL, {})
    with reward:
        assert reward.of_batch([replace(rollout(HUMAN_EVAL["canonical_solution"]), prompt=prompt)]) == [1]


@pytest.mark.world
def test_rows_of_mbpp(tmp_path: Path) -> None:
    """The tests are a column of lists of assertions, which call the program's function by name."""
    body = "    first, last = s.find(ch), s.rfind(ch)\n    return s[:first] + s[first + 1 : last] + s[last + 1 :]\n"
    right = f"```python\ndef remove_Occ(s, ch):\n{body}```"
    reward, prompt = reward_and_prompt(tmp_path, MBPP, {"answer_key": "test_list"})
    with reward:
        rollouts = [replace(rollout(text), prompt=prompt) for text in (right, right.replace("rfind", "find"), right)]
        assert reward.of_batch(rollouts) == [1, 0, 1]


def test_a_missing_column_of_entry_points_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no column 'name', which evaluation\.sets\.programs\.reward\.entry_point_key"):
        reward_and_prompt(tmp_path, HUMAN_EVAL, {"entry_point_key": "name"})
