"""Runs a command of the package in this process."""

from contextlib import ExitStack

import pytest

from nemo_opd.cli.main import main


def exit_status(*words: object) -> int:
    """Return the command's exit status, also if it raises SystemExit after an error or its help."""
    with ExitStack() as stack:
        ended = stack.enter_context(pytest.raises(SystemExit))
        status = main([str(word) for word in words])
        stack.pop_all()
        return status
    return int(ended.value.code or 0)
