"""Tiny models and a corpus that need no network: what `demo:` refers to in a config."""

from pathlib import Path

from nemo_opd.errors import ModelError

DEMO_PREFIX = "demo:"
MODEL_NAMES = ("student", "teacher_same", "teacher_cross")


def is_demo(ref: str) -> bool:
    """True for a reference such as `demo:student` or `demo:train`."""
    return ref.startswith(DEMO_PREFIX)


def model_path(name: str) -> Path:
    """The Hugging Face folder of a demo model, one of MODEL_NAMES. Raises ModelError for another name."""
    if name not in MODEL_NAMES:
        choices = ", ".join(f"{DEMO_PREFIX}{known}" for known in MODEL_NAMES)
        raise ModelError(f"model {DEMO_PREFIX}{name} is no demo model; the demo models are {choices}")
    return Path(__file__).parent / "models" / name
