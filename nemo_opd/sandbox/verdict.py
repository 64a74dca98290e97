"""Verdicts on whether programs pass their tests."""

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
    """The limit that ended the program, or the exit status of its tests."""


def judge(isolation: Isolation, settings: SandboxSettings, program: str, tests: Tests) -> Verdict:
    """Run a program's tests. Raises SandboxError if a sandbox could not be created."""
    if isinstance(tests, InputOutput):
        return _compare_output(isolation, settings, program, tests)
    return _run_assertions(isolation, settings, program, tests)


def _compare_output(isolation: Isolation, settings: SandboxSettings, program: str, tests: InputOutput) -> Verdict:
    """Run the program on each input, and compare its output in this process, which it cannot affect."""
    for text, expected in tests.pairs:
        with ExitStack() as stack:
            source, stdin = (stack.enter_context(_file(content)) for content in (program, text))
            run = SandboxedProcess(isolation, settings, "script.py", stdin=stdin, inherited=(source.fileno(),))
            ending = stack.enter_context(run).wait()
        if ending.reason != "itself" or ending.status != 0:
            return Verdict(False, _described(ending))
        if _lines(ending.output.decode(errors="replace")) != _lines(expected):
            return Verdict(False, "another output")
    return Verdict(True)


def _run_assertions(isolation: Isolation, settings: SandboxSettings, program: str, tests: Assertions) -> Verdict:
    """Run program and tests in separate sandboxes, connected by a socket that passes values but not code."""
    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(end) for end in socketpair())
        source = stack.enter_context(_file(json.dumps({"source": program})))
        code = stack.enter_context(_file(json.dumps({"tests": tests.source, "entry_point": tests.entry_point})))
        candidate = stack.enter_context(
            SandboxedProcess(isolation, settings, "program.py", stdin=source, inherited=(theirs.fileno(),))
        )
        testing = stack.enter_context(
            SandboxedProcess(isolation, settings, "judge.py", stdin=code, inherited=(ours.fileno(),))
        )
        ours.close()
        theirs.close()
        ending = testing.wait()
        has_passed = ending.output == _PASSED and ending.status == 0
        if not has_passed:
            candidate.terminate()
        candidate_ending = candidate.wait()
    if has_passed and candidate_ending.status == 0:
        return Verdict(True)
    # If the program reached a limit, its tests failed for that reason.
    has_hit_limit = candidate_ending.reason not in ("itself", "order", "killed")
    return Verdict(False, _described(candidate_ending if has_hit_limit else ending))


def _described(ending: Ending) -> str:
    return f"status {ending.status}" if ending.reason == "itself" else ending.reason


def _lines(text: str) -> list[str]:
    """Return the lines without trailing white space, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _file(text: str) -> IO[bytes]:
    """Return an unnamed open file with this text, positioned at its start."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  the caller closes it
    file.write(text.encode(errors="surrogatepass"))
    file.seek(0)
    return file
