"""The demo's sums and the models trained on them."""

import re
from pathlib import Path
from typing import get_args

import pyarrow as pa
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from nemo_opd.alignment import TokenAligner
from nemo_opd.config.teacher import filled
from nemo_opd.demo import ARITHMETIC_MODEL_NAMES, arithmetic_questions, model_path
from nemo_opd.demo.arithmetic_questions import OPERANDS, Sum, split_of, sums
from nemo_opd.demo.python_sources import Split
from nemo_opd.errors import DataError
from nemo_opd.projection import audit, build_projection
from tests.composition import CONFIGS

LONGEST = 40
"""Limit in tokens of a prompt, its response and the end token."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEMO_OPD_CACHE", str(tmp_path_factory.mktemp("cache")))
        return {split: rows_of(arithmetic_questions.arrow_file(split)) for split in get_args(Split)}


def rows_of(path: Path) -> list[dict[str, str]]:
    with pa.ipc.open_stream(pa.OSFile(str(path))) as reader:
        return reader.read_all().to_pylist()


def numbers_of(row: dict[str, str]) -> tuple[int, int]:
    first, second = re.fullmatch(r"(\d+) \+ (\d+) = \?\n", row["text"]).groups()
    return int(first), int(second)


def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_path(name))


def validation(number: int) -> list[Sum]:
    return [question for question in sums() if split_of(question) == "validation"][:number]


def greedy_accuracy(name: str, questions: list[Sum], *, worked: bool = False) -> float:
    """Return the share of right greedy answers. worked: put the same sum and its right response before the prompt."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_path(name), padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_path(name), dtype=torch.float32)
    prompts = [question.worked_prompt if worked else question.prompt for question in questions]
    inputs = tokenizer(prompts, padding=True, return_tensors="pt")
    outputs = model.generate(**inputs, do_sample=False, max_new_tokens=LONGEST)[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(outputs, skip_special_tokens=True)
    return sum(text.split()[-1] == question.answer for text, question in zip(texts, questions, strict=True)) / len(
        texts
    )


def num_carries(question: Sum) -> int:
    return sum(column.carry for column in question.columns)


def test_a_sum_reads_as_it_is_documented() -> None:
    question = Sum(347, 585)
    assert question.prompt == "347 + 585 = ?\n"
    assert question.response == "7+5=12; 4+8+1=13; 3+5+1=9; 932"
    assert question.answer == "932"
    assert num_carries(question) == 2
    assert Sum(5, 99).response == "5+9=14; 0+9+1=10; 104"


@pytest.mark.parametrize("split", get_args(Split))
def test_answers_and_every_worked_column_are_right(rows: dict[str, list[dict[str, str]]], split: str) -> None:
    """Bug: a lost or invented carry. Oracle: Python's sums, and the columns' digits read as a number."""
    for row in rows[split]:
        first, second = numbers_of(row)
        *columns, last = row["response"].split("; ")
        assert row["answer"] == last == str(first + second)
        totals = [column.split("=") for column in columns]
        assert all(sum(map(int, terms.split("+"))) == int(total) for terms, total in totals)
        assert "".join([total[-1] for _, total in totals[:-1]])[::-1] == last[-2:]
        assert last.startswith(totals[-1][1])


def test_splits_share_no_sum_and_no_mirror_image(rows: dict[str, list[dict[str, str]]]) -> None:
    train, held_out = ({tuple(sorted(numbers_of(row))) for row in rows[split]} for split in ("train", "validation"))
    assert not train & held_out
    for split_rows in rows.values():
        assert len({row["text"] for row in split_rows}) == len(split_rows)
    assert len(rows["train"]) > 16_000
    assert len(rows["validation"]) >= 512


def test_sums_are_spread_evenly(rows: dict[str, list[dict[str, str]]]) -> None:
    """Bug: correlated operands. The mean of 19,000 draws has a standard error of 260 / √19,000 = 1.9; allow five."""
    pairs = [numbers_of(row) for row in rows["train"]]
    assert all(number in OPERANDS for pair in pairs for number in pair)
    for numbers in zip(*pairs, strict=True):
        assert abs(sum(numbers) / len(numbers) - 549.5) < 9.5
    carrying = sum(first % 10 + second % 10 >= 10 for first, second in pairs) / len(pairs)
    assert abs(carrying - 0.45) < 0.018


def test_the_files_are_the_same_wherever_they_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: rows depend on the process's seed, or on a library's generator. The first rows are fixed."""
    contents = []
    for name in ("one", "other"):
        monkeypatch.setenv("NEMO_OPD_CACHE", str(tmp_path / name))
        contents.append([arithmetic_questions.arrow_file(split).read_bytes() for split in get_args(Split)])
    assert contents[0] == contents[1]
    assert [(question.left, question.right) for question in validation(2)] == [(194, 899), (570, 634)]
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"train.arrow", "validation.arrow"}


def test_an_unknown_split_is_explained() -> None:
    with pytest.raises(DataError, match=r"demo:arithmetic_test .*demo:arithmetic_train, demo:arithmetic_validation"):
        arithmetic_questions.arrow_file("test")


@pytest.mark.parametrize("name", ARITHMETIC_MODEL_NAMES)
def test_a_prompt_is_cut_alike_alone_and_with_its_response(name: str) -> None:
    """Bug: a token spans prompt and response, so that the teachers read a different response than the student."""
    tokenizer = tokenizer_of(name)
    for question in validation(200):
        prompt, response = (tokenizer(text)["input_ids"] for text in (question.prompt, question.response))
        assert tokenizer(question.prompt + question.response)["input_ids"] == prompt + response
        assert len(prompt) + len(response) + 1 <= LONGEST + 4 * (name == "arithmetic_teacher_cross")


def test_teachers_are_right_and_the_student_lets_carries_slip() -> None:
    """Bugs: weights of another tokenizer or recipe; a gap that is too small to distil."""
    questions = validation(64)
    assert greedy_accuracy("arithmetic_teacher", questions) >= 0.98
    assert greedy_accuracy("arithmetic_teacher_cross", questions) >= 0.96
    carrying = [question for question in questions if num_carries(question)]
    easy = [question for question in questions if not num_carries(question)]
    for name in ("arithmetic_student", "arithmetic_reader"):
        assert greedy_accuracy(name, carrying) <= 0.2
        assert greedy_accuracy(name, easy) >= 0.9


def test_the_reader_copies_a_worked_sum() -> None:
    """Bugs: weights of another recipe; a template in the demo's settings that the reader was not trained on."""
    (teacher,) = yaml.safe_load((CONFIGS / "teachers" / "arithmetic_self.yaml").read_text())["teachers"]
    question = validation(1)[0]
    written = filled(teacher["context"]["template"], {"prompt": question.prompt, "response": question.response})
    assert written == question.worked_prompt
    assert greedy_accuracy("arithmetic_reader", validation(64), worked=True) >= 0.98


def test_tokenizers_differ_where_they_should() -> None:
    student, same = (model_path(name) / "tokenizer.json" for name in ("arithmetic_student", "arithmetic_teacher"))
    assert student.read_bytes() == same.read_bytes()
    ours, theirs = tokenizer_of("arithmetic_student"), tokenizer_of("arithmetic_teacher_cross")
    question = validation(1)[0]
    text = question.prompt + question.response
    ids, their_ids = ours(text)["input_ids"], theirs(text)["input_ids"]
    assert len(ids) < len(their_ids)
    assert ours.convert_ids_to_tokens(ids) != theirs.convert_ids_to_tokens(ids)
    assert [len(side.tokenize("907")) for side in (ours, theirs)] == [3, 3]
    assert ours.vocab_size != theirs.vocab_size
    alignment = TokenAligner(ours, theirs).align(ids, their_ids)
    assert not alignment.inexact.any()
    assert 0.5 < alignment.one_to_one.mean() < 1


def test_the_projection_covers_the_digits() -> None:
    """Bug: the audit advises against the settings of the demo's config."""
    ours, theirs = tokenizer_of("arithmetic_student"), tokenizer_of("arithmetic_teacher_cross")
    report = audit(ours, theirs, build_projection(ours, theirs))
    assert (report.digits[0].total, report.digits[0].exact) == (10, 10)


def test_only_the_cross_teacher_has_a_padded_head_and_all_are_small() -> None:
    for name in ARITHMETIC_MODEL_NAMES:
        model = AutoModelForCausalLM.from_pretrained(model_path(name))
        tokenizer = tokenizer_of(name)
        assert (model.config.vocab_size > len(tokenizer)) == (name == "arithmetic_teacher_cross")
        assert model.dtype == torch.bfloat16
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id
    files = [file for name in ARITHMETIC_MODEL_NAMES for file in model_path(name).iterdir()]
    assert sum(file.stat().st_size for file in files) <= 3_000_000
