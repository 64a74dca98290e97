"""A process that reads pairs of formulas and answers whether they are equal: JSON lines in, JSON lines out.

Symbolic algebra may never end, in C code too, where neither a thread nor a signal handler ends it. An interval timer
with the signal's default action does: the kernel ends the child that computes, and its parent, which has the libraries
loaded and in use, answers `{"number": N, "ended": SIGNAL}` for it and forks the next child at once. The timer counts
processor time, so that a busy machine changes no answer.

Each question and its answer have a number: `{"number": N, "answer": …}`. A child that is ended just after its answer
leaves two lines with one number, of which the reader skips the second; one that is ended between questions leaves none.
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
"""Bytes of address space; a formula that needs more raises MemoryError instead of exhausting the machine."""

_PR_SET_PDEATHSIG = 1
_NONE = 0
"""Number that stands for no open question."""


def main() -> None:
    logging.disable(logging.WARNING)  # math-verify warns about timeouts it does not have to keep
    # The end of input ends this process. Signals that a terminal or scheduler sends to all processes are meant for the
    # driver, which needs answers until its step is done; and a child that they ended would look like one out of time.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY if limit < 0 else min(_MAX_MEMORY, limit), limit))
    # What the libraries initialise at their first use takes longer than most comparisons; children inherit it.
    for task, formulas in (("equal", [r"\frac{1}{2}", "0.5"]), ("canonical", [r"\sin(x)^2+\cos(x)^2"])):
        _answered(task, formulas)
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
    """Answer questions until the input ends, or a comparison ends this process. It does not outlive its parent.

    open_question: number of the question that is being answered, in memory shared with the parent.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    # One request is read at a time, and the next comes after its answer: none is lost with a buffer.
    while line := sys.stdin.readline():
        request = json.loads(line)
        _NUMBER.pack_into(open_question, 0, request["number"])
        signal.setitimer(signal.ITIMER_PROF, request["timeout_s"])
        answer = _answered(request["task"], request["formulas"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps({"number": request["number"], "answer": answer}), flush=True)
        _NUMBER.pack_into(open_question, 0, _NONE)


def _answered(task: str, formulas: list[str]) -> Any:
    try:
        parsed = [parse(f"${formula}$", parsing_timeout=None) for formula in formulas]
        if task == "canonical":
            return _canonical(parsed[0])
        return _are_equal(*parsed) or _are_equal(*(list(map(_with_unit, each)) for each in parsed))
    except (Exception, RecursionError, MemoryError):
        return None if task == "canonical" else False


def _are_equal(wanted: list[Any], given: list[Any]) -> bool:
    return bool(verify(wanted, given, timeout_seconds=None, allow_set_relation_comp=True))


def _with_unit(formula: Any) -> Any:
    """Read the letter i as the imaginary unit, but where it is an index."""
    units = {each: sympy.I for each in getattr(formula, "free_symbols", ()) if each.name == "i"}
    return formula.subs(units).doit() if units else formula


def _canonical(parsed: list[Any]) -> str | None:
    """Return one text for all formulas that simplify to the same; 3 for x = 3."""
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
