"""Which messages are learned, by their marks and by the setting."""

from typing import Any

import numpy as np
import pytest

from nemo_opd.alignment import ChatRenderer
from nemo_opd.alignment.chat_template import learned_messages
from nemo_opd.config.data import LearnedTurns
from nemo_opd.errors import AlignmentError
from tests.alignment.chat_fixture import assistant, small_chat, tool, user

TALK = [user("a"), assistant("b"), user("c"), assistant("d"), tool("e"), assistant("f")]


def marked(**marks: Any) -> list[dict[str, object]]:
    """Mark the last message."""
    return [*TALK[:-1], {**TALK[-1], **marks}]


@pytest.mark.parametrize(
    ("messages", "turns", "learned"),
    [
        (TALK, "all", [1, 3, 5]),
        (TALK, "last", [3, 5]),
        (TALK, "marked", []),
        (TALK[1:2], "last", [0]),
        (marked(weight=0), "all", [1, 3]),
        (marked(weight=0), "last", [3]),
        (marked(weight=0), "marked", []),
        (marked(weight=1), "all", [1, 3, 5]),
        (marked(weight=1), "marked", [5]),
        (marked(train=False), "all", [1, 3]),
        (marked(training=True), "marked", [5]),
        (marked(loss_mask=0.0), "all", [1, 3]),
        (marked(weight=1, loss_mask=0), "all", [1, 3]),
        (marked(weight=None), "marked", []),
        ([{**TALK[0], "weight": 1}, *TALK[1:]], "all", [1, 3, 5]),
        ([{**TALK[0], "weight": 1}, *TALK[1:]], "marked", []),
    ],
)
def test_which_messages_are_learned(messages: list[dict[str, Any]], turns: LearnedTurns, learned: list[int]) -> None:
    """Bugs: marks are ignored; a turn with calls is learned in part; a user's message is learned."""
    assert np.flatnonzero(learned_messages(messages, turns)).tolist() == learned


@pytest.mark.parametrize("mark", [0.5, "0", [1, 0], 2])
def test_other_marks_are_refused(mark: Any) -> None:
    """Bug: a weight of 0.5, or the text "0", counts as 1."""
    with pytest.raises(AlignmentError, match=r"messages\[5\]\.weight is .* must be 1 or true"):
        learned_messages(marked(weight=mark))


@pytest.mark.parametrize("name", ["trimmed", "plain"])
def test_tokens_of_other_messages_are_not_learned(name: str) -> None:
    """Bugs: the setting does not change the mask; it changes the rendered text."""
    every = ChatRenderer(small_chat(name))(TALK)
    last, some = ChatRenderer(small_chat(name), turns="last"), ChatRenderer(small_chat(name))
    for read, first in ((last(TALK), 2), (some([TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]]), 2)):
        assert read.ids.tolist() == every.ids.tolist()
        start = every.spans[first, 0]
        assert read.assistant_mask.tolist() == [mask and i >= start for i, mask in enumerate(every.assistant_mask)]
    assert last.identity != some.identity
