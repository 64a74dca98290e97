"""Checks that rows are conversations a chat template can render."""

from collections.abc import Mapping
from typing import Any

import datasets

from nemo_opd.alignment.chat_messages import learned_messages, plain_messages
from nemo_opd.data.documents import MESSAGES, TOOLS, parsed, read_rows
from nemo_opd.data.origin import Origin
from nemo_opd.errors import AlignmentError, DataError

_ROWS_AT_A_TIME = 1000


def require_conversations(documents: datasets.Dataset, source: str, origin: Origin) -> None:
    """Check all rows, about 50,000 a second. Raises DataError with the place of the first malformed row."""
    for start in range(0, len(documents), _ROWS_AT_A_TIME):
        rows = read_rows(documents, list(range(start, min(start + _ROWS_AT_A_TIME, len(documents)))))
        tools = rows.get(TOOLS, [None] * len(rows[MESSAGES]))
        for i, row in enumerate(zip(rows[MESSAGES], tools, strict=True), start=start):
            if reason := conversation_problem(*row):
                raise DataError(f"{source}: {origin(i)} is not a conversation: {reason}")


def conversation_problem(messages: Any, tools: Any = None) -> str | None:
    """Return why the columns' values are not a conversation, or None if they are."""
    try:
        learned_messages(plain_messages(parsed(messages)))
        offered = parsed(tools)
    except (AlignmentError, DataError) as error:
        return str(error)
    if offered is None or (isinstance(offered, list) and all(isinstance(tool, Mapping) for tool in offered)):
        return None
    return f"its tools are not a list of objects but {repr(offered)[:60]}; correct the column that data.tools_key names"
