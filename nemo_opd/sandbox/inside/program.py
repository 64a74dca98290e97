"""A program whose functions are called from outside: `program.py DESCRIPTOR`, with its JSON on the standard input.

Nothing that this process reports is believed: the program can change it.
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
"""File of the program in tracebacks."""


class _Objects:
    """Objects that are no plain values, by number."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}

    def keep(self, value: Any) -> dict[str, int]:
        self._kept[id(value)] = value
        return {"object": id(value)}

    def find(self, reference: dict[str, int]) -> Any:
        return self._kept[reference["object"]]


def main() -> None:
    line = Line(int(sys.argv[1]))
    source = json.load(sys.stdin)["source"]
    # Nobody reads what it prints: a full pipe would stop it.
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
    """Compile the longest beginning, in lines, that is a program; a text that was cut ends within one."""
    lines = source.splitlines(keepends=True)
    for stop in range(len(lines), max(0, len(lines) - 200), -1):
        with contextlib.suppress(SyntaxError, ValueError):
            return compile("".join(lines[:stop]), _NAME, "exec")
    return compile(source, _NAME, "exec")


def answered(request: dict[str, Any], module: types.ModuleType, objects: _Objects) -> dict[str, Any]:
    """Return `value`, `raised` or `absent` for a request: `name`; or `of` an object `attribute`, or `arguments`."""
    try:
        if "name" in request:
            if not hasattr(module, request["name"]):
                return {"absent": True}
            return {"value": encoded(getattr(module, request["name"]), objects.keep)}
        of = objects.find(request["of"])
        if "attribute" in request:
            return {"value": encoded(getattr(of, request["attribute"]), objects.keep)}
        arguments = decoded(request["arguments"], objects.find)
        named = decoded(request["named"], objects.find)
        value = encoded(of(*arguments, **named), objects.keep)
        return {"value": value, "arguments": encoded(arguments, objects.keep)}
    except Exception as error:
        return {"raised": described(error)}


def described(error: Exception) -> list[str]:
    """Return the names of an error's classes, the most derived first, and its text."""
    with contextlib.suppress(Exception):
        return [str(error), *(kind.__name__ for kind in type(error).__mro__)]
    return ["", "Exception"]


if __name__ == "__main__":
    main()
