"""Teachers on devices of their own, a batch ahead of the student: the results of taking turns, to the last bit.

The run is the reference's but for where its teachers are. On its way it is stopped with a batch under way, and then
loses a teacher in the middle of a forward pass, whose other rank waits in a collective while the student trains.
"""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training import dying_teacher
from tests.training.conftest import FAULTY, SAVE_EVERY, STEPS, STUDENT_TIMES, resumed
from tests.training.faulty_workers import SLOW_S
from tests.training.launch import Run

pytestmark = pytest.mark.slow

# One teacher cuts a batch in two where the student has it whole, the other one does not.
SEPARATE = ("cluster.placement=separate", "cluster.teacher_ranks=[2,1]", "data.num_workers=0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("separate") / "run"


@pytest.fixture(scope="module")
def stopped(reference: Run, folder: Path) -> Run:
    """As job schedulers do it, between two checkpoints; until then either half of a step is slow."""
    run = resumed(reference, folder, *SEPARATE, script=FAULTY, arguments=["all_slow"])
    run.wait_for_step(SAVE_EVERY + 2)
    assert len(run.workers()) == 4
    run.process.terminate()
    assert run.end() == 0, run.output
    return run


@pytest.fixture(scope="module")
def broken(reference: Run, stopped: Run, folder: Path) -> Run:
    begin = int(stopped.metrics[-1]["step"])
    run = resumed(reference, folder, *SEPARATE, script=Path(dying_teacher.__file__))
    run.wait_for_step(begin + 1)
    run.processes()
    run.end()
    return run


@pytest.fixture(scope="module")
def finished(reference: Run, broken: Run, folder: Path) -> Run:
    run = resumed(reference, folder, *SEPARATE)
    assert run.end() == 0, run.output
    return run


def test_stopping_with_a_batch_under_way_leaves_a_checkpoint_and_nothing_else(stopped: Run) -> None:
    last = stopped.metrics[-1]["step"]
    assert last < STEPS
    assert "run.resume=auto" in stopped.last_line
    assert stopped.checkpoints[-1] == f"step_{last:06d}"
    assert stopped.leftovers() == []


def test_a_step_takes_as_long_as_the_slower_half_and_not_both(stopped: Run) -> None:
    """Of the first steps some set things up. Half of the student's sleep is left for the work itself."""
    seconds = sorted(record["perf/step_s"] for record in stopped.metrics[3:])
    assert SLOW_S <= seconds[len(seconds) // 2] < 1.5 * SLOW_S


def test_a_killed_teacher_is_named_with_rank_and_phase(broken: Run) -> None:
    assert broken.process.returncode == 1
    assert re.match(r"error: teacher cross rank 1 died while reading a batch \(step 2\d\) \(", broken.last_line)
    assert broken.last_line.endswith("run.resume=auto continues from the last checkpoint")
    assert "Traceback" not in broken.output
    assert broken.checkpoints[-1] == f"step_{2 * SAVE_EVERY:06d}"
    assert broken.metrics[-1]["step"] < STEPS
    assert broken.leftovers() == []


def test_metrics_equal_those_of_taking_turns(reference: Run, finished: Run) -> None:
    """Bugs: a batch read twice or skipped where the run was stopped, buffers that are overwritten while they are read,
    rows of another rank, a validation that disturbs the batch under way."""
    assert [record["step"] for record in finished.metrics] == list(range(STEPS + 1))
    for expected, actual in zip(reference.metrics, finished.metrics, strict=True):
        names = [name for name in expected if not name.startswith("perf/")]
        assert {name: actual[name] for name in names} == {name: expected[name] for name in names}, expected["step"]


def test_weights_equal_those_of_taking_turns(reference: Run, finished: Run) -> None:
    ours, expected = (load_file(run.output_dir / "final" / "model.safetensors") for run in (finished, reference))
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name


def test_only_the_wait_for_teachers_is_time_of_a_step(finished: Run) -> None:
    for record in finished.metrics[1:]:
        parts = ["perf/data_wait_s", "perf/teacher_wait_s", *STUDENT_TIMES, "perf/other_s"]
        assert sum(record[name] for name in parts) == pytest.approx(record["perf/step_s"], rel=1e-9)
        assert record["perf/teacher_s"] == max(record["perf/teacher_s/cross"], record["perf/teacher_s/same"])


def test_finished_run_leaves_nothing(finished: Run) -> None:
    assert finished.leftovers() == []
