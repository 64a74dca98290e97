"""Pydantic's errors in one line."""

from pydantic import ValidationError


def first_problem(error: ValidationError) -> str:
    """Return the first wrong key, the reason and the value."""
    problem = error.errors(include_url=False)[0]
    key, value = ".".join(map(str, problem["loc"])), repr(problem["input"])
    excerpt = value if len(value) <= 60 else f"{value[:60]}…"
    contrast = "" if problem["type"] == "missing" else f", not {excerpt}"
    reason = f"{problem['msg'][0].lower()}{problem['msg'][1:]}{contrast}"
    return f"{key}: {reason}" if key else reason
