"""Tests of programs in many forms, and verdicts on whether programs pass them in a sandbox."""

import ast
import hashlib
import json
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from socket import socketpair
from typing import IO, Any

from nemo_opd.config.reward import Isolation, SandboxSettings
from nemo_opd.errors import ConfigError, DataError, RolloutError
from nemo_opd.sandbox.process import Ending, SandboxedProcess, SandboxError
from nemo_opd.types import Closing

_DOCKER_FLAGS = " ".join(f"--security-opt {name}=unconfined" for name in ("seccomp", "apparmor", "systempaths"))
"""Options of `docker run` that allow namespaces, and mounting /proc in them."""
_CHECK = "check"
"""Function of the tests that takes the program's function, as in HumanEval."""
_DEFINITIONS = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom),
    *(ast.Assign, ast.AnnAssign, ast.Pass),
)
_COMPARISON = f"""
import json
def _plain(value):
    return json.loads(json.dumps(value))
def {_CHECK}(candidate):
    for arguments, expected in zip(json.loads(_inputs), json.loads(_outputs)):
        result = _plain(candidate(*arguments))
        assert result == expected or [result] == expected
{_CHECK}(candidate)
"""
"""Calls with JSON arguments. APPS wraps each expected result in a list."""
_PASSED = b"passed\n"
_AUTO: tuple[Isolation, ...] = ("bubblewrap", "namespaces")
"""Kinds that `auto` tries."""
_CACHE_SIZE = 1 << 16
"""Number of cached verdicts."""
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Assertions:
    """Code that raises if the program is wrong."""

    source: str
    entry_point: str | None = None
    """Name of the program's function, which the tests call `candidate`."""


@dataclass(frozen=True, slots=True)
class InputOutput:
    """Pairs of standard input and expected output."""

    pairs: tuple[tuple[str, str], ...]


Tests = Assertions | InputOutput
_TRIAL_PROGRAM, _TRIAL_TESTS = "def one():\n    return 1\n", Assertions("assert one() == 1")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a program passes."""

    passed: bool
    reason: str = ""
    """The limit that ended the program, or the exit status of its tests."""


class Checker(Closing):
    """A pool of workers that judge programs, with a cache of verdicts. The end of its `with` waits for running ones."""

    def __init__(self, settings: SandboxSettings, key: str) -> None:
        """Choose the isolation. key: the settings' key, for messages. Raises ConfigError if no sandbox works here."""
        self._settings = settings
        self._isolation = isolation_of(settings, key)
        self._verdicts: OrderedDict[bytes, Future[Verdict]] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(settings.workers or len(os.sched_getaffinity(0)), "sandbox")

    def submit(self, program: str, tests: Tests) -> Future[Verdict]:
        """Return the future verdict. Its `result` raises RolloutError if creating a sandbox failed three times."""
        key = hashlib.sha256(repr((program, tests)).encode(errors="surrogatepass")).digest()
        with self._lock:
            if key not in self._verdicts:
                self._verdicts[key] = self._pool.submit(self._judge, key, program, tests)
                if len(self._verdicts) > _CACHE_SIZE:
                    self._verdicts.popitem(last=False)
            self._verdicts.move_to_end(key)
            return self._verdicts[key]

    def _judge(self, key: bytes, program: str, tests: Tests) -> Verdict:
        for _ in range(_TRIES):
            try:
                return judge(self._isolation, self._settings, program, tests)
            except SandboxError as error:
                problem = error
        with self._lock:  # the machine may recover
            self._verdicts.pop(key, None)
        raise RolloutError(
            f"a sandbox for a program could not be created any more: {problem}; check whether the machine has memory "
            "and processes left"
        )

    def close(self) -> None:
        """Cancel programs that have not started, and wait for running ones, which end at their limits."""
        self._pool.shutdown(cancel_futures=True)


@cache
def isolation_of(settings: SandboxSettings, key: str) -> Isolation:
    """Return the first kind of sandbox that the settings allow and that works, tested with a correct program.

    key: the settings' key, for messages. Raises ConfigError if no kind works.
    """
    kinds = _AUTO if settings.isolation == "auto" else (settings.isolation,)
    problems = []
    for kind in kinds:
        problem = _problem_of(kind, settings)
        if problem is None:
            return kind
        problems.append(f"{kind}: {problem}")
    raise ConfigError(
        f"{key}.isolation={settings.isolation}: no sandbox for untrusted programs works here "
        f"({'; '.join(problems)}); install bubblewrap (apt install bubblewrap), or allow unprivileged user namespaces, "
        f"in Docker with `{_DOCKER_FLAGS}`; {key}.isolation=none is for programs that you trust (docs/sandbox.md)"
    )


