"""Errors of pydantic in one line."""

from pydantic import ValidationError


def first_problem(error: ValidationError) -> str:
    """Return which key is wrong, why, and what stands there."""
    problem = error.errors(include_url=False)[0]
    key, value = ".".join(map(str, problem["loc"])), repr(problem["input"])
    shown = value if len(value) <= 60 else f"{value[:60]}…"
    what = "" if problem["type"] == "missing" else f", not {shown}"
    reason = f"{problem['msg'][0].lower()}{problem['msg'][1:]}{what}"
    return f"{key}: {reason}" if key else reason
