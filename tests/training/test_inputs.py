"""A run's paths and columns are checked before PyTorch is imported."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemo_opd.errors import ConfigError, DataError, ModelError, OPDError, ProjectionError
from nemo_opd.preflight.inputs import check_inputs
from tests.composition import compose

SCRIPT = """
import sys
from nemo_opd.errors import OPDError
from tests.composition import ROOT
sys.argv = ["distil", *sys.argv[1:]]
import runpy
try:
    runpy.run_path(str(ROOT / "examples" / "run_off_policy_distillation.py"), run_name="__main__")
finally:
    print([name for name in ("torch", "transformers", "ray", "datasets", "numba") if name in sys.modules])
"""


@pytest.mark.parametrize("name", ["off_policy_demo", "on_policy_demo"])
def test_a_run_that_works_passes(name: str, tmp_path: Path) -> None:
    check_inputs(compose(f"run.output_dir={tmp_path}", config_name=name), on_policy=name == "on_policy_demo")


@pytest.mark.parametrize(
    ("name", "on_policy", "message"),
    [
        ("off_policy_demo", True, "rollout: required, but not given; add rollout=hf or rollout=server, or use "),
        ("on_policy_demo", False, "rollout.type=hf: this run learns from the texts of its data and samples none; "),
    ],
)
def test_the_settings_of_the_other_kind_of_run(name: str, on_policy: bool, message: str) -> None:
    """Bug: the message names a missing column or another setting, not the kind of run."""
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        check_inputs(compose(config_name=name), on_policy=on_policy)


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        (["student.model=/nowhere"], ModelError, "student.model=/nowhere: there is no such folder"),
        (["student.tokenizer=/nope"], ModelError, "student.tokenizer=/nope: there is no such folder"),
        (["teachers.0.tokenizer=/tmp"], ModelError, "teachers.0.tokenizer=/tmp: the folder has no tokenizer"),
        (["teachers.1.model=/nowhere"], ModelError, "teachers.1.model=/nowhere: there is no such folder"),
        (["student.chat_template=/no.jinja"], ModelError, "student.chat_template=/no.jinja: "),
        (["teachers.0.projection=/no.safetensors"], ProjectionError, "teachers.0.projection: cannot read the"),
        (["data.train.arrow_files=/no/*.arrow"], DataError, "data.train.arrow_files='/no/*.arrow' matches no file"),
        (["data.validation.arrow_files=/no"], DataError, "data.validation.arrow_files='/no' does not exist"),
        (["data.train.arrow_files=null"], DataError, "data.train names no data"),
    ],
)
def test_a_wrong_path(overrides: list[str], kind: type[OPDError], message: str) -> None:
    with pytest.raises(kind) as caught:
        check_inputs(compose(*overrides), on_policy=False)
    assert str(caught.value).startswith(message)


def write(folder: Path, kind: str, rows: dict[str, list[object]]) -> Path:
    path, table = folder / f"rows.{kind.partition('_')[0]}", pa.table(rows)
    if kind == "arrow_files":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    elif kind == "parquet_files":
        pq.write_table(table, path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return path


@pytest.mark.parametrize("kind", ["arrow_files", "parquet_files", "jsonl_files"])
def test_columns_are_read_from_every_format(kind: str, tmp_path: Path) -> None:
    good = write(tmp_path, kind, {"text": ["a", "b"], "n": [1, 2]})
    override = f"data={{train: {{{kind}: {good}}}}}"
    check_inputs(compose(override), on_policy=False)
    with pytest.raises(DataError, match=rf"^data\.train\.{kind}='{good}': column 'n' is of type int64, not string"):
        check_inputs(compose(override, "data.text_key=n"), on_policy=False)
    with pytest.raises(DataError, match=r"has no column 'body'; set data.text_key to one of its columns: text$"):
        check_inputs(compose(override, "data.text_key=body"), on_policy=False)


def test_a_malformed_line_is_reported_before_the_validation_file(tmp_path: Path) -> None:
    """Bug: an error in the training file is reported as a missing column of the validation file; or a column that is
    null in the first rows has a wrong type.
    """
    (tmp_path / "v.jsonl").write_text('{"messages": []}\n')
    validation = f"validation: {{jsonl_files: {tmp_path / 'v.jsonl'}}}"
    for content, reason in (('{"text": null}\n{"text": "b"\n', "line 2 is malformed"), ("", "the files have no rows")):
        (tmp_path / "a.jsonl").write_text(content)
        with pytest.raises(DataError, match=rf"^data\.train\.jsonl_files='.*a\.jsonl': .*{reason}"):
            check_inputs(
                compose(f"data={{train: {{jsonl_files: {tmp_path / 'a.jsonl'}}}, {validation}}}"), on_policy=False
            )
    (tmp_path / "b.jsonl").write_text('{"text": null}\n')
    check_inputs(compose(f"data={{train: {{jsonl_files: {tmp_path / 'b.jsonl'}}}}}"), on_policy=False)


def test_a_column_of_the_reward_and_of_the_evaluation() -> None:
    for key in ("reward.answer_key=nope", "data.text_key=nope"):
        with pytest.raises(DataError, match="has no column 'nope'"):
            check_inputs(compose(key, config_name="on_policy_demo"), on_policy=True)


def test_questions_with_other_columns(tmp_path: Path) -> None:
    """Bug: the message proposes data.text_key, which is right for the training file."""
    file = write(tmp_path, "jsonl_files", {"question": ["a"], "answer": ["b"]})
    config = compose(f"evaluation.data={file}", config_name="on_policy_demo")
    with pytest.raises(DataError, match=r"evaluation\.sets\.NAME\.data\.text_key=COLUMN$"):
        check_inputs(config, on_policy=True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sums.data.jsonl_files=/no", "sums.data.jsonl_files='/no' does not exist"),
        ("sums.data.text_key=no", "has no column 'no'; set evaluation.sets.sums.data.text_key to one"),
        ("sums.prompt='{hint}'", "has no column 'hint', which evaluation.sets.sums.prompt names"),
        ("sums.level_key=no", "has no column 'no', which evaluation.sets.sums.level_key names"),
        ("sums.reward.terms.0.reward.answer_key=no", "no column 'no'; set evaluation.sets.sums.reward.answer_key to"),
        (
            "sums.reward.terms.0.reward.extract.schema_file=README.md",
            "evaluation.sets.sums.reward.terms.0.reward.extract.schema_file=README.md: not a JSON schema",
        ),
    ],
)
def test_errors_in_a_question_set_name_its_keys(override: str, message: str, tmp_path: Path) -> None:
    """Bug: the message proposes a setting of the training data, or comes once PyTorch and tokenizers are loaded."""
    file = write(tmp_path, "jsonl_files", {"text": ["a"], "right": ["b"]})
    reward = "{type:exact,answer_key:right,extract:{type:json}}"
    question_set = f"{{data:{{jsonl_files:{file},text_key:text}},reward:{{type:weighted,terms:[{{reward:{reward}}}]}}}}"
    overrides = f"+evaluation.sets.sums={question_set}", f"++evaluation.sets.{override}"
    config = compose(*overrides, config_name="on_policy_demo")
    with pytest.raises(OPDError) as caught:
        check_inputs(config, on_policy=True)
    assert message in str(caught.value)


@pytest.mark.world
def test_a_wrong_path_is_refused_before_heavy_imports(tmp_path: Path) -> None:
    """Bug: seconds of imports before a typo is reported; an import that pulls them in is easily added unnoticed."""
    arguments = [sys.executable, "-c", SCRIPT, "data.train.arrow_files=/nowhere.arrow"]
    done = subprocess.run(arguments, capture_output=True, text=True)

    assert done.returncode == 1
    assert done.stdout.strip() == "[]"
    *_, error = done.stderr.strip().splitlines()
    assert error == "error: data.train.arrow_files='/nowhere.arrow' does not exist; correct the path"
