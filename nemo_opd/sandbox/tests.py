"""Tests of a program in the formats of datasets."""

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_opd.errors import DataError

_CHECK = "check"
"""Function of the tests that takes the program's function, as in HumanEval."""


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
