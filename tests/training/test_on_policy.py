"""An on-policy run of the example script: its files, and a resumed run that equals an uninterrupted one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_opd.config.composition import from_yaml
from nemo_opd.logging.loggers import read
from nemo_opd.logging.scores import SampleLog, ShownAnswer
from nemo_opd.training.on_policy import distil
from tests.training.launch import ROOT, Run, start

pytestmark = pytest.mark.world

SCRIPT = ROOT / "examples" / "run_on_policy_distillation.py"
STEPS, HALF = 4, 2
OVERRIDES = [
    "cluster.launcher=local",
    "teachers=arithmetic_multi",
    "teachers.1.loss.type=tcad",
    "teachers.1.loss.support_size=16",
    "teachers.0.loss.type=p_kl",
    "teachers.0.loss.divergence=reverse_kl",
    "loss.ce_weight=0.1",
    f"train.max_steps={STEPS}",
    f"train.save_every={HALF}",
    "train.validate_every=null",
    "train.global_batch_size=16",
    "train.micro_batch_size=8",
    "rollout.n=2",
    "rollout.on_policy_share=0.75",
    "data.validation.arrow_files=demo:arithmetic_validation",
    "data.validation.max_samples=8",
    "evaluation.max_new_tokens=40",
    "evaluation.sets.held_out.data.max_samples=8",
    "evaluation.sets.seen.data.max_samples=4",
    f"evaluation.every={HALF}",
    "evaluation.n=2",
    "evaluation.k=[1,2]",
    "logging.rollouts.every=1",
    "logging.rollouts.file_mb=1e-6",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = start(tmp_path_factory.mktemp("on_policy") / "run", OVERRIDES, script=SCRIPT)
    run.wait_for_step(1)
    run.processes()
    assert run.end() == 0, run.output
    assert run.leftovers() == []
    return run


def test_metrics_of_a_run(run: Run) -> None:
    first, *steps = run.metrics

    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert 0 < first["eval/held_out/greedy"] < 1
    assert first["val/bits_per_byte"] > 0
    for record in steps:
        assert record["train/mismatch"] < 1e-5
        assert 0 < record["train/overlap/same"] <= 1
        assert 0 < record["train/overlap/cross"] <= 1
        assert record["train/entropy"] > 0
        assert 0 <= record["rollout/reward"] <= 1
        assert record["rollout/eos_rate"] + record["rollout/truncation_rate"] == pytest.approx(1)
        assert record["rollout/staleness"] == 0
        assert record["perf/rollout_s"] > 0
        assert record["perf/data_wait_s"] == 0
    assert {step for step, record in enumerate(run.metrics) if "eval/held_out/pass@2" in record} == {0, HALF, STEPS}


def test_rollouts_are_written_with_their_rewards(run: Run) -> None:
    """Bugs: rewards of other rollouts, rollouts of the batch that is sampled ahead, rows of the dataset."""
    for record in run.metrics[1:]:
        lines = (run.output_dir / f"rollouts.{record['step']}.jsonl").read_text().splitlines()
        rollouts = [json.loads(line) for line in lines]
        assert len(rollouts) == 12
        assert sum(rollout["reward"] for rollout in rollouts) / 12 == pytest.approx(record["rollout/reward"])
        assert {len(rollout["ids"]) - len(rollout["loss_mask"]) for rollout in rollouts} == {0}
        assert all(any(rollout["loss_mask"]) for rollout in rollouts)


@pytest.mark.parametrize("teacher", ["cross", "same"])
def test_each_teacher_answers_the_students_questions_once(run: Run, teacher: str) -> None:
    """Bug: a teacher is prompted in another model's tokens, or the student answers in its place; teachers know sums."""
    first, *steps = run.metrics
    student_answers, teacher_answers = (answers_of(run, who) for who in (None, teacher))
    student_measures = {name for name in first if name.startswith("eval/") and name.count("/") == 2}

    assert {f"{name}/{teacher}" for name in student_measures} <= first.keys()
    assert first[f"eval/held_out/greedy/{teacher}"] == 1 > first["eval/held_out/greedy"]
    assert not any(f"eval/held_out/greedy/{teacher}" in record for record in steps)
    assert f"teacher {teacher}" in questions(run.output)
    assert [(answer.step, answer.question, answer.reward) for answer in teacher_answers] == [
        (0, answer.question, 1) for answer in student_answers if answer.step == 0
    ]


def test_answers_are_in_the_report(run: Run) -> None:
    answers = answers_of(run, None)
    page = (run.output_dir / "report" / "report.html").read_text(encoding="utf-8")

    assert {answer.step for answer in answers} == {0, HALF, STEPS}
    assert answers[-1].response in page
    assert all(f">teacher {teacher}<" in page.partition("Answers")[2] for teacher in ("cross", "same"))
    assert "Questions" in page
    assert "greedy" in run.output


def test_the_student_is_written_in_the_precision_it_was_read_in(run: Run) -> None:
    """Catches a config.json with the precision of the training."""
    weights = load_file(run.output_dir / "final" / "model.safetensors")
    config = json.loads((run.output_dir / "final" / "config.json").read_text(encoding="utf-8"))

    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert config["dtype"] == "bfloat16"


def test_a_run_that_continues_samples_the_same(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a resumed run samples, asks or learns differently. It runs in this process, which is faster."""
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "half"
    shutil.copytree(run.output_dir, folder)
    shutil.rmtree(folder / "checkpoints" / f"step_{STEPS:06d}")
    shutil.rmtree(folder / "final")
    config = from_yaml(run.output_dir / "config.yaml")
    resumed = config.run.model_copy(update={"output_dir": folder, "resume": "auto"})
    distil(config.model_copy(update={"run": resumed}))

    assert without_times(read(folder / "metrics.jsonl")) == without_times(run.metrics)
    assert questions(capsys.readouterr().out) == questions(run.output)
    assert (folder / "samples.jsonl").read_text() == (run.output_dir / "samples.jsonl").read_text()
    for step in range(1, STEPS + 1):
        name = f"rollouts.{step}.jsonl"
        assert (folder / name).read_text() == (run.output_dir / name).read_text()
    weights, expected = (load_file(path / "final" / "model.safetensors") for path in (folder, run.output_dir))
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def answers_of(run: Run, teacher: str | None) -> list[ShownAnswer]:
    """Return the answers of a teacher, or of the student if it is None."""
    return [answer for answer in SampleLog(run.output_dir / "samples.jsonl").read() if answer.teacher == teacher]


def questions(output: str) -> str:
    """Return the closing table of questions."""
    return output.partition("Questions")[2].partition(" done ")[0]


def without_times(records: list[dict[str, float]]) -> str:
    """Return the records as text, which makes NaN equal to NaN, without the times."""
    return json.dumps(
        [{name: value for name, value in record.items() if not name.startswith("perf/")} for record in records]
    )
