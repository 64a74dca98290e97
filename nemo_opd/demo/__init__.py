"""Tiny models and data that need no network: what `demo:` refers to in a config."""

from pathlib import Path

from nemo_opd.errors import ModelError

DEMO_PREFIX = "demo:"
MODEL_NAMES = ("student", "teacher_same", "teacher_cross")
"""Models of the demo corpus."""
ARITHMETIC_MODEL_NAMES = ("arithmetic_student", "arithmetic_reader", "arithmetic_teacher", "arithmetic_teacher_cross")
"""Models of the demo's sums."""


def is_demo(ref: str) -> bool:
    """Return whether a reference is the demo's, such as `demo:student` or `demo:train`."""
    return ref.startswith(DEMO_PREFIX)


def model_path(name: str) -> Path:
    """Return the Hugging Face folder of a demo model, by a name of either tuple. Raises ModelError for another name."""
    names = (*MODEL_NAMES, *ARITHMETIC_MODEL_NAMES)
    if name not in names:
        choices = ", ".join(f"{DEMO_PREFIX}{known}" for known in names)
        raise ModelError(f"model {DEMO_PREFIX}{name} is no demo model; the demo models are {choices}")
    return Path(__file__).parent / "models" / name
