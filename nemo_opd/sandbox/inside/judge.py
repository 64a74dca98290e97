"""Tests of a program in another process: `judge.py DESCRIPTOR`, with the tests as JSON on standard input.

The tests run as a script; their output is discarded. Prints `passed` if they finish without an error or exit with
status 0. No code of the program runs in this process: its results arrive as plain values and are compared here.
"""

import ast
import builtins
import contextlib
import importlib
import json
import os
import sys
import types
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from values import Line, decoded, encoded

del sys.path[0]


class _EndedError(BaseException):
    """The program has ended or broken down. Not an Exception, so that tests that expect one do not catch it."""


class Program:
    """A proxy of the program's module."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self.is_sound = True
        self._value(line.receive)

    def find(self, name: str) -> Any:
        """Return the program's object `name`. Raises NameError if it does not define this name."""
        return self.ask({"name": name})

    def ask(self, request: dict[str, Any]) -> Any:
        def answer() -> Any:
            self._line.send(request)
            return self._line.receive()

        return self._value(answer, request)

    def _value(self, answer: Any, request: dict[str, Any] | None = None) -> Any:
        try:
            reply = answer()
            if "raised" in reply:
                text, *classes = map(str, reply["raised"])
            elif "absent" in reply:
                text, classes = f"the program has no {(request or {}).get('name')}", ["NameError"]
            else:
                return self._read(reply)
        except Exception as error:
            self.is_sound = False
            raise _EndedError(str(error)) from None
        raise _error(classes, text)

    def _read(self, reply: dict[str, Any]) -> Any:
        def remote(reference: dict[str, Any]) -> Remote:
            return Remote(self, reference)

        value = decoded(reply["value"], remote)
        if "arguments" not in reply:
            return value
        return value, decoded(reply["arguments"], remote)


class Remote:
    """A proxy of a program's object that is not a plain value. It can be called, has attributes and can be passed back.

    It equals nothing else and has no operators, so that the program's methods cannot decide a test.
    """

    def __init__(self, program: Program, reference: dict[str, Any]) -> None:
        self.__dict__["_Remote__program"] = program
        self.__dict__["_Remote__reference"] = reference

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__program.ask({"object": self.__reference, "attribute": name})

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        def reference(value: Any) -> Any:
            if isinstance(value, Remote):
                return value.__reference
            raise TypeError(f"a {type(value).__name__} cannot be passed to the program")

        positional = [encoded(argument, reference) for argument in arguments]
        keywords = {"dict": [[name, encoded(argument, reference)] for name, argument in named.items()]}
        value, changed = self.__program.ask({"object": self.__reference, "arguments": positional, "named": keywords})
        for argument, after in zip(arguments, changed, strict=True):
            _update(argument, after)
        return value

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote) and other.__reference == self.__reference:
            return True
        raise TypeError("an object of the program cannot be compared")

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("an object of the program is neither true nor false")


def _update(argument: Any, changed: Any) -> None:
    """Apply the program's changes of its copy to an argument."""
    if type(argument) is not type(changed) or isinstance(argument, Remote) or argument == changed:
        return
    if isinstance(argument, list | bytearray):
        argument[:] = changed
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(changed)


def _error(classes: list[str], text: str) -> Exception:
    for name in classes:
        error_class = getattr(builtins, name, None)
        if isinstance(error_class, type) and issubclass(error_class, Exception):
            with contextlib.suppress(TypeError):  # UnicodeDecodeError, for example, needs more arguments
                return error_class(text)
    return Exception(text)


def _names(code: types.CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return {*code.co_names}.union(*inner)


def _called(source: str) -> set[str]:
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


def _candidate(program: Program, entry_point: str) -> Any:
    """Return the function, which may be a method of a class Solution, as on LeetCode."""
    code = compile(entry_point, "entry_point", "eval")
    try:
        return eval(code, {name: program.find(name) for name in code.co_names[:1]})
    except NameError:
        return getattr(program.find("Solution")(), entry_point)


def main() -> None:
    request = json.load(sys.stdin)
    code = compile(request["tests"], "tests.py", "exec")
    program = Program(Line(int(sys.argv[1])))
    sys.argv = ["tests.py"]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        _add_names(vars(module), program, request["entry_point"], _names(code), _called(request["tests"]))
        try:
            exec(code, vars(module))
        except SystemExit as ending:  # raised by the tests; the program cannot raise it here
            if ending.code not in (None, 0):
                raise
    if program.is_sound:
        print("passed", flush=True)


def _add_names(
    namespace: dict[str, Any], program: Program, entry_point: str | None, names: set[str], called: set[str]
) -> None:
    """Define the names that the tests use: standard library modules and the program's objects."""
    if entry_point:
        namespace["candidate"] = _candidate(program, entry_point)
    for name in sorted(names - {*dir(builtins), *namespace}):
        # Modules are not taken from the program, which could forge comparisons. A name that is called is not a module.
        if name in sys.stdlib_module_names and name not in called:
            with contextlib.suppress(ImportError):  # a module for another operating system
                namespace[name] = importlib.import_module(name)
            continue
        with contextlib.suppress(NameError):
            namespace[name] = program.find(name)


if __name__ == "__main__":
    main()
