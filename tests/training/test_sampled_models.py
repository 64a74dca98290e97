"""Evaluation questions for teachers, in each teacher's tokens and chat template, and the scores of all models."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nemo_opd.errors import AlignmentError, DataError, OPDError
from nemo_opd.logging.interface import Score
from nemo_opd.logging.scores import QuestionValues
from nemo_opd.preflight.plan import preflight
from nemo_opd.preflight.prompts import LoadedSet
from nemo_opd.training.closing import scores
from tests.composition import compose
from tests.tiny import Tiny

QUESTION = "How many lazy dogs?"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}{{ 'assistant:' }}"
LEVEL = {"": 0.95, "s": 0.95}.__getitem__
"""Confidence level of the intervals of a set."""
TEACHER_TEMPLATE = TEMPLATE.replace("{{ m.role }}", "[{{ m.role }}]")


@dataclass
class Asking:
    """A run of the tiny models with one question."""

    tiny: Tiny
    folder: Path

    def questions(self, *more: str, cross: bool = False) -> LoadedSet:
        (loaded,) = preflight(compose(*self._overrides(cross), *more, config_name="on_policy_demo")).questions
        return loaded

    def _overrides(self, cross: bool) -> list[str]:
        row = {"messages": [{"role": "user", "content": QUESTION}], "answer": "1"}
        (self.folder / "questions.jsonl").write_text(json.dumps(row))
        (self.folder / "student.jinja").write_text(TEMPLATE)
        teacher = ["teachers=arithmetic_cross", "loss=p_kl", "loss.ce_weight=0"] if cross else ["teachers=arithmetic"]
        return [
            *teacher,
            f"student.model={self.tiny.student}",
            f"teachers.0.model={self.tiny.teacher_cross if cross else self.tiny.teacher_same}",
            f"++student.chat_template={self.folder / 'student.jinja'}",
            "++data.messages_key=messages",
            "data.response_key=null",
            "data.train.arrow_files=null",
            f"data.train.jsonl_files={self.folder / 'questions.jsonl'}",
            "evaluation.sets=null",
            f"++evaluation.data.jsonl_files={self.folder / 'questions.jsonl'}",
            f"run.output_dir={self.folder / 'run'}",
        ]

    @property
    def template(self) -> Path:
        """The teacher's template file."""
        return self.folder / "teacher.jinja"

    @property
    def templated(self) -> str:
        return f"++teachers.0.chat_template={self.template}"


@pytest.fixture
def asking(tiny: Tiny, tmp_path: Path) -> Asking:
    return Asking(tiny, tmp_path)


def test_a_teacher_is_asked_by_its_own_tokenizer_and_template(asking: Asking) -> None:
    asking.template.write_text(TEACHER_TEMPLATE)
    loaded = asking.questions(asking.templated, "++teachers.0.max_length=70", cross=True)
    (teacher,) = loaded.teachers
    tokenizer = AutoTokenizer.from_pretrained(asking.tiny.teacher_cross)
    text = f"[user]: {QUESTION}</s>assistant:"

    assert teacher.renderer.prompt_ids(loaded.prompts[0]).tolist() == tokenizer(text)["input_ids"]
    assert teacher.end_ids == {tokenizer.eos_token_id}
    assert teacher.max_length == 70


def refusal(kind: type[OPDError], questions: Callable[[], LoadedSet]) -> str:
    with pytest.raises(kind) as caught:
        questions()
    return str(caught.value)


def test_a_teacher_without_a_chat_template_is_refused_if_it_is_asked(asking: Asking) -> None:
    message = refusal(AlignmentError, asking.questions)

    assert message.startswith("teachers.0 (same) cannot be asked the questions of evaluation.data: tokenizer ")
    assert message.endswith("; or ask only the student, with evaluation.teachers=false")
    assert asking.questions("evaluation.teachers=false").teachers == ()


