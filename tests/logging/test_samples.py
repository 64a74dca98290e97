"""Catches answers that are lost, doubled or under the wrong model, and texts that become markup."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_opd.errors import DataError
from nemo_opd.logging.report import MAX_OPEN, write_report
from nemo_opd.logging.scores import SampleLog, ShownAnswer, answers_by_question

ONE = ShownAnswer(
    step=0,
    question=3,
    kind="greedy",
    sample=0,
    prompt="1 + 1 = ?\n",
    answer="2",
    response="Zwei – 2\n\ud800",
    reward=1.0,
    finish_reason="stop",
    num_tokens=4,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "samples.jsonl"


def answers_section(path: Path, correct_reward: float = 1) -> str:
    """Return the report's section of answers, empty if it has none."""
    (path.parent / "config.yaml").write_text(f"evaluation: {{correct_reward: {correct_reward}}}\n")
    page = write_report(path.parent).read_text(encoding="utf-8")
    return page.partition("<h2>Answers</h2>")[2].partition("</section>")[0]


def test_written_answers_are_read_back(path: Path) -> None:
    SampleLog(path).write([ONE])
    SampleLog(path).write([replace(ONE, step=5, answer=None)])

    readable = replace(ONE, response="Zwei – 2\n?")  # UTF-8 has no lone surrogates
    assert SampleLog(path).read() == [readable, replace(readable, step=5, answer=None)]
    assert "Zwei –" in path.read_text(encoding="utf-8")


def test_a_resumed_run_drops_later_answers(path: Path) -> None:
    log = SampleLog(path)
    log.truncate_after(10)
    assert not path.exists()
    log.write([ONE, replace(ONE, teacher="big")])
    log.write(replace(ONE, step=step) for step in (10, 20))
    with path.open("a") as file:
        file.write('{"step": 30, "quest')
    log.truncate_after(10)
    assert [(answer.step, answer.teacher) for answer in SampleLog(path).read()] == [(0, None), (0, "big"), (10, None)]
    log.truncate_after(0)
    assert SampleLog(path).read() == []


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"step": 1}', '{"step": "1"}', "[" * 100_000])
def test_a_damaged_line_is_named(path: Path, line: str) -> None:
    log = SampleLog(path)
    log.write([ONE])
    path.write_text(path.read_text() + line + "\n")
    log.write([ONE])

    with pytest.raises(DataError, match=r"samples.jsonl, line 2 is not an answer \([^\n]*\); remove or repair it$"):
        SampleLog(path).read()


def test_the_first_and_the_last_evaluation_are_side_by_side(path: Path) -> None:
    assert answers_by_question([]) == []
    assert answers_by_question([ONE]) == [{"student after step 0": ONE}]
    SampleLog(path).write(
        [
            replace(ONE, response="at the start"),
            replace(ONE, step=5, response="in between"),
            replace(ONE, step=1_000, response="at the end", reward=-0.5, finish_reason="length"),
            replace(ONE, step=1_000, question=4, response="new"),
        ]
    )
    section = answers_section(path)

    assert "student after step 0<" in section
    assert "student after step 1,000<" in section
    assert "in between" not in section
    assert section.index("at the start") < section.index("at the end")
    assert "reward −0.5" in section
    assert "cut at the limit" in section
    assert "not asked" in section  # question 4 at step 0


def test_teachers_have_their_own_column(path: Path) -> None:
    SampleLog(path).write(
        [
            replace(ONE, response="at the start", reward=0.0),
            replace(ONE, response="of the small", reward=0.5, teacher="small"),
            replace(ONE, response="of the big", teacher="big"),
            replace(ONE, step=5, response="at the end"),
        ]
    )
    cells = answers_section(path, correct_reward=0.5).split('class="who">')[1:]

    assert [cell.partition("<")[0] for cell in cells] == [
        "student after step 0",
        "student after step 5",
        "teacher small",
        "teacher big",
    ]
    texts = ("at the start", "at the end", "of the small", "of the big")
    assert all(text in cell for text, cell in zip(texts, cells, strict=True))
    assert [">right<" in cell for cell in cells] == [False, True, True, True]
    assert [">wrong<" in cell for cell in cells] == [True, False, False, False]


def test_answers_that_name_no_one_are_the_students(path: Path) -> None:
    """Bug: files of versions without evaluated teachers, which lack the key, cannot be read."""
    SampleLog(path).write([replace(ONE, response="2")])
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record.pop("teacher") is None
    path.write_text(json.dumps(record) + "\n")

    assert SampleLog(path).read() == [replace(ONE, response="2")]


def test_texts_are_no_markup(path: Path) -> None:
    SampleLog(path).write([replace(ONE, prompt="<b>", answer="<i>", response="<script>" * 200, teacher="<i>")])
    section = answers_section(path)

    assert "<b>&lt;i&gt;</b>" in section
    assert "<script>" not in section
    assert "teacher &lt;i&gt;<" in section


def test_a_long_text_is_folded_with_its_end_in_sight(path: Path) -> None:
    long = "start " + "so " * MAX_OPEN + "so the answer is 7"
    SampleLog(path).write([replace(ONE, response=long)])
    section = answers_section(path)
    preview = section.partition('class="preview">')[2].partition("</span>")[0]

    assert preview.startswith("start so")
    assert preview.endswith("the answer is 7")
    assert len(preview) < MAX_OPEN + 60
    assert long in section


def test_no_answers_no_section(path: Path) -> None:
    SampleLog(path).write([])
    assert answers_section(path) == ""
