"""Tests of a program, as datasets have them."""

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_opd.errors import DataError

_CHECK = "check"
"""Function of the tests that is called with the program's, as HumanEval has it."""


@dataclass(frozen=True, slots=True)
class Assertions:
    """Code that raises where the program is wrong."""

    source: str
    entry_point: str | None = None
    """Name of the program's function that the tests call `candidate`."""


@dataclass(frozen=True, slots=True)
class InputOutput:
    """Standard inputs, each with the output that it should give."""

    pairs: tuple[tuple[str, str], ...]


Tests = Assertions | InputOutput

_DEFINITIONS = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom),
    *(ast.Assign, ast.AnnAssign, ast.Pass),
)

_COMPARISON = f"""
import json
def _plain(value):
    return json.loads(json.dumps(value))
def {_CHECK}(candidate):
    for given, wanted in zip(json.loads(_given), json.loads(_wanted)):
        found = _plain(candidate(*given))
        assert found == wanted or [found] == wanted
{_CHECK}(candidate)
"""
"""Calls with JSON; APPS has each result in a list of one."""


def read_tests(text: str, entry_point: str | None = None) -> Tests:
    """Read the tests of one program. Raises DataError, with the way out, for what is no tests.

    text: Python code, such as assertions, HumanEval's `check(candidate)` or functions as pytest calls them; or JSON: a
    list of assertions (MBPP), a list of objects with `input` and `output` (of which `testtype: functional` has a call's
    arguments as lines of JSON), or an object of lists `inputs` and `outputs`, of standard input and output or, with
    `fn_name`, of a call (APPS).
    """
    given = _json_of(text)
    if given is None:
        return _assertions(text, entry_point)
    if isinstance(given, Mapping):
        return _of_lists(given, entry_point)
    if given and all(isinstance(each, str) for each in given):
        return _assertions("\n".join(given), entry_point)
    if given and all(isinstance(each, Mapping) and {"input", "output"} <= each.keys() for each in given):
        return _of_objects(given, entry_point)
    raise DataError(f"{_shown(text)} is no list of assertions, and no list of objects with `input` and `output`")


def _json_of(text: str) -> Any:
    """Return a list or an object; None for other text, such as code that begins like one."""
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
        raise DataError(f"the tests {_shown(source)} are no Python code: {error}") from None
    checks = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == _CHECK]
    if not checks or _CHECK in _called(tree):
        calls = "" if any(map(_runs, tree.body)) else _calls_of_tests(source, tree)
        return Assertions(source + calls, entry_point if "candidate" in source else None)
    if entry_point is None:
        raise DataError(
            f"the tests define {_CHECK}(candidate) and do not say what to call it with, and the question defines no "
            f"function; add a line such as `{_CHECK}(my_function)`"
        )
    return Assertions(f"{source}\n{_CHECK}(candidate)\n", entry_point)


def _runs(statement: ast.stmt) -> bool:
    """Return whether a statement may test something: it defines nothing, imports nothing and is no text."""
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)
    return not isinstance(statement, _DEFINITIONS)


def _calls_of_tests(source: str, tree: ast.Module) -> str:
    """Return calls of the functions that pytest would call. Raises DataError where there are none."""
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name.startswith("test")]
    calls = "".join(f"\n{each.name}()" for each in functions if not ast.unparse(each.args))
    if not calls:
        raise DataError(
            f"the tests {_shown(source)} run nothing, so that every program would pass; give assertions, functions "
            "test_…() without arguments, or a call of what is defined, such as unittest.main()"
        )
    return calls


def _called(tree: ast.Module) -> set[str]:
    """Return the functions that statements of the module call."""
    calls = [each.value.func for each in tree.body if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)]
    return {function.id for function in calls if isinstance(function, ast.Name)}


def _of_lists(given: Mapping[str, Any], entry_point: str | None) -> Tests:
    inputs, outputs = given.get("inputs"), given.get("outputs")
    if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) > 0):
        raise DataError(f"{_shown(json.dumps(given))} has no lists `inputs` and `outputs` of the same length")
    name = given.get("fn_name") or entry_point
    if name is not None and all(isinstance(each, list) for each in inputs):
        return _calls(inputs, outputs, name)
    return InputOutput(tuple(zip(map(_text, inputs), map(_text, outputs), strict=True)))


def _of_objects(given: Sequence[Mapping[str, Any]], entry_point: str | None) -> Tests:
    if given[0].get("testtype") != "functional":
        return InputOutput(tuple((_text(each["input"]), _text(each["output"])) for each in given))
    if entry_point is None:
        raise DataError(
            "the tests are calls of a function and do not name it, and the question defines none; give `fn_name`, with "
            "`inputs` and `outputs`"
        )
    try:
        inputs = [[json.loads(line) for line in each["input"].splitlines()] for each in given]
        outputs = [json.loads(each["output"]) for each in given]
    except ValueError as error:
        raise DataError(f"an input or output of a functional test is no JSON: {error}") from None
    return _calls(inputs, outputs, entry_point)


def _calls(inputs: Sequence[Any], outputs: Sequence[Any], name: str) -> Assertions:
    data = f"_given = {json.dumps(inputs)!r}\n_wanted = {json.dumps(outputs)!r}\n"
    return Assertions(data + _COMPARISON, name)


def _text(value: Any) -> str:
    """Return a text; lists of lines are joined."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
