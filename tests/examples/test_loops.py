"""The examples of other training loops run unchanged."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.world


def test_plain_pytorch_learns() -> None:
    """Bugs: a name has moved; the gradient does not reach the student."""
    first_loss, last_loss = runpy.run_path(str(EXAMPLES / "plain_pytorch.py"))["main"](8)

    assert last_loss < first_loss


def test_trainer_learns_and_saves(tmp_path: Path) -> None:
    trainer = runpy.run_path(str(EXAMPLES / "transformers_trainer.py"))["main"](2, tmp_path)

    first = trainer.state.log_history[0]
    assert {"kd/cross", "kd/same", "kd", "ce", "loss"} <= first.keys()
    assert {"model.safetensors", "tokenizer.json"} <= {file.name for file in tmp_path.iterdir()}
