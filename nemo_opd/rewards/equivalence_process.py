"""A process that compares formulas: JSON lines in, JSON lines out.

Symbolic algebra may run forever, even in C code, which neither a thread nor a signal handler can interrupt. An interval
timer with the signal's default action can: the kernel kills the computing child, and its parent, which keeps the
libraries loaded and warm, answers `{"number": N, "ended": SIGNAL}` in its place and forks the next child at once. The
timer counts processor time, so that a busy machine does not change answers.

Each question and its answer have a number: `{"number": N, "answer": …}`. A child killed right after its answer leaves
two lines with the same number; the reader skips the second. A child killed between questions leaves no line.
"""

import ctypes
import json
import logging
import mmap
import os
import resource
import signal
import struct
import sys
from typing import Any

import sympy
from math_verify import parse, verify

_NUMBER = struct.Struct("q")
_MAX_MEMORY = 4 << 30
"""Bytes of address space. A formula that needs more raises MemoryError instead of exhausting the machine."""

_PR_SET_PDEATHSIG = 1
_NONE = 0
"""Number that means no open question."""


def main() -> None:
    logging.disable(logging.WARNING)  # math-verify warns that its own timeouts are off
    # The end of input ends this process. Signals that a terminal or scheduler sends to all processes are meant for the
    # driver, which needs answers until its step is done. A child that they killed would look like a timeout.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY if limit < 0 else min(_MAX_MEMORY, limit), limit))
    # Warm up the libraries: their first use takes longer than most comparisons, and children inherit the result.
    for task, formulas in (("equal", [r"\frac{1}{2}", "0.5"]), ("canonical", [r"\sin(x)^2+\cos(x)^2"])):
        _answer(task, formulas)
    parent, open_question = os.getpid(), mmap.mmap(-1, 8)
    while True:
        if not (child := os.fork()):
            _answer_all(parent, open_question)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status >= 0:
            sys.exit(status)
        if number := _NUMBER.unpack_from(open_question)[0]:
            _NUMBER.pack_into(open_question, 0, _NONE)
            print(json.dumps({"number": number, "ended": -status}), flush=True)


def _answer_all(parent: int, open_question: mmap.mmap) -> None:
    """Answer questions until the input ends or a comparison kills this process, which does not outlive its parent.

    open_question: number of the current question, in memory shared with the parent.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    # The next request comes only after the answer, so no request is lost in a killed child's buffer.
    while line := sys.stdin.readline():
        request = json.loads(line)
        _NUMBER.pack_into(open_question, 0, request["number"])
        signal.setitimer(signal.ITIMER_PROF, request["timeout_s"])
        answer = _answer(request["task"], request["formulas"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps({"number": request["number"], "answer": answer}), flush=True)
        _NUMBER.pack_into(open_question, 0, _NONE)


def _answer(task: str, formulas: list[str]) -> Any:
    try:
        parsed = [parse(f"${formula}$", parsing_timeout=None) for formula in formulas]
        if task == "canonical":
            return _canonical(parsed[0])
        return _are_equal(*parsed) or _are_equal(*(list(map(_with_unit, readings)) for readings in parsed))
    except (Exception, RecursionError, MemoryError):
        return None if task == "canonical" else False


def _are_equal(expected: list[Any], answer: list[Any]) -> bool:
    return bool(verify(expected, answer, timeout_seconds=None, allow_set_relation_comp=True))


def _with_unit(formula: Any) -> Any:
    """Read the letter i as the imaginary unit, except as an index."""
    units = {symbol: sympy.I for symbol in getattr(formula, "free_symbols", ()) if symbol.name == "i"}
    return formula.subs(units).doit() if units else formula


def _canonical(parsed: list[Any]) -> str | None:
    """Return the same text for all formulas with the same simplified form; 3 for x = 3."""
    if not parsed:
        return None
    formula = _with_unit(parsed[0])
    if isinstance(formula, str):
        return formula
    if isinstance(formula, sympy.Eq) and formula.lhs.is_Symbol:
        formula = formula.rhs
    formula = sympy.simplify(sympy.nsimplify(formula.doit(), rational=True))
    return str(sympy.expand(formula) if isinstance(formula, sympy.Expr) else formula)


if __name__ == "__main__":
    main()
