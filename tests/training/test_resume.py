"""A run that is killed and then interrupted on its way gives the same metrics as one that is left alone.

Each fixture is the run's next part, started with the reference's config.yaml but for what may change between parts.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training.conftest import STEPS, resumed
from tests.training.launch import Run

pytestmark = pytest.mark.slow

WITHOUT_LOADER_WORKERS = "data.num_workers=0"
"""A process less to start; the order of the data does not depend on them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume") / "run"


@pytest.fixture(scope="module")
def killed(reference: Run, folder: Path) -> Run:
    """By SIGKILL of the driver, some steps after the first checkpoint."""
    run = resumed(reference, folder)
    run.wait_for_step(13)
    assert len(run.workers()) == 3
    run.process.kill()
    run.end()
    return run


@pytest.fixture(scope="module")
def interrupted(reference: Run, killed: Run, folder: Path) -> Run:
    """By Ctrl-C."""
    killed.leftovers(folders=False)
    half_written = folder / "checkpoints" / ".incomplete_step_000020"
    half_written.mkdir(exist_ok=True)
    run = resumed(reference, folder, WITHOUT_LOADER_WORKERS)
    run.wait_for_step(max(17, step_of(killed.checkpoints[-1]) + 2))
    run.processes()
    run.interrupt()
    run.end()
    checkpoints, last = run.checkpoints, run.metrics[-1]["step"]
    assert checkpoints[-1] == f"step_{last:06d}", "a checkpoint of the step that was under way"
    return run


@pytest.fixture(scope="module")
def finished(reference: Run, interrupted: Run, folder: Path) -> Run:
    run = resumed(reference, folder, WITHOUT_LOADER_WORKERS)
    assert run.end() == 0, run.output
    return run


def test_killed_run_leaves_whole_checkpoints_and_no_process(killed: Run) -> None:
    """Its Ray folder stays; the next run removes it."""
    assert killed.process.returncode == -9
    assert killed.leftovers(folders=False) == []
    assert "step_000010" in killed.checkpoints


def test_next_run_clears_up_after_a_killed_one(killed: Run, interrupted: Run) -> None:
    assert killed.ray_folders
    assert not any(folder.exists() for folder in killed.ray_folders)


def test_interrupt_ends_a_run_after_its_step_with_a_checkpoint(interrupted: Run) -> None:
    assert interrupted.process.returncode == 0, interrupted.output
    assert "run.resume=auto" in interrupted.last_line, interrupted.output
    assert interrupted.leftovers() == []


def test_steps_after_the_newest_checkpoint_are_done_again(finished: Run) -> None:
    """Bug: a resumed run that appends to what the killed one had written after its checkpoint."""
    assert [record["step"] for record in finished.metrics] == list(range(STEPS + 1))


def test_metrics_equal_those_of_the_uninterrupted_run(reference: Run, finished: Run) -> None:
    """Bugs: data order that starts anew, optimizer or schedule or moving averages that are lost, weights in bf16.

    The same operations in the same order on one machine: equal up to the last bits of a reduction.
    """
    for expected, actual in zip(reference.metrics, finished.metrics, strict=True):
        names = [name for name in expected if not name.startswith("perf/")]
        assert {name: actual.get(name) for name in names} == pytest.approx(
            {name: expected[name] for name in names}, rel=1e-6
        ), expected["step"]


def test_weights_equal_those_of_the_uninterrupted_run(reference: Run, finished: Run) -> None:
    trained, expected = (load_file(run.output_dir / "final" / "model.safetensors") for run in (finished, reference))
    for name, value in expected.items():
        torch.testing.assert_close(trained[name], value, rtol=1e-6, atol=1e-7)


def test_closing_table_remembers_the_start(reference: Run, finished: Run) -> None:
    """Bug: a resumed run that measures the half-trained student as `before`, or not at all."""
    for name in ("student before", "teacher cross"):
        expected, actual = (
            next(line for line in run.output.splitlines() if name in line) for run in (reference, finished)
        )
        assert actual.split("│")[2] == expected.split("│")[2]


def test_finished_run_leaves_nothing(finished: Run) -> None:
    assert finished.leftovers() == []
    assert finished.checkpoints[-1] == f"step_{STEPS:06d}"
    assert len(finished.checkpoints) == 2


def step_of(checkpoint: str) -> int:
    return int(checkpoint.removeprefix("step_"))
