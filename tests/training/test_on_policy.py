"""A whole on-policy run by the example script: what it leaves, and that it continues as if it had never stopped."""

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
TIMES = "perf/"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = start(tmp_path_factory.mktemp("on_policy") / "whole", OVERRIDES, script=SCRIPT)
    run.wait_for_step(1)
    run.processes()
    assert run.end() == 0, run.output
    assert run.leftovers() == []
    return run


def test_a_run_says_what_it_samples(whole: Run) -> None:
    first, *steps = whole.metrics

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
    assert {step for step, record in enumerate(whole.metrics) if "eval/held_out/pass@2" in record} == {0, HALF, STEPS}


def test_rollouts_are_written_with_their_rewards(whole: Run) -> None:
    """Bugs: rewards of other rollouts, those of the batch that is sampled ahead, rows of the dataset among them."""
    for record in whole.metrics[1:]:
        lines = (whole.output_dir / f"rollouts.{record['step']}.jsonl").read_text().splitlines()
        rollouts = [json.loads(line) for line in lines]
        assert len(rollouts) == 12
        assert sum(each["reward"] for each in rollouts) / 12 == pytest.approx(record["rollout/reward"])
        assert {len(each["ids"]) - len(each["loss_mask"]) for each in rollouts} == {0}
        assert all(any(each["loss_mask"]) for each in rollouts)


@pytest.mark.parametrize("teacher", ["cross", "same"])
def test_each_teacher_is_asked_once_as_the_student_is(whole: Run, teacher: str) -> None:
    """They know their sums: any that is asked in another's tokens, or in the student's place, does not."""
    first, *steps = whole.metrics
    student, own = (shown(whole, who) for who in (None, teacher))
    of_student = {name for name in first if name.startswith("eval/") and name.count("/") == 2}

    assert {f"{name}/{teacher}" for name in of_student} <= first.keys()
    assert first[f"eval/held_out/greedy/{teacher}"] == 1 > first["eval/held_out/greedy"]
    assert not any(f"eval/held_out/greedy/{teacher}" in record for record in steps)
    assert f"teacher {teacher}" in questions(whole.output)
    assert [(one.step, one.question, one.reward) for one in own] == [
        (0, one.question, 1) for one in student if one.step == 0
    ]


def test_what_was_answered_is_in_the_report(whole: Run) -> None:
    answers = shown(whole, None)
    page = (whole.output_dir / "report" / "report.html").read_text(encoding="utf-8")

    assert {answer.step for answer in answers} == {0, HALF, STEPS}
    assert answers[-1].response in page
    assert all(f">teacher {teacher}<" in page.partition("Answers")[2] for teacher in ("cross", "same"))
    assert "Questions" in page
    assert "greedy" in whole.output


def test_the_student_is_written_in_the_precision_it_was_read_in(whole: Run) -> None:
    """Catches a configuration that tells of the precision it was trained in."""
    weights = load_file(whole.output_dir / "final" / "model.safetensors")
    config = json.loads((whole.output_dir / "final" / "config.json").read_text(encoding="utf-8"))

    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert config["dtype"] == "bfloat16"


def test_a_run_that_continues_samples_the_same(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which is sooner done."""
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "half"
    shutil.copytree(whole.output_dir, folder)
    shutil.rmtree(folder / "checkpoints" / f"step_{STEPS:06d}")
    shutil.rmtree(folder / "final")
    config = from_yaml(whole.output_dir / "config.yaml")
    own = config.run.model_copy(update={"output_dir": folder, "resume": "auto"})
    distil(config.model_copy(update={"run": own}))

    assert [told(record) for record in read(folder / "metrics.jsonl")] == [told(record) for record in whole.metrics]
    assert questions(capsys.readouterr().out) == questions(whole.output)
    assert (folder / "samples.jsonl").read_text() == (whole.output_dir / "samples.jsonl").read_text()
    for step in range(1, STEPS + 1):
        own, other = (each / f"rollouts.{step}.jsonl" for each in (folder, whole.output_dir))
        assert own.read_text() == other.read_text()
    own, other = (load_file(each / "final" / "model.safetensors") for each in (folder, whole.output_dir))
    assert all(torch.equal(weight, other[name]) for name, weight in own.items())


def shown(run: Run, teacher: str | None) -> list[ShownAnswer]:
    """What the teacher answered; None: the student."""
    return [one for one in SampleLog(run.output_dir / "samples.jsonl").read() if one.teacher == teacher]


def questions(output: str) -> str:
    """The closing table."""
    return output.partition("Questions")[2].partition(" done ")[0]


def told(record: dict[str, float]) -> str:
    """But for how long it took."""
    return json.dumps({name: value for name, value in record.items() if not name.startswith(TIMES)})
