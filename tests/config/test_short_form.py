"""Short configurations: strings for models, files and losses, with types, names and columns left out."""

import json
from pathlib import Path

import pytest

from nemo_opd.config.composition import compose
from nemo_opd.config.run import from_dict
from nemo_opd.errors import ConfigError
from nemo_opd.preflight.inputs import with_documents_columns

pytestmark = pytest.mark.unit

SHORT = """
student: HuggingFaceTB/SmolLM2-135M
teachers: [google/gemma-3-270m, other/gemma-3-270m]
data: train.jsonl
loss: gold
train: {max_steps: 1000}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "short.yaml"
    file.write_text(SHORT)
    return file


def test_strings_stand_for_sections(recipe: Path) -> None:
    """Bugs: a string is not accepted as a section; two teachers get the same name."""
    config = compose(recipe)
    assert config.student.model == "HuggingFaceTB/SmolLM2-135M"
    assert [(t.type, t.name) for t in config.teachers] == [("auto", "gemma-3-270m"), ("auto", "gemma-3-270m_2")]
    assert config.data.train.given == {"jsonl_files": ("train.jsonl",)}
    assert config.loss.type == "gold"


def test_a_section_in_place_of_a_list_is_told(recipe: Path) -> None:
    """Bug: Hydra's message about DictConfig and ListConfig."""
    with pytest.raises(ConfigError, match=r"^teachers={model:m}: a list, .*; write teachers=\[{model:m}\]$"):
        compose(recipe, ["teachers={model:m}"])


def test_a_teacher_is_not_named_like_the_student() -> None:
    settings = {"student": "m", "teachers": ["demo:student"], "data": "a.jsonl", "train": {"max_steps": 1}}
    assert from_dict(settings).active_names == ("student_2",)


def test_a_string_in_a_file_means_what_it_means_on_the_command_line(tmp_path: Path) -> None:
    """Bug: `loss: reverse_kl`, an option of the group and not a type, is refused in a file."""
    file = tmp_path / "mine.yaml"
    for name in ("reverse_kl", "uld"):
        file.write_text(SHORT.replace("loss: gold", f"loss: {name}"))
        from_file = compose(file)
        file.write_text(SHORT.replace("loss: gold", ""))
        assert compose(file, [f"loss={name}"]).loss == from_file.loss


def test_an_option_on_the_command_line_replaces_a_string_of_the_file(tmp_path: Path) -> None:
    """Bug: `loss=p_kl` keeps divergence and weights of the file's option."""
    file = tmp_path / "mine.yaml"
    file.write_text(SHORT.replace("loss: gold", "loss: reverse_kl"))
    replaced = compose(file, ["loss=p_kl"]).loss
    file.write_text(SHORT.replace("loss: gold", ""))
    assert replaced == compose(file, ["loss=p_kl"]).loss


