"""Runs that several tests look at: each starts Ray, which takes seconds."""

from pathlib import Path

import pytest

from tests.tiny import Tiny
from tests.training.launch import SCRIPT, Run, start

STEPS = 30
SAVE_EVERY = 10
VALIDATE_EVERY = 15
STUDENT_TIMES = [f"perf/{name}_s" for name in ("handoff", "student_forward", "loss", "student_backward", "optimizer")]


@pytest.fixture(scope="session")
def reference(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that ends well, with everything switched on; its leftovers are looked for before others start."""
    run = start(
        tmp_path_factory.mktemp("runs") / "reference",
        tiny.overrides(
            f"train.max_steps={STEPS}",
            f"train.save_every={SAVE_EVERY}",
            f"train.validate_every={VALIDATE_EVERY}",
            "train.keep_last=2",
            "loss.scaling=dynamic",
            "data.num_workers=1",
            "logging.tensorboard.enabled=true",
            "logging.wandb.enabled=true",
            "logging.wandb.mode=offline",
        ),
    )
    run.wait_for_step(1)
    run.processes()
    assert run.end() == 0, run.output
    return run


FAULTY = Path(__file__).with_name("faulty_workers.py")


def resumed(reference: Run, output_dir: Path, *overrides: str, fault: str | None = None) -> Run:
    """A run by the reference's config.yaml alone, without what is not needed twice; maybe with workers of `FAULTY`."""
    return start(
        output_dir,
        [
            "--config",
            str(reference.output_dir / "config.yaml"),
            "run.resume=auto",
            "logging.tensorboard.enabled=false",
            "logging.wandb.enabled=false",
            *overrides,
        ],
        script=FAULTY if fault else SCRIPT,
        arguments=[fault] if fault else [],
    )
