"""Triton's interpreter in a process that was forked from one with Triton's compiler."""

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def interpret() -> None:
    """Import Triton again, with its interpreter in place of its compiler."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and "_C" not in name]:
        del sys.modules[name]
    interpreter = import_module("triton.runtime.interpreter")
    patch_language, patched = interpreter._patch_lang, set()

    def once(function: Any) -> Any:
        """Patch a function's triton.language once; a patch at each call takes a third of the time."""
        if function not in patched:
            patch_language(function)
            patched.add(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = once


def write_results(_: int, file: Path) -> None:
    """Write the results of `interpreted` as JSON."""
    interpret()
    file.write_text(json.dumps(import_module("tests.kernels.interpreted").main()))
    # Skips the teardown, which takes seconds with so many imports.
    os._exit(0)
