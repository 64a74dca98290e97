"""A real teacher killed in the middle of its forward pass, a batch ahead of the student: one message, and a new start.

The other rank of the teacher waits in a collective then, and the student trains.
"""

from pathlib import Path

import pytest

from tests.training import dying_teacher
from tests.training.conftest import SAVE_EVERY, STEPS, resumed
from tests.training.launch import Run, start

pytestmark = pytest.mark.slow
SEPARATE = ("cluster.placement=separate", "cluster.teacher_ranks=[2,1]", "data.num_workers=0")
STEP = 13


@pytest.fixture(scope="module")
def killed(reference: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = ["--config", str(reference.output_dir / "config.yaml"), *SEPARATE, *WITHOUT_EXTRAS]
    run = start(tmp_path_factory.mktemp("killed") / "run", settings, script=Path(dying_teacher.__file__))
    run.wait_for_step(1)
    run.processes()
    run.end()
    return run


WITHOUT_EXTRAS = ("logging.tensorboard.enabled=false", "logging.wandb.enabled=false")


def test_the_message_names_group_rank_and_phase(killed: Run) -> None:
    assert killed.process.returncode == 1
    assert killed.last_line.startswith(f"error: teacher cross rank 1 died while reading a batch (step {STEP}) (")
    assert killed.last_line.endswith("run.resume=auto continues from the last checkpoint")
    assert "Traceback" not in killed.output


def test_nothing_is_left_but_the_checkpoint_before(killed: Run) -> None:
    assert killed.checkpoints == [f"step_{SAVE_EVERY:06d}"]
    assert killed.metrics[-1]["step"] < STEP
    assert killed.leftovers() == []


def test_the_run_goes_on_as_if_nothing_had_happened(reference: Run, killed: Run) -> None:
    run = resumed(reference, killed.output_dir, *SEPARATE)
    run.wait_for_step(STEP)
    assert run.end() == 0, run.output
    assert [record["step"] for record in run.metrics] == list(range(STEPS + 1))
    for expected, actual in zip(reference.metrics, run.metrics, strict=True):
        names = [name for name in expected if not name.startswith("perf/")]
        assert {name: actual[name] for name in names} == {name: expected[name] for name in names}, expected["step"]
