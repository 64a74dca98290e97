"""DAPO-Math-17k: 17 thousand problems with integer answers, each of them many times over in the published Parquet.

Columns: data_source, prompt (one message of the user), ability, reward_model {ground_truth, style}, extra_info {index}.
"""

import re
from collections.abc import Iterator
from typing import Any

from tools.data.questions import Question, checked
from tools.data.rows import Row

COLUMNS = ("prompt", "reward_model", "extra_info")
BEFORE = re.compile(r"\ASolve the following math problem step by step\.[^\n]*\n+")
BEHIND = re.compile(r"\n+Remember to put your answer on its own line[^\n]*\Z")
"""How to answer; the set says it with every problem, and another instruction takes its place."""


def questions(rows: Iterator[Row]) -> Iterator[Question]:
    """Raises DataError for a row of another form."""
    for row in rows:
        problem = BEHIND.sub("", BEFORE.sub("", message(row).strip())).strip()
        extra = row.values.get("extra_info")
        index = extra.get("index") if isinstance(extra, dict) else None
        yield checked(row, Question("dapo_math", str(index or row.place), problem, answer(row)))


def message(row: Row) -> str:
    messages: Any = row.values[row.named("prompt")]
    is_one = isinstance(messages, list) and len(messages) == 1 and isinstance(messages[0], dict)
    if not is_one or messages[0].get("role") != "user" or not isinstance(messages[0].get("content"), str):
        raise row.error("column 'prompt' is no list of one message {role: user, content: text}")
    return str(messages[0]["content"])


def answer(row: Row) -> str:
    reward_model: Any = row.values[row.named("reward_model")]
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    if not isinstance(truth, str) or not truth.strip():
        raise row.error("column 'reward_model' holds no text as ground_truth")
    return truth.strip()