def _problem_of(kind: Isolation, settings: SandboxSettings) -> str | None:
    """Return why a kind of sandbox does not work, or None if it does."""
    try:
        verdict = judge(kind, settings, _TRIAL_PROGRAM, _TRIAL_TESTS)
    except SandboxError as error:
        return str(error)
    return None if verdict.passed else f"a correct program fails ({verdict.reason}); raise the limits"


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


def read_tests(text: str, entry_point: str | None = None) -> Tests:
    """Read the tests of one program. Raises DataError, with advice, for invalid tests.

    text: Python code (assertions, HumanEval's `check(candidate)`, or test functions as in pytest), or one of these in
    JSON: a list of assertions (MBPP); a list of objects with `input` and `output` (with `testtype: functional`, each
    line of `input` is a JSON argument of a call); or an object with lists `inputs` and `outputs` of standard input and
    output or, with `fn_name`, of calls (APPS).
    """
    data = _json_of(text)
    if data is None:
        return _assertions(text, entry_point)
    if isinstance(data, Mapping):
        return _read_lists(data, entry_point)
    if data and all(isinstance(item, str) for item in data):
        return _assertions("\n".join(data), entry_point)
    if data and all(isinstance(item, Mapping) and {"input", "output"} <= item.keys() for item in data):
        return _read_objects(data, entry_point)
    raise DataError(f"{_shown(text)} is neither a list of assertions nor a list of objects with `input` and `output`")


def _json_of(text: str) -> Any:
    """Parse a JSON list or object; return None for other text, such as code that starts with a bracket."""
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _assertions(source: str, entry_point: str | None) -> Assertions:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"the tests {_shown(source)} are not Python code: {error}") from None
    checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == _CHECK]
    if not checks or _CHECK in _called(tree):
        calls = "" if any(map(_runs, tree.body)) else _calls_of_tests(source, tree)
        return Assertions(source + calls, entry_point if "candidate" in source else None)
    if entry_point is None:
        raise DataError(
            f"the tests define {_CHECK}(candidate), but neither they nor the question name the function to test; add a "
            f"line such as `{_CHECK}(my_function)`"
        )
    return Assertions(f"{source}\n{_CHECK}(candidate)\n", entry_point)


def _runs(statement: ast.stmt) -> bool:
    """Return whether a statement may test something, unlike definitions, imports and texts."""
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)
    return not isinstance(statement, _DEFINITIONS)


def _calls_of_tests(source: str, tree: ast.Module) -> str:
    """Return calls of the functions that pytest would call. Raises DataError without such functions."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]
    calls = "".join(f"\n{function.name}()" for function in functions if not ast.unparse(function.args))
    if not calls:
        raise DataError(
            f"the tests {_shown(source)} run nothing, so that every program would pass; add assertions, functions "
            "test_…() without arguments, or a call that runs the tests, such as unittest.main()"
        )
    return calls


def _called(tree: ast.Module) -> set[str]:
    """Return the functions called by the module's top-level statements."""
    calls = [node.value.func for node in tree.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    return {function.id for function in calls if isinstance(function, ast.Name)}


def _read_lists(data: Mapping[str, Any], entry_point: str | None) -> Tests:
    inputs, outputs = data.get("inputs"), data.get("outputs")
    if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) > 0):
        raise DataError(f"{_shown(json.dumps(data))} does not have lists `inputs` and `outputs` of the same length")
    name = data.get("fn_name") or entry_point
    if name is not None and all(isinstance(arguments, list) for arguments in inputs):
        return _calls(inputs, outputs, name)
    return InputOutput(tuple(zip(map(_text, inputs), map(_text, outputs), strict=True)))


def _read_objects(tests: Sequence[Mapping[str, Any]], entry_point: str | None) -> Tests:
    if tests[0].get("testtype") != "functional":
        return InputOutput(tuple((_text(test["input"]), _text(test["output"])) for test in tests))
    if entry_point is None:
        raise DataError(
            "the tests call a function, but neither they nor the question name it; add `fn_name` to `inputs` and "
            "`outputs`"
        )
    try:
        inputs = [[json.loads(line) for line in test["input"].splitlines()] for test in tests]
        outputs = [json.loads(test["output"]) for test in tests]
    except ValueError as error:
        raise DataError(f"an input or output of a functional test is not JSON: {error}") from None
    return _calls(inputs, outputs, entry_point)


def _calls(inputs: Sequence[Any], outputs: Sequence[Any], name: str) -> Assertions:
    data = f"_inputs = {json.dumps(inputs)!r}\n_outputs = {json.dumps(outputs)!r}\n"
    return Assertions(data + _COMPARISON, name)


def _text(value: Any) -> str:
    """Return a value as text; lists are joined as lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
