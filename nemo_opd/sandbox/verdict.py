"""Verdicts on programs: whether one passes its tests."""

import json
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from socket import socketpair
from typing import IO

from nemo_opd.config.sandbox import Isolation, SandboxSettings
from nemo_opd.sandbox.process import Ending, SandboxedProcess
from nemo_opd.sandbox.tests import Assertions, InputOutput, Tests

_PASSED = b"passed\n"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a program passes."""

    passed: bool
    reason: str = ""
    """The limit that ended it, or the exit status of its tests."""


def judge(isolation: Isolation, settings: SandboxSettings, program: str, tests: Tests) -> Verdict:
    """Run a program's tests. Raises SandboxError where a sandbox could not be made."""
    if isinstance(tests, InputOutput):
        return _by_output(isolation, settings, program, tests)
    return _by_assertions(isolation, settings, program, tests)


def _by_output(isolation: Isolation, settings: SandboxSettings, program: str, tests: InputOutput) -> Verdict:
    """Compare what the program prints here, where it has no part in it."""
    for given, wanted in tests.pairs:
        with ExitStack() as stack:
            source, stdin = (stack.enter_context(_file(text)) for text in (program, given))
            run = SandboxedProcess(isolation, settings, "script.py", stdin=stdin, kept=(source.fileno(),))
            ending = stack.enter_context(run).wait()
        if ending.reason != "itself" or ending.status != 0:
            return Verdict(False, _described(ending))
        if _lines(ending.output.decode(errors="replace")) != _lines(wanted):
            return Verdict(False, "another output")
    return Verdict(True)


def _by_assertions(isolation: Isolation, settings: SandboxSettings, program: str, tests: Assertions) -> Verdict:
    """Run program and tests in a sandbox each, joined by a socket through which values pass and code does not."""
    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(end) for end in socketpair())
        source = stack.enter_context(_file(json.dumps({"source": program})))
        code = stack.enter_context(_file(json.dumps({"tests": tests.source, "entry_point": tests.entry_point})))
        candidate = stack.enter_context(
            SandboxedProcess(isolation, settings, "program.py", stdin=source, kept=(theirs.fileno(),))
        )
        testing = stack.enter_context(
            SandboxedProcess(isolation, settings, "judge.py", stdin=code, kept=(ours.fileno(),))
        )
        ours.close()
        theirs.close()
        ending = testing.wait()
        is_right = ending.output == _PASSED and ending.status == 0
        if not is_right:
            candidate.terminate()
        its_ending = candidate.wait()
    if is_right and its_ending.status == 0:
        return Verdict(True)
    # Tests fail where the program has ended, so its own ending says more.
    is_told = its_ending.reason in ("itself", "order", "killed")
    return Verdict(False, _described(ending if is_told else its_ending))


def _described(ending: Ending) -> str:
    return f"status {ending.status}" if ending.reason == "itself" else ending.reason


def _lines(text: str) -> list[str]:
    """Return the lines without white space at their ends, and without empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _file(text: str) -> IO[bytes]:
    """Return an open file with a text, which is at its beginning and has no name."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  the caller closes it
    file.write(text.encode(errors="surrogatepass"))
    file.seek(0)
    return file
