"""A program whose functions are called from outside: `program.py DESCRIPTOR`, with JSON on standard input.

Nothing that this process reports can be trusted, since the program can change it.
"""

import contextlib
import json
import os
import sys
import types
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from values import Line, decoded, encoded

del sys.path[0]

_NAME = "program.py"
"""File name of the program in tracebacks."""


class _Objects:
    """The program's objects that are not plain values, keyed by id."""

    def __init__(self) -> None:
        self._by_id: dict[int, Any] = {}

    def keep(self, value: Any) -> dict[str, int]:
        self._by_id[id(value)] = value
        return {"object": id(value)}

    def find(self, reference: dict[str, int]) -> Any:
        return self._by_id[reference["object"]]


def main() -> None:
    line = Line(int(sys.argv[1]))
    source = json.load(sys.stdin)["source"]
    # Nobody reads the program's output, and a full pipe would block it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    module = types.ModuleType("program")
    sys.modules["program"] = module
    try:
        exec(compiled(source), vars(module))
    except Exception as error:
        line.send({"raised": described(error)})
        return
    line.send({"value": None})
    objects = _Objects()
    with contextlib.suppress(EOFError):
        while True:
            line.send(answered(line.receive(), module, objects))


def compiled(source: str) -> types.CodeType:
    """Compile the longest prefix of lines that is valid Python, since a truncated response ends within a statement."""
    lines = source.splitlines(keepends=True)
    for stop in range(len(lines), max(0, len(lines) - 200), -1):
        with contextlib.suppress(SyntaxError, ValueError):
            return compile("".join(lines[:stop]), _NAME, "exec")
    return compile(source, _NAME, "exec")


def answered(request: dict[str, Any], module: types.ModuleType, objects: _Objects) -> dict[str, Any]:
    """Return `value`, `raised` or `absent` for a request: a `name`, or an `attribute` or a call of an `object`."""
    try:
        if "name" in request:
            if not hasattr(module, request["name"]):
                return {"absent": True}
            return {"value": encoded(getattr(module, request["name"]), objects.keep)}
        target = objects.find(request["object"])
        if "attribute" in request:
            return {"value": encoded(getattr(target, request["attribute"]), objects.keep)}
        arguments = decoded(request["arguments"], objects.find)
        named = decoded(request["named"], objects.find)
        value = encoded(target(*arguments, **named), objects.keep)
        return {"value": value, "arguments": encoded(arguments, objects.keep)}
    except Exception as error:
        return {"raised": described(error)}


def described(error: Exception) -> list[str]:
    """Return an error's text and the names of its classes, most derived first."""
    with contextlib.suppress(Exception):
        return [str(error), *(kind.__name__ for kind in type(error).__mro__)]
    return ["", "Exception"]


if __name__ == "__main__":
    main()
