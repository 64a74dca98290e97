"""Tiny models and data that need no network, named `demo:…` in a config."""

from pathlib import Path

from nemo_opd.errors import ModelError

DEMO_PREFIX = "demo:"
MODEL_NAMES = ("student", "teacher_same", "teacher_cross")
"""Models of the demo corpus."""
ARITHMETIC_MODEL_NAMES = ("arithmetic_student", "arithmetic_reader", "arithmetic_teacher", "arithmetic_teacher_cross")
"""Models of the demo's arithmetic."""


def is_demo(ref: str) -> bool:
    """Return whether a reference belongs to the demo, such as `demo:student` or `demo:train`."""
    return ref.startswith(DEMO_PREFIX)


def model_path(name: str) -> Path:
    """Return the Hugging Face folder of a demo model. Raises ModelError if the name is in neither tuple."""
    names = (*MODEL_NAMES, *ARITHMETIC_MODEL_NAMES)
    if name not in names:
        choices = ", ".join(f"{DEMO_PREFIX}{choice}" for choice in names)
        raise ModelError(f"{DEMO_PREFIX}{name}: the demo has no such model; choose from {choices}")
    return Path(__file__).parent / "models" / name
