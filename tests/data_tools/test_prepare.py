"""Catches sets that are read wrongly, duplicates that stay, and files that are written despite errors."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tools.data.prepare import BOXED, main

DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on its "
    'own line after "Answer:".'
)


def dapo(problem: str, truth: str, index: str = "a-1") -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": DAPO.format(problem), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def prepare(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    def call(name: str, *inputs: Path, output: str = "out.jsonl", options: tuple[str, ...] = ()) -> Any:
        target = tmp_path / output
        assert main([name, "--input", *map(str, inputs), "--output", str(target), *options]) == 0
        return read(target)

    return call


@pytest.mark.parametrize("output", ["out.parquet", "out.jsonl"])
def test_dapo_math_is_each_problem_once(
    tmp_path: Path, prepare: Any, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [dapo("What is 1+1?", "2"), dapo("What is 2+2?", "4", "b"), dapo("What is 1+1?", "2")]
    disputed = [dapo("How many?", "7"), dapo("How many?", "8")]
    file = written(tmp_path / "a.parquet", [*rows, *disputed])

    assert prepare("dapo_math", file, output=output) == [
        {"messages": [{"role": "user", "content": f"What is 1+1?\n\n{BOXED}"}], "answer": "2"}
        | {"source": "dapo_math", "id": "a-1"},
        {"messages": [{"role": "user", "content": f"What is 2+2?\n\n{BOXED}"}], "answer": "4"}
        | {"source": "dapo_math", "id": "b"},
    ]
    printed = capsys.readouterr().out
    assert "2 questions" in printed
    assert "left out as repeated: 2 rows" in printed
    assert "left out as contradicting: 1 of the problems" in printed


@pytest.mark.parametrize(
    "row",
    [
        {"ID": "2024-I-4", "Problem": "P", "Solution": "S", "Answer": 33},
        {
            "id": 60,
            "problem": "P",
            "solution": "S",
            "answer": "033",
            "url": "https://x.org/2024_AIME_I/4",
            "year": "2024",
        },
        {"question": "P", "answer": "33"},
        {"problem_idx": 4, "problem": "P", "answer": "$33^\\circ$"},
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_aime_is_read_from_all_its_copies(tmp_path: Path, prepare: Any, row: dict[str, Any], kind: str) -> None:
    (question,) = prepare("aime_2024", written(tmp_path / f"a.{kind}", [row]))

    assert question["answer"] == "33"
    assert question["messages"][0]["content"].startswith("P\n\n")
    assert question.get("solution") == (row.get("Solution") or row.get("solution"))


def test_one_year_of_a_file_is_selected(tmp_path: Path, prepare: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"problem": f"P{year}", "answer": "1", "url": f"https://x.org/{year}_AIME_II_Problems/Problem_1"}
        for year in (2022, 2024, 2025)
    ]
    first, second = (
        written(tmp_path / "a.jsonl", rows),
        written(tmp_path / "b.jsonl", [{"question": "Q", "answer": "2"}]),
    )

    questions = prepare("aime_2025", first, second, options=("--text", "--instruction", ""))
    assert [question["text"] for question in questions] == ["P2025\n\n", "Q\n\n"]
    assert "warning: aime_2025 has 30 questions" in capsys.readouterr().out


def test_math_500_keeps_its_other_columns(tmp_path: Path, prepare: Any) -> None:
    row = {
        "problem": "P",
        "solution": "S",
        "answer": r"\frac{1}{2}",
        "subject": "Algebra",
        "level": 3,
        "unique_id": "u",
    }
    (question,) = prepare("math_500", written(tmp_path / "a.jsonl", [row]))

    del question["messages"]
    assert question == {
        "answer": r"\frac{1}{2}",
        "source": "math_500",
        "id": "u",
        "subject": "Algebra",
        "level": "3",
        "solution": "S",
    }


def test_gsm8k_has_its_answer_behind_the_solution(tmp_path: Path, prepare: Any) -> None:
    rows = [
        {"question": "How much?", "answer": "He has 2*600=<<2*600=1200>>1200.\n#### 1,200"},
        {"question": "And now?", "answer": "Less.\n#### -3"},
    ]
    first, second = prepare("gsm8k", written(tmp_path / "a.jsonl", rows))

    assert (first["answer"], first["solution"]) == ("1200", "He has 2*600=1200.")
    assert second["answer"] == "-3"


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("dapo_math", [{"question": "Q", "answer": "1"}], "no column 'prompt'; the columns are question, answer"),
        ("dapo_math", [dapo("Q", "1") | {"prompt": "Q"}], "no list of one message"),
        ("dapo_math", [dapo("Q", "1") | {"reward_model": {"style": "s"}}], "'reward_model' holds no text"),
        ("aime_2024", [{"problem": "P", "answer": "1"}, {"problem": "P", "answer": "x"}], "line 2: .* integer from 0"),
        ("aime_2024", [{"problem": "P"}], "no column 'answer' or 'Answer'"),
        ("aime_2024", [{"problem": "P", "answer": "1", "year": 2023}], "no questions of aime_2024"),
        ("math_500", [{"problem": "P", "answer": None}], "column 'answer' is null"),
        ("math_500", [{"problem": "P", "answer": r"\frac{1}{2"}], "line 1: .*not balanced"),
        ("math_500", [{"problem": ["P"], "answer": "1"}], "column 'problem' is .* where text or a number is expected"),
        ("gsm8k", [{"question": "Q", "answer": "42"}], "does not end with a line `#### NUMBER`"),
    ],
)
def test_a_wrong_row_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, rows: list[dict[str, Any]], message: str
) -> None:
    file, target = written(tmp_path / "a.jsonl", rows), tmp_path / "made" / "out.parquet"

    assert main([name, "--input", str(file), "--output", str(target)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(file) in error
    assert re.search(message, error)
    assert not target.parent.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"PAR1", "cannot be read as Parquet"),
        ("a.jsonl", b'{"question": \n', "line 1: no JSON"),
        ("a.jsonl", b"[1]\n", "no JSON object"),
        ("a.csv", b"a,b\n", "unknown kind"),
        ("a.jsonl", b"", "no questions"),
        ("missing.jsonl", None, "there is no such file"),
    ],
)
def test_files_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)

    assert main(["gsm8k", "--input", str(tmp_path / name), "--output", str(tmp_path / "out.jsonl")]) == 1
    assert message in capsys.readouterr().err


def test_an_output_of_no_known_format_is_refused_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gsm8k", "--input", "missing.jsonl", "--output", "out.csv"]) == 1
    assert "ends in .parquet or .jsonl" in capsys.readouterr().err
