"""A process that runs a tokenizer's untrusted code: chat templates, and templates that parse responses.

It reads requests, each after a line with its limits and its length, and answers with a line of JSON: `{"result": …}`,
or `{"error": …}` if the template fails. A single operation of a template may take forever in C code, which neither a
thread nor a signal handler can interrupt. An interval timer with the signal's default action can: the kernel ends the
process. The timer counts processor time, so that a busy machine does not change results. A process that needs too much
memory, or whose template writes too long a text, ends itself.
"""

import json
import os
import pickle
import resource
import signal
import sys
from types import SimpleNamespace
from typing import Any

NEEDS_MEMORY, TOO_LONG = 3, 4
"""Exit statuses of a process that needed more memory than its limit, or whose template wrote too long a text."""


def main() -> None:
    memory_bytes = int(sys.argv[1])
    # The end of input ends this process. Signals that a terminal or scheduler sends to all processes are meant for the
    # process that asks, which may need answers until it has saved its work.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes if hard_limit < 0 else min(memory_bytes, hard_limit),) * 2)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no answer
    while limits := sys.stdin.buffer.readline().split():
        cpu_s, most_characters, num_bytes = map(float, limits)
        request = sys.stdin.buffer.read(int(num_bytes))
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answer = _answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if len(answer) > most_characters:
            sys.exit(TOO_LONG)
        answers.write(answer.encode("utf-8", "surrogatepass") + b"\n")


def _answer(request: bytes) -> str:
    try:
        task, arguments = pickle.loads(request)
        result = render(**arguments) if task == "render" else parse(**arguments)
        return json.dumps({"result": result}, ensure_ascii=False)
    except MemoryError:
        sys.exit(NEEDS_MEMORY)
    except Exception as error:  # a template is a program: it may fail with any exception
        return json.dumps({"error": str(error) or type(error).__name__}, ensure_ascii=False)


def render(template: str, conversation: list[Any], settings: dict[str, Any]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts: Any = render_jinja_template([conversation], chat_template=template, **settings)[0]
    text = str(texts[0])
    text.encode()  # half of a surrogate pair has no tokens
    return text


def parse(templates: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """Return what a tokenizer with these attributes, such as `response_template`, makes of a response."""
    from transformers import PreTrainedTokenizerBase

    tokenizer: Any = SimpleNamespace(**templates)
    return PreTrainedTokenizerBase.parse_response(tokenizer, **arguments)


if __name__ == "__main__":
    main()