def test_references_are_resolved_first(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the text `${oc.env:FILE}` counts as the name of a dataset on the hub."""
    monkeypatch.setenv("OF_A_TEST", "texts.jsonl")
    recipe.write_text(SHORT.replace("train.jsonl", "${oc.env:OF_A_TEST}"))
    assert compose(recipe).data.train.given == {"jsonl_files": ("texts.jsonl",)}


def test_a_section_with_a_default_type_needs_none() -> None:
    """Bug: `loss.kd_weight=0` is refused for a file without `loss`, as the default's type is lost."""
    settings = {"student": "a", "teachers": ["b"], "data": "c.txt", "train": {"max_steps": 1}}
    config = from_dict(settings | {"loss": {"ce_weight": 0}, "handoff": {"transport": "shared_memory"}})
    assert (config.loss.type, config.loss.ce_weight, config.handoff.type) == ("p_kl", 0, "hidden_states")


def test_overrides_reach_into_sections_written_as_strings(recipe: Path) -> None:
    """Bug: an override below a key with a string value fails to compose."""
    overrides = ["loss.ce_weight=0", "student.optimizer.lr=1e-4", "teachers.1.weight=0.5", "data.shuffle=false"]
    config = compose(recipe, overrides)
    assert (config.loss.type, config.loss.ce_weight, config.teachers[1].weight) == ("gold", 0, 0.5)
    assert (config.student.optimizer.lr, config.data.shuffle) == (1e-4, False)


@pytest.mark.parametrize("name", ["short", "off_policy_demo"])
def test_strings_on_the_command_line(recipe: Path, name: str) -> None:
    """Bugs: a string on the command line must be an option of the group; the file's data source stays beside it."""
    source = recipe if name == "short" else name
    overrides = ["loss=uld", "student=a/b", "data=c/d", "teachers=[demo:teacher_same]", "teachers.0.weight=2"]
    config = compose(source, overrides)
    assert (config.loss.type, config.student.model) == ("uld", "a/b")
    hub = config.data.train.hub
    assert hub is not None
    assert hub.path == "c/d"
    assert [(t.model, t.name, t.weight) for t in config.teachers] == [("demo:teacher_same", "teacher_same", 2)]


@pytest.mark.parametrize("name", ["short", "off_policy_demo"])
def test_a_string_names_the_file_of_questions(recipe: Path, name: str) -> None:
    """Bug: `evaluation.data=FILE` is refused, and `data=FILE` is not; also for a set."""
    overrides = ["evaluation.data=questions.jsonl", "evaluation.data.max_samples=3", "reward=numeric"]
    overrides += ["evaluation.max_new_tokens=8", "evaluation.sets.hard.data=[hard.parquet]"]
    evaluation = compose(recipe if name == "short" else name, overrides).evaluation
    assert evaluation is not None
    assert (evaluation.data.jsonl_files, evaluation.data.max_samples) == (("questions.jsonl",), 3)
    assert evaluation.sets["hard"].data.parquet_files == ("hard.parquet",)


@pytest.mark.parametrize("name", ["short", "off_policy_demo"])
def test_lists_of_files_on_the_command_line(recipe: Path, name: str) -> None:
    """Bug: a list of training files is refused, or the other settings of the data are lost."""
    overrides = ["data.shuffle=false", "data.train=[a b.jsonl,/c/d.jsonl]", "data.validation=[e.txt]"]
    data = compose(recipe if name == "short" else name, overrides).data
    assert (data.train.jsonl_files, data.train.hub, data.shuffle) == (("a b.jsonl", "/c/d.jsonl"), None, False)
    assert data.validation.text_files == ("e.txt",)


def test_files_of_two_kinds() -> None:
    """Bug: files of two kinds are read as the kind of the first."""
    with pytest.raises(ConfigError, match=r"data\.train: a\.jsonl, b\.parquet are not files of one kind"):
        from_dict({"student": "a", "teachers": ["b"], "data": ["a.jsonl", "b.parquet"], "train": {"max_steps": 1}})


def test_a_file_of_an_unknown_suffix_is_no_data_set_of_the_hub(tmp_path: Path) -> None:
    """Bugs: a local file is searched on the hub; the message blames the validation file."""
    (tmp_path / "texts.bin").write_text("{}")
    for name in (tmp_path / "texts.bin", tmp_path / "part*"):
        with pytest.raises(ConfigError, match=r"does not tell its kind; write one of data\.train\.arrow_files="):
            from_dict({"student": "a", "teachers": ["b"], "data": str(name), "train": {"max_steps": 1}})


@pytest.mark.parametrize(("column", "expected"), [("messages", "messages"), ("text", None)])
def test_column_of_conversations(tmp_path: Path, column: str, expected: str | None) -> None:
    """Bugs: a file with a messages column alone still needs a setting; texts are read as conversations."""
    file = tmp_path / "train.jsonl"
    text: object = "a" if column == "text" else [{"role": "user", "content": "a"}]
    file.write_text(json.dumps({column: text}) + "\n")
    settings = {"student": "a", "teachers": ["b"], "data": str(file), "train": {"max_steps": 1}}
    assert from_dict(with_documents_columns(settings)).data.messages_key == expected
