"""Triton's interpreter in a process that was forked from one with Triton's compiler."""

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def interpret() -> None:
    """Use it from here on."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and "_C" not in name]:
        del sys.modules[name]
    interpreter = import_module("triton.runtime.interpreter")
    patch_language, patched = interpreter._patch_lang, set()

    def once(function: Any) -> Any:
        """Patch what a function sees of triton.language for good, not at each call, which takes a third of the time."""
        if function not in patched:
            patch_language(function)
            patched.add(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = once


def write_results(_: int, file: Path) -> None:
    """Write what `interpreted` finds as JSON."""
    interpret()
    file.write_text(json.dumps(import_module("tests.kernels.interpreted").main()))
    # The interpreter's teardown takes seconds with everything that was imported.
    os._exit(0)
