"""Several runs on one page: figures in their columns, different settings, and answers compared question by question."""

import json
import re
from pathlib import Path

import pytest
import yaml

from nemo_opd.cli.main import main
from nemo_opd.evaluation.estimates import paired_difference
from nemo_opd.logging.comparison import SweptRun, read_runs, setting_tables, unlike
from nemo_opd.logging.provenance import ModelOrigin, Provenance, write_provenance
from nemo_opd.models.folder import OwnCard
from nemo_opd.training.closing import answer_tables


def write_run(folder: Path, lr: float, right: list[float], data: str = "a") -> Path:
    folder.mkdir(parents=True)
    config = {"run": {"output_dir": str(folder)}, "teachers": [{"name": "big", "weight": lr * 10}], "lr": lr}
    evaluation = {"confidence": 0.9, "sets": {"own": {"confidence": 0.5}}}
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "evaluation": evaluation}))
    share = sum(right) / len(right)
    records = [
        {"step": 0, "val/bits_per_byte": 2.0},
        {"step": 1, "train/loss": 1.0, "perf/step_s": 2.0},
        {
            "step": 2,
            "train/loss": 0.5,
            "val/bits_per_byte": 2.0 - lr,
            "val/class/word/share": 1.0,
            "val/class/word/bits_per_byte": 2.0 - lr,
            "eval/pass@1": share,
            "eval/pass@1_low": 0.0,
            "eval/pass@1_high": 1.0,
        },
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    questions = [f"{row}:{data}" for row in range(len(right))]
    values = {"step": 2, "teacher": None, "questions": questions, "values": {"pass@1": right}}
    lines = (json.dumps({**values, "set": name}) + "\n" for name in ("", "own"))
    (folder / "evaluation.jsonl").write_text("".join(lines))
    return folder


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = write_run(tmp_path / "one", 0.1, [0.0, 1.0, 0.0, 0.0]), write_run(tmp_path / "two", 0.5, [1.0] * 4)
    page = tmp_path / "page.html"
    assert main(["compare", str(one), str(two), "--output", str(page)]) == 0
    text = page.read_text().replace("\N{NO-BREAK SPACE}", " ")
    for part in (
        "1.9000 (-5.0 %)",
        "1.5000 (-25.0 %)",
        "bits per byte (change)",
        "100.0 % (0.0 to 100.0 %)",
        "Settings that differ",
        "by class",
    ):
        assert part in text, part
    assert "<script" not in text
    assert not re.search("https?:", text)
    assert "default-src 'none'" in text
    assert {file.name for file in (tmp_path / "page").iterdir()} == {
        "val_bits_per_byte.png",
        "train_loss.png",
        "eval_pass@1.png",
    }
    assert "Settings that differ" in capsys.readouterr().out


def test_only_settings_that_differ(tmp_path: Path) -> None:
    """Bugs: the output folder counts as a setting; a list element is compared as a whole."""
    runs = read_runs([write_run(tmp_path / name / "run", lr, [1.0]) for name, lr in (("a", 0.1), ("b", 0.2))])
    (table,) = setting_tables(runs)
    assert list(table.heads) == ["", "a/run", "b/run"]
    assert [list(row) for row in table.rows] == [["lr", "0.1", "0.2"], ["teachers.0.weight", "1.0", "2.0"]]
    student = ModelOrigin("student", "w", "s", 9, OwnCard())
    write_provenance(runs[1].folder, Provenance("nemo-opd", {}, student, (), started_from="me/w"))
    assert ["checkpoint from-hf --model", "-", "me/w"] in [list(row) for row in setting_tables(runs)[0].rows]


def write_validated(
    folder: Path,
    config: dict[str, object],
    *,
    start: float = 2.0,
    num_bytes: int = 100,
    texts: str = "a1",
    steps: int = 2,
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    student = ModelOrigin("student", "s", "s", 9, OwnCard())
    write_provenance(folder, Provenance("nemo-opd", {}, student, (), validation_texts=texts))
    figures = {"val/bytes": num_bytes, "val/ce": 3.21, "val/accuracy": 0.25}
    records = [{"step": step, "val/bits_per_byte": start - step / 8, **figures} for step in range(steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_unlike_runs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: figures of different bytes, students or steps side by side without a warning."""
    write_validated(tmp_path / "first", {})
    write_validated(tmp_path / "same", {}, start=2.0005)
    write_validated(tmp_path / "start", {}, start=2.01)
    write_validated(tmp_path / "bytes", {}, num_bytes=99)
    write_validated(tmp_path / "texts", {}, texts="b2")
    write_validated(tmp_path / "early", {}, steps=1)
    write_run(tmp_path / "old", 0.1, [1.0])
    folders = [tmp_path / name for name in ("first", "same", "start", "bytes", "texts", "early", "old")]
    expected = [
        "start: it started at 2.0100 bits per byte, first at 2.0000.",
        "bytes: its bits per byte are over 99 bytes, and those of first over 100, so they do not compare.",
        "texts: it was validated on other texts than first, so bits per byte do not compare.",
        "early: its bits per byte; CE, nats; accuracy are of step 1, first's of step 2.",
        "old: old has no record of its validation texts or bytes, so the two may not compare.",
    ]
    assert unlike(read_runs(folders)) == expected
    page = tmp_path / "page.html"
    assert main(["compare", *map(str, folders), "--output", str(page)]) == 0
    printed = capsys.readouterr().out
    for text in ("3.210", "25.0 %", "CE, nats", "accuracy", "finished"):
        assert text in printed, text
    assert all(sentence.replace("'", "&#39;") in page.read_text() for sentence in expected)


def test_scores_of_other_steps_are_named() -> None:
    """Bug: scores of steps 4 and 90 were compared without a warning, as only validated runs were checked."""
    score = {"eval/pass@1": 0.5, "eval/pass@1_low": 0.4, "eval/pass@1_high": 0.6}
    runs = [
        SweptRun(name, Path(name), ({"step": step, **score}, {"step": 9, "train/loss": 1.0}), True, None)
        for name, step in (("a", 4), ("b", 4), ("c", 8))
    ]
    assert unlike(runs) == ["c: its pass@1 is of step 8, a's of step 4."]


def test_runs_of_other_lengths_are_named_without_validation() -> None:
    """Bug: 3 and 60 steps were compared without a warning, as one run was not validated."""
    runs = [
        SweptRun(name, Path(name), ({"step": step, key: 1.0},), True, None)
        for name, step, key in (("e", 0, "eval/pass@1"), ("a", 60, "val/bits_per_byte"), ("b", 3, "train/loss"))
    ]
    assert unlike([SweptRun("refused", Path("refused"), (), False, None), *runs]) == ["b: it took 3 steps, a 60."]
    assert unlike(runs[::-1]) == ["a: it took 60 steps, b 3."]


def test_one_run_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "one", 0.1, [1.0])
    with pytest.raises(SystemExit):
        main(["compare", str(run), str(run), "--output", str(tmp_path / "page.html")])
    assert "nothing to compare with" in " ".join(capsys.readouterr().err.split())


def test_a_section_that_a_run_lacks_is_one_row(tmp_path: Path) -> None:
    """Bug: a row of nulls for each setting of a teacher that the other run lacks."""
    teacher = {
        "name": "big",
        "model": "some/model",
        "dtype": "auto",
        "revision": None,
        "parallelism": {"tp": 1, "cp": 1},
    }
    with_teacher = {"teachers": [teacher], "loss": {"type": "p_kl", "merge": "first", "beta": None}}
    without = {"teachers": [], "loss": {"type": "gold", "beta": None}, "more": None}
    runs = [write_validated(tmp_path / name, config) for name, config in (("a", with_teacher), ("b", without))]
    (table,) = setting_tables(read_runs(runs))
    assert [list(row) for row in table.rows] == [
        ["loss.merge", "first", "-"],
        ["loss.type", "p_kl", "gold"],
        ["teachers.0", "big, some/model", "-"],
    ]


def test_answers_are_compared_question_by_question(tmp_path: Path) -> None:
    """Bugs: a difference with the wrong sign; answers to different questions are compared; the interval is one of
    independent samples, or has another set's confidence.
    """
    runs = [("one", [0.0, 1.0, 0.0, 0.0], "a"), ("two", [1.0, 1.0, 0.0, 1.0], "a"), ("x", [1.0] * 4, "b")]
    swept_runs = read_runs([write_run(tmp_path / name, 0.1, right, data) for name, right, data in runs])
    (table,) = answer_tables(swept_runs)
    halves = []
    for confidence in (0.9, 0.5):
        expected = paired_difference([1, 1, 0, 1], [0, 1, 0, 0], confidence)
        halves.append(f"+50.0 ± {50 * (expected.high - expected.low):.1f} points")
    assert [list(row) for row in table.rows] == [["pass@1", halves[0], "-"], ["own/pass@1", halves[1], "-"]]


def test_a_page_without_an_ending_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: the folder of curves has the page's name, so that the page cannot be written."""
    runs = [str(write_run(tmp_path / name, 0.1, [1.0])) for name in ("one", "two")]
    with pytest.raises(SystemExit):
        main(["compare", *runs, "--output", str(tmp_path / "page")])
    assert "add .html to it" in " ".join(capsys.readouterr().err.split())


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: the remedy names a setting of runs, which this command does not have."""
    runs = [str(write_run(tmp_path / name, 0.1, [1.0])) for name in ("one", "two")]
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        main(["compare", *runs, "--output", str(tmp_path / "file" / "page.html")])
    assert capsys.readouterr().err.rstrip().endswith("; name another --output")
