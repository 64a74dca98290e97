"""What is checked of a run's paths before PyTorch is imported."""

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
    ("name", "on_policy", "says"),
    [
        ("off_policy_demo", True, "rollout: required, but not given; add rollout=hf or rollout=server, or use "),
        ("on_policy_demo", False, "rollout.type=hf: this run learns from the texts of its data and samples none; "),
    ],
)
def test_the_settings_of_the_other_kind_of_run(name: str, on_policy: bool, says: str) -> None:
    """Bug: refused, off-policy, for what the data lack or for another setting."""
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}"):
        check_inputs(compose(config_name=name), on_policy=on_policy)


@pytest.mark.parametrize(
    ("overrides", "kind", "says"),
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
        (["data.text_key=body"], DataError, "data.train.arrow_files="),
    ],
)
def test_a_wrong_path_or_column(overrides: list[str], kind: type[OPDError], says: str) -> None:
    with pytest.raises(kind) as caught:
        check_inputs(compose(*overrides), on_policy=False)
    assert str(caught.value).startswith(says)


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


def test_a_malformed_line_is_said_before_the_validation_file(tmp_path: Path) -> None:
    """Bug: an error in the training file is told as a missing column of the validation file.

    A column that the first rows lack as null is no wrong type.
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
    """Bug: the way out is data.text_key, which the training file needs as it is."""
    file = write(tmp_path, "jsonl_files", {"question": ["a"], "answer": ["b"]})
    config = compose(f"evaluation.data={file}", config_name="on_policy_demo")
    with pytest.raises(DataError, match=r"evaluation\.sets\.NAME\.data\.text_key=COLUMN$"):
        check_inputs(config, on_policy=True)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("own.data.jsonl_files=/no", "own.data.jsonl_files='/no' does not exist"),
        ("own.data.text_key=no", "has no column 'no'; set evaluation.sets.own.data.text_key to one"),
        ("own.prompt='{hint}'", "has no column 'hint', which evaluation.sets.own.prompt names"),
        ("own.level_key=no", "has no column 'no', which evaluation.sets.own.level_key names"),
        ("own.reward.terms.0.reward.answer_key=no", "has no column 'no'; set evaluation.sets.own.reward.answer_key to"),
        (
            "own.reward.terms.0.reward.extract.schema_file=README.md",
            "evaluation.sets.own.reward.terms.0.reward.extract.schema_file=README.md: not a JSON schema",
        ),
    ],
)
def test_what_a_set_lacks_is_told_with_its_own_keys(override: str, says: str, tmp_path: Path) -> None:
    """Bug: the way out is a setting of the training data; found once PyTorch and tokenizers are loaded."""
    file = write(tmp_path, "jsonl_files", {"text": ["a"], "right": ["b"]})
    reward = "{type:exact,answer_key:right,extract:{type:json}}"
    own = f"{{data:{{jsonl_files:{file},text_key:text}},reward:{{type:weighted,terms:[{{reward:{reward}}}]}}}}"
    overrides = f"+evaluation.sets.own={own}", f"++evaluation.sets.{override}"
    config = compose(*overrides, config_name="on_policy_demo")
    with pytest.raises(OPDError) as caught:
        check_inputs(config, on_policy=True)
    assert says in str(caught.value)


@pytest.mark.world
def test_a_wrong_path_is_refused_before_heavy_imports(tmp_path: Path) -> None:
    """Seconds of imports for a typo: what pulls them in is easily added and seen by nobody."""
    arguments = [sys.executable, "-c", SCRIPT, "data.train.arrow_files=/nowhere.arrow"]
    done = subprocess.run(arguments, capture_output=True, text=True)

    assert done.returncode == 1
    assert done.stdout.strip() == "[]"
    *_, error = done.stderr.strip().splitlines()
    assert error == "error: data.train.arrow_files='/nowhere.arrow' does not exist; correct the path"
