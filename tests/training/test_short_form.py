"""Runs with a few lines of settings: strings for models, files and sections."""

import json
import shutil
from pathlib import Path

import pytest

from nemo_opd.config.composition import compose, from_yaml
from nemo_opd.config.run import RunConfig
from nemo_opd.logging.loggers import read
from nemo_opd.preflight.teachers import settle_tokenizers
from tests.composition import nothing_is_created
from tests.exit_status import exit_status
from tests.tiny import SENTENCES, Tiny
from tests.training.templates import STUDENT, TEACHER

SHORT = """\
student: student
teachers: [teacher_cross, teacher_same]
data: train.jsonl
train: {max_steps: 4, global_batch_size: 4, max_length: 64, save_every: 2}
cluster: {launcher: local}
"""
LONG = """\
defaults:
  - loss: p_kl
  - _self_
student: {model: student}
teachers:
  - {name: teacher_cross, type: cross_tokenizer, model: teacher_cross}
  - {name: teacher_same, type: same_tokenizer, model: teacher_same}
data:
  train: {jsonl_files: train.jsonl}
  text_key: text
train: {max_steps: 4, global_batch_size: 4, max_length: 64, save_every: 2}
cluster: {launcher: local}
"""
ON_POLICY = """\
student: student
teachers: [teacher_cross]
data: train.jsonl
rollout: hf
train: {max_steps: 4, global_batch_size: 4, max_length: 64, save_every: 2}
cluster: {launcher: local}
"""
TEXTS = [{"text": "".join(SENTENCES[: i % 3 + 1])} for i in range(24)]
CHATS = [
    {"messages": [{"role": "user", "content": f"fox {i}?"}, {"role": "assistant", "content": SENTENCES[i % 4]}]}
    for i in range(24)
]


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with models that have chat templates."""
    for name, template in (("student", STUDENT), ("teacher_same", STUDENT), ("teacher_cross", TEACHER)):
        shutil.copytree(getattr(tiny, name), tmp_path / name)
        (tmp_path / name / "chat_template.jinja").write_text(template)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_records(records: list[dict[str, object]]) -> None:
    Path("train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.world
def test_a_few_lines_are_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: inferred settings are not used, not printed, or inferred differently by a resumed run."""
    inferred = ["messages (messages_key)", "cross_tokenizer", "same_tokenizer"]
    write_records(CHATS)
    Path("mine.yaml").write_text(SHORT)
    with nothing_is_created(folder):
        assert exit_status("distil", "mine.yaml", "run.dry_run=true") == 0
    output = capsys.readouterr().out
    assert [output.count(text) for text in inferred] == [1, 1, 1]

    assert exit_status("distil", "mine.yaml", "run.output_dir=run", "train.max_steps=2") == 0
    output = capsys.readouterr().out
    assert [output.count(text) for text in inferred] == [1, 1, 1]
    assert exit_status("distil", "mine.yaml", "run.output_dir=run", "run.resume=auto") == 0
    assert [record["step"] for record in read(Path("run/metrics.jsonl"))] == [1, 2, 3, 4]
    assert Path("run/final/model.safetensors").is_file()
    config = from_yaml(Path("run/config.yaml"))
    assert [(teacher.name, teacher.type) for teacher in config.teachers] == [
        ("teacher_cross", "cross_tokenizer"),
        ("teacher_same", "same_tokenizer"),
    ]


@pytest.mark.world
def test_a_few_lines_are_an_on_policy_run(folder: Path) -> None:
    """Bug: defaults that do not suit a student that samples, or a resumed run that infers other settings."""
    write_records(TEXTS)
    Path("mine.yaml").write_text(ON_POLICY)
    short = ["mine.yaml", "rollout.max_new_tokens=8"]
    with nothing_is_created(folder):
        assert exit_status("distil-on-policy", *short, "run.dry_run=true") == 0
    assert exit_status("distil-on-policy", *short, "run.output_dir=run", "train.max_steps=2") == 0
    assert exit_status("distil-on-policy", *short, "run.output_dir=run", "run.resume=auto") == 0
    assert [record["step"] for record in read(Path("run/metrics.jsonl"))] == [1, 2, 3, 4]


def test_a_teacher_without_a_template_reads_the_students_conversations(folder: Path) -> None:
    """Bug: the template that the error message proposes makes the teacher a cross-tokenizer teacher."""
    (folder / "teacher_same" / "chat_template.jinja").unlink()
    Path("mine.yaml").write_text(SHORT.replace("teacher_same]", "{model: teacher_same, chat_template: null}]"))

    def settled(*overrides: str) -> list[tuple[str, str | None]]:
        config = settle_tokenizers(compose("mine.yaml", ["data.messages_key=messages", *overrides]), "cpu")
        return [(teacher.type, teacher.chat_template) for teacher in config.teachers]

    assert settled() == [("cross_tokenizer", None), ("same_tokenizer", None)]
    answers = ["teachers.1.chat_template=student", "evaluation.teachers=true"]
    assert settled(*answers)[1] == ("same_tokenizer", "student")


def test_the_long_form_is_the_same_run(folder: Path) -> None:
    """Bug: a setting has another value in the short form, so results of the two forms differ."""
    write_records(TEXTS)

    def resolved(text: str) -> RunConfig:
        Path("mine.yaml").write_text(text)
        return settle_tokenizers(compose("mine.yaml"), "cpu")

    assert resolved(SHORT).model_dump() == resolved(LONG).model_dump()
