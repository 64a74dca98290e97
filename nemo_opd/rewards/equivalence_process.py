"""A process that reads pairs of formulas and answers whether they are equal: JSON lines in, JSON lines out.

It is one because symbolic algebra can run for ever, in C code too, where neither a thread nor a signal handler ends it.
An interval timer with the signal's default action does: the kernel ends the process, and whoever asked starts another.
The timer counts processor time, so that a busy machine changes no answer.
"""

import json
import logging
import resource
import signal
import sys
from typing import Any

import sympy
from math_verify import parse, verify

MAX_MEMORY = 4 << 30
"""Bytes of address space; a formula that wants more raises MemoryError instead of taking the machine down."""


def main() -> None:
    logging.disable(logging.WARNING)  # math-verify warns about timeouts it does not have to keep
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for who asks; end of input ends this
    limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY if limit < 0 else min(MAX_MEMORY, limit), limit))
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["timeout_s"])
        answer = answered(request["task"], request["formulas"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


def answered(task: str, formulas: list[str]) -> Any:
    try:
        parsed = [parse(f"${formula}$", parsing_timeout=None) for formula in formulas]
        if task == "canonical":
            return canonical(parsed[0])
        wanted, given = parsed
        return verify(wanted, given, timeout_seconds=None, allow_set_relation_comp=True)
    except (Exception, RecursionError, MemoryError):
        return None if task == "canonical" else False


def canonical(parsed: list[Any]) -> str | None:
    """One text for formulas that simplify to the same; of x = 3 the 3."""
    if not parsed:
        return None
    formula = parsed[0]
    if isinstance(formula, str):
        return formula
    if isinstance(formula, sympy.Eq) and formula.lhs.is_Symbol:
        formula = formula.rhs
    formula = sympy.simplify(sympy.nsimplify(formula.doit(), rational=True))
    return str(sympy.expand(formula) if isinstance(formula, sympy.Expr) else formula)


if __name__ == "__main__":
    main()
