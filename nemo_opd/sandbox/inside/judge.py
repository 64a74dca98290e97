"""Tests of a program that runs elsewhere: `judge.py DESCRIPTOR`, with the tests' JSON on the standard input.

The tests run as a script does; what they print is lost. Prints `passed` when they have run to their end without an
error, or exit with status 0. The program has no part in this process: what it returns arrives as plain values, and
comparisons are made here.
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
    """The program has ended or broken down; no Exception, so that tests which expect one do not take it for that."""


class Program:
    """The names of the program."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self.is_sound = True
        self._value(line.receive)

    def find(self, name: str) -> Any:
        """Return what the program calls `name`. Raises NameError where it has no such name."""
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
    """An object of the program that is no plain value: to be called, asked for attributes and handed back.

    It equals nothing and has no operators, so that the program's own methods cannot decide a test.
    """

    def __init__(self, program: Program, reference: dict[str, Any]) -> None:
        self.__dict__["_Remote__program"] = program
        self.__dict__["_Remote__reference"] = reference

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__program.ask({"of": self.__reference, "attribute": name})

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        def reference(value: Any) -> Any:
            if isinstance(value, Remote):
                return value.__reference
            raise TypeError(f"a {type(value).__name__} cannot be given to the program")

        given = [encoded(each, reference) for each in arguments]
        names = {"dict": [[name, encoded(each, reference)] for name, each in named.items()]}
        value, after = self.__program.ask({"of": self.__reference, "arguments": given, "named": names})
        for own, changed in zip(arguments, after, strict=True):
            _change(own, changed)
        return value

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote) and other.__reference == self.__reference:
            return True
        raise TypeError("an object of the program cannot be compared")

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("an object of the program is neither true nor false")


def _change(own: Any, changed: Any) -> None:
    """Do to an argument what the program did to its copy."""
    if type(own) is not type(changed) or isinstance(own, Remote) or own == changed:
        return
    if isinstance(own, list | bytearray):
        own[:] = changed
    elif isinstance(own, dict | set):
        own.clear()
        own.update(changed)


def _error(classes: list[str], text: str) -> Exception:
    for name in classes:
        found = getattr(builtins, name, None)
        if isinstance(found, type) and issubclass(found, Exception):
            with contextlib.suppress(TypeError):  # of one that takes more, such as UnicodeDecodeError
                return found(text)
    return Exception(text)


def _names(code: types.CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return {*code.co_names}.union(*inner)


def _called(source: str) -> set[str]:
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


def _candidate(program: Program, entry_point: str) -> Any:
    """Return the function, which may be a method of a class Solution, as LeetCode has it."""
    code = compile(entry_point, "entry_point", "eval")
    try:
        return eval(code, {name: program.find(name) for name in code.co_names[:1]})
    except NameError:
        return getattr(program.find("Solution")(), entry_point)


def main() -> None:
    given = json.load(sys.stdin)
    code = compile(given["tests"], "tests.py", "exec")
    program = Program(Line(int(sys.argv[1])))
    sys.argv = ["tests.py"]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        _add_names(vars(module), program, given["entry_point"], _names(code), _called(given["tests"]))
        try:
            exec(code, vars(module))
        except SystemExit as ending:  # no program can raise it here
            if ending.code not in (None, 0):
                raise
    if program.is_sound:
        print("passed", flush=True)


def _add_names(
    namespace: dict[str, Any], program: Program, entry_point: str | None, names: set[str], called: set[str]
) -> None:
    """Give the tests what they name: modules of the standard library, and all else that the program has."""
    if entry_point:
        namespace["candidate"] = _candidate(program, entry_point)
    for name in sorted(names - {*dir(builtins), *namespace}):
        # A module of the tests is not the program's: it would decide what they compare with. What is called is none.
        if name in sys.stdlib_module_names and name not in called:
            with contextlib.suppress(ImportError):  # of another operating system
                namespace[name] = importlib.import_module(name)
            continue
        with contextlib.suppress(NameError):
            namespace[name] = program.find(name)


if __name__ == "__main__":
    main()
