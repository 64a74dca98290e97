"""Chat templates and response templates of tokenizers, run with limits in a process of their own."""

from __future__ import annotations

import atexit
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_opd.alignment.pieces import name_of
from nemo_opd.alignment.template_process import NEEDS_MEMORY, TOO_LONG
from nemo_opd.errors import AlignmentError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_S = 20.0
"""Longest use of a template in seconds of processor time."""
_MEMORY_BYTES = 1 << 30
_EXPANSION, _ALWAYS_ALLOWED = 16, 1 << 20
"""Longest answer in characters: so many times the bytes of the request, or so many."""
_FILE = Path(__file__).with_name("template_process.py")
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}


class TemplateFailure(Exception):  # noqa: N818  not an error of ours: templates refuse conversations by failing
    """A template refuses its input, or fails."""


def apply_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **settings: Any) -> str:
    """Return the text of `tokenizer.apply_chat_template`. Keys of messages that are None are kept.

    Raises TemplateFailure if the template refuses the messages, and AlignmentError if it takes longer than
    `TEMPLATE_S`, more than 1 GiB of memory, or writes many times the text of the messages.
    """
    try:
        template = tokenizer.get_chat_template(None, settings.get("tools"))
    except ValueError as error:  # none of several templates is the default
        raise TemplateFailure(str(error)) from error
    arguments = {
        "template": template,
        "conversation": [dict(message) for message in messages],
        "settings": {**tokenizer.special_tokens_map, **settings},
    }
    return str(_ask("render", arguments, f"the chat template of {name_of(tokenizer)}", "chat_template"))


def parse_response(tokenizer: PreTrainedTokenizerBase, text: str, **settings: Any) -> Any:
    """Return the result of `tokenizer.parse_response`. Raises as `apply_template` does."""
    names = ("response_template", "response_schema")
    templates = {name: getattr(tokenizer, name, None) for name in names}
    arguments = {"templates": templates, "arguments": {"response": text, **settings}}
    return _ask("parse", arguments, f"the response template of {name_of(tokenizer)}", "tokenizer")


def _ask(task: str, arguments: dict[str, Any], template: str, setting: str) -> Any:
    written = io.BytesIO()
    pickler = pickle.Pickler(written)
    pickler.fast = True  # texts that repeat count each time
    try:
        pickler.dump((task, arguments))
    except Exception as error:  # values of a user's environment
        raise TemplateFailure(f"it cannot be given these messages ({error})") from error
    request = written.getvalue()
    longest = max(_ALWAYS_ALLOWED, _EXPANSION * len(request))
    try:
        answer = _process.ask(b"%f %d %d\n" % (TEMPLATE_S, longest, len(request)) + request)
    except _ProcessEnded as error:
        raise AlignmentError(f"{template} {error}; set a {setting} that needs less") from None
    if "error" in answer:
        raise TemplateFailure(answer["error"])
    return answer["result"]


class _ProcessEnded(Exception):  # noqa: N818  `ask` turns it into an error
    """A process that ended in place of an answer; the message completes a sentence about the template."""


class _Process:
    """The process, which starts at the first request and again after one that ended it. Threads take turns."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may fork
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: bytes) -> dict[str, Any]:
        with self.lock:
            process = self._ensure_process()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                with suppress(BrokenPipeError):  # the answer is missing, too
                    process.stdin.write(request)
                    process.stdin.flush()
                line = process.stdout.readline()
                if line.endswith(b"\n"):
                    return dict(json.loads(line.decode("utf-8", "surrogatepass")))
                status = process.wait()
            except BaseException:
                self.end()  # an answer that was not read would be taken for the next one
                raise
            self.end()
        raise _ProcessEnded(_reason(status))

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget()

    def after_fork_in_child(self) -> None:
        if self._process is not None:
            self._process.returncode = 0  # it is not a child of this process
            self._forget()
        self.lock.release()

    def _forget(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):  # buffered output has no reader any more
                pipe.close()

    def _ensure_process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            # Run as a file, since importing the package takes time. -P: modules in its folder shadow others.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_FILE), str(_MEMORY_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **_ENVIRONMENT},
            )
        return self._process


def _reason(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"did not return in {TEMPLATE_S:g} s of processor time"
    if status == NEEDS_MEMORY:
        return f"needs more than {_MEMORY_BYTES >> 30} GiB of memory"
    if status == TOO_LONG:
        return f"writes more than {_EXPANSION} times the text that it gets"
    return f"ended its process with status {status}"


_process = _Process()
atexit.register(_process.end)
os.register_at_fork(
    before=_process.lock.acquire,
    after_in_parent=_process.lock.release,
    after_in_child=_process.after_fork_in_child,
)
