"""Triton's interpreter in a process that was forked from one with Triton's compiler."""

import json
import os
import sys
from importlib import import_module
from pathlib import Path


def interpret() -> None:
    """Use it from here on."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and "_C" not in name]:
        del sys.modules[name]


def write_results(_: int, file: Path) -> None:
    """Write what `interpreted` finds as JSON."""
    interpret()
    file.write_text(json.dumps(import_module("tests.kernels.interpreted").main()))
    # The interpreter's teardown takes seconds with everything that was imported.
    os._exit(0)