def test_a_question_without_room_for_the_teachers_answer_is_refused(asking: Asking) -> None:
    """Bug: only the student's rendering of the question, which is short, is checked."""
    asking.template.write_text("{{ 'Think of a fox. ' * 64 }}" + TEACHER_TEMPLATE)
    message = refusal(DataError, lambda: asking.questions(asking.templated))

    assert message.startswith(
        "teachers.0 (same) cannot be asked the questions of evaluation.data: prompt 0 (row, counted from 0) has "
    )
    assert "leaves no room for an answer in 64; leave the row out" in message
    assert message.endswith("; or ask only the student, with evaluation.teachers=false")


def record(step: int, **means: float) -> dict[str, float]:
    """Return the metrics of an evaluation from each model's mean."""
    values = {"step": float(step), "eval/response_length": 3.0}
    for model, mean in means.items():
        ending = "" if model == "student" else f"/{model}"
        values |= {
            f"eval/greedy{ending}": mean,
            f"eval/greedy_low{ending}": mean - 0.1,
            f"eval/greedy_high{ending}": mean + 0.1,
        }
    return values


def test_scores_are_of_the_student_before_and_after_and_of_each_teacher() -> None:
    """Bug: the score of a teacher named `a_low` is used as teacher a's lower bound, or as a measure."""
    records = [record(0, student=0.2, a=0.5, a_low=0.7), record(9, student=0.4)]
    (row,) = scores(records, ["a", "a_low", "not asked"], [], LEVEL)

    assert row.measure == "greedy"
    assert row.by_model == {
        "student before": pytest.approx(Score(0.2, 0.1, 0.3)),
        "student after": pytest.approx(Score(0.4, 0.3, 0.5)),
        "teacher a": pytest.approx(Score(0.5, 0.4, 0.6)),
        "teacher a_low": pytest.approx(Score(0.7, 0.6, 0.8)),
    }


def test_a_run_that_asked_once_has_no_before() -> None:
    only = record(0, student=0.2, a=0.5, a_low=0.7)
    (row,) = scores([only], ["a", "a_low"], [], LEVEL)

    assert list(row.by_model) == ["student after", "teacher a", "teacher a_low"]


def test_a_lower_error_is_a_gain() -> None:
    """Bug: an error that grew is reported as a gain."""
    ends = ("", "_low", "_high")
    records = [{"step": step} | {f"eval/s/brier_score{end}": step for end in ends} for step in (0, 1)]
    values = [
        QuestionValues(step, "s", None, tuple("ab"), {"brier_score": (step, 0.5)}, ("brier_score",)) for step in (0, 1)
    ]
    (row,) = scores(records, [], values, LEVEL)

    assert not row.is_share
    gained = row.differences["student before"]
    assert gained.value == -0.5
    assert gained.low < gained.high


def test_gains_are_over_the_questions_that_both_models_answered() -> None:
    """Bug: values compared by position, from another set, or from an evaluation in between."""
    records = [
        {"step": step, "eval/s/greedy": 0.5, "eval/s/greedy_low": 0.2, "eval/s/greedy_high": 0.8} for step in (0, 9)
    ]
    records[0] |= {f"eval/s/greedy{end}/big": 0.9 for end in ("", "_low", "_high")}
    values = [
        QuestionValues(0, "s", None, tuple("0123"), {"greedy": (0.0, 0.0, 1.0, 1.0)}),
        QuestionValues(0, "s", "big", tuple("0123"), {"greedy": (1.0, 1.0, 1.0, 1.0)}),
        QuestionValues(5, "s", None, tuple("0123"), {"greedy": (0.0, 0.0, 0.0, 0.0)}),
        QuestionValues(9, "other", None, tuple("0123"), {"greedy": (0.0, 0.0, 0.0, 0.0)}),
        QuestionValues(9, "s", None, tuple("321"), {"greedy": (1.0, 1.0, 1.0)}),
    ]
    (row,) = scores(records, ["big"], values, LEVEL)

    assert row.measure == "s/greedy"
    assert {model: round(gained.value, 6) for model, gained in row.differences.items()} == {
        "student before": round(1 / 3, 6),
        "teacher big": 0,
    }
    assert row.differences["teacher big"].low < 0 < row.differences["teacher big"].high
