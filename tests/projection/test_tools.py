"""The command-line tools, as a user starts them."""

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as torch_load_file
from safetensors.torch import save_file as torch_save_file
from transformers import AutoModelForCausalLM, CanineTokenizer

from nemo_opd.alignment import fingerprint
from nemo_opd.cli.projection import EXACT_MAP, INSPECT
from nemo_opd.demo import model_path
from nemo_opd.models import stored_weights
from nemo_opd.projection import EmbeddingSource, ProjectionMatrix, build_projection
from tests.exit_status import exit_status
from tests.projection.conftest import SMALL

pytestmark = pytest.mark.world

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "projection"
STEPS = ("exact_map", "multi_token", "embedding", "sort_and_cut", "byte_prefix")
BUILDERS = (*STEPS, "build")
PAIR = ("--student", "demo:student", "--teacher", "demo:teacher_cross")


def main(tool: str, *arguments: object) -> int:
    return exit_status("projection", tool.replace("_", "-"), *arguments)


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def call(tool: str, *arguments: object) -> str:
        """Run a command that must fail, and return its error, which must be one line."""
        assert main(tool, *arguments) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        return error

    return call


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("tokenizers")
    for side, name in (("student", "three_digits"), ("teacher", "one_digit")):
        SMALL[name].save_pretrained(base / side)
    return base / "student", base / "teacher"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo pair's matrix, built by the command."""
    path = tmp_path_factory.mktemp("built") / "pair.safetensors"
    assert main("build", *PAIR, "--output", path) == 0
    return path


def test_inspect_as_a_process(built: Path, tmp_path: Path) -> None:
    """Bug: the script inspect.py hides the standard library's `inspect`, which shows in a new process only."""
    plot = tmp_path / "pair.png"
    command = [sys.executable, str(TOOLS / "inspect.py"), str(built), "--json", "--plot", str(plot)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert 0 < json.loads(ran.stdout)["overlap"] < 1
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_help_names_the_defaults_of_embeddings(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: a default in the help differs from the real one."""
    assert main("embedding", "--help") == 0
    text = capsys.readouterr().out
    for name in ("weight", "temperature", "width"):
        default = EmbeddingSource.__dataclass_fields__[name].default
        assert re.search(rf"--embedding-{name} \w+[^-]*\(default\s+{default}\)", text)


def test_the_steps_one_by_one_are_the_build(built: Path, tmp_path: Path) -> None:
    """Catches a step that drops results of the previous one. Later steps use the tokenizers that the file names."""
    names = [tmp_path / f"{step}.safetensors" for step in ("exact", "spelled", "cut", "pair")]
    assert main("exact_map", *PAIR, "--output", names[0]) == 0
    assert main("multi_token", names[0], "--output", names[1]) == 0
    assert main("sort_and_cut", names[1], "--top-k", 4, "--output", names[2]) == 0
    assert main("byte_prefix", names[2], "--output", names[3]) == 0
    ours, theirs = load_file(names[3]), load_file(built)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array)
    matrix = ProjectionMatrix.load(names[3])
    assert matrix.options.passes == ProjectionMatrix.load(built).options.passes
    assert (matrix.student_name, matrix.teacher_name) == ("demo:student", "demo:teacher_cross")


def test_figures_in_the_examples_of_the_help(built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches outdated figures in --help."""
    assert main("exact_map", *PAIR, "--output", tmp_path / "exact.safetensors") == 0
    printed = capsys.readouterr().out.split(": ")[-1].strip()
    assert printed in EXACT_MAP.epilog
    assert main("inspect", built, "--json") == 0
    overlap = json.loads(capsys.readouterr().out)["overlap"]
    assert str(overlap) in INSPECT.epilog


def test_reverse_and_roles_reach_the_builder(tmp_path: Path) -> None:
    file = tmp_path / "pair.safetensors"
    assert main("build", *PAIR, "--output", file, "--reverse", "--roles", "<|pad|>=", "--top-k", 2) == 0
    matrix = ProjectionMatrix.load(file)
    assert (matrix.options.reverse, matrix.options.top_k, matrix.options.roles) == (True, 2, (("<|pad|>", ()),))
    assert matrix.row_lengths[1] == 0  # <|pad|>, which has a partner without the override


def test_embeddings_by_build_and_by_step(tmp_path: Path) -> None:
    """Compare with the library and the embeddings of the loaded models."""
    from nemo_opd.models.load import load_tokenizer

    file = tmp_path / "pair.safetensors"
    models = ("demo:student", "demo:teacher_cross")
    assert main("build", *PAIR, "--output", file, "--embeddings", *models, "--embedding-weight", 0.3) == 0
    loaded = [AutoModelForCausalLM.from_pretrained(model_path(name.removeprefix("demo:"))) for name in models]
    source = EmbeddingSource(*(model.get_input_embeddings().weight.detach() for model in loaded), weight=0.3)
    tokenizers = [load_tokenizer(name, key="test") for name in models]
    expected = build_projection(*tokenizers, embeddings=source)
    matrix = ProjectionMatrix.load(file)
    assert matrix.options == expected.options
    np.testing.assert_array_equal(matrix.indices, expected.indices)
    np.testing.assert_allclose(matrix.weights, expected.weights, atol=1e-6)  # the files hold bfloat16 or float32
    step = tmp_path / "near.safetensors"
    assert main("embedding", file, "--output", step, "--embeddings", *models) == 0
    assert ProjectionMatrix.load(step).options.embedding_weight == 0.1


def test_embeddings_are_found_whatever_the_prefix(tmp_path: Path) -> None:
    """Bug: embeddings are not found under the names of base models or larger models, or in a shard."""
    folder = tmp_path / "model"
    model = AutoModelForCausalLM.from_pretrained(model_path("student"))
    model.save_pretrained(folder, max_shard_size="200KB")
    expected = model.get_input_embeddings().weight
    torch.testing.assert_close(stored_weights.input_embeddings(str(folder), key="k"), expected.detach())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"]["model.embed_tokens.weight"]
    torch_save_file({f"language_model.{key}": tensor for key, tensor in torch_load_file(shard).items()}, shard)
    torch.testing.assert_close(stored_weights.input_embeddings(str(folder), key="k"), expected.detach())


def test_embeddings_that_are_not_there(tmp_path: Path, fails: Callable[..., str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((model_path("student") / "config.json").read_bytes())
    save_file({"other.weight": np.zeros((2, 2), np.float32)}, folder / "model.safetensors")
    command = ("build", *PAIR, "--output", tmp_path / "a.safetensors", "--embeddings")
    error = fails(*command, folder, "demo:teacher_cross")
    assert "model.embed_tokens.weight" in error
    assert "embed_tokens.weight" in error
    assert "no such folder" in fails(*command, tmp_path / "nothing", "demo:teacher_cross")
    assert not (tmp_path / "a.safetensors").exists()


def test_inspect_prints_everything(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("inspect", built, "--loss", "h_kl", "--samples", 3) == 0
    text = capsys.readouterr().out
    for part in (
        "overlap",
        "special tokens by role",
        "<|endoftext|>",
        "sample rows",
        "numerals",
        "h_kl compares",
    ):
        assert part in text
    assert main("inspect", built, "--loss", "p_kl") == 0
    assert "p_kl fits this pair" in capsys.readouterr().out
    assert main("inspect", built, "--loss", "pkl") == 2
    assert "invalid choice: 'pkl' (choose from same_vocab" in capsys.readouterr().err.replace("'same", "same")


def test_inspect_json_has_everything(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("inspect", built, "--json", "--loss", "gold", "--samples", 2) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["overlap"] == pytest.approx(0.99, abs=0.01)
    assert content["digits"][1] == {"total": 15, "exact": 0, "spelled": 15}
    assert {"role": "eos", "student": "<|end_of_text|>", "teacher": "<|endoftext|>", "one_to_one": True} in content[
        "roles"
    ]
    assert content["options"]["top_k"] == 4
    assert len(content["warnings"]) == 1
    sample = content["samples"][0]
    assert sample.keys() == {"kind", "id", "token", "exact", "entries"}
    assert sample["entries"][0].keys() == {"id", "token", "weight"}


def test_convert_with_and_without_tokenizers(built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = ProjectionMatrix.load(built)
    old, file = tmp_path / "old.pt", tmp_path / "new.safetensors"
    torch.save({"indices": torch.from_numpy(source.indices), "likelihoods": torch.from_numpy(source.weights)}, old)
    assert main("convert", old, *PAIR, "--output", file) == 0
    assert "one to one" in capsys.readouterr().out
    ours, theirs = load_file(file), load_file(built)
    for name in ("exact", "byte_prefix", "student_shared_prefix", "teacher_shared_prefix"):
        np.testing.assert_array_equal(ours[name], theirs[name])
    assert main("inspect", file, "--json") == 0
    assert json.loads(capsys.readouterr().out)["options"]["passes"][0] == "nemo_rl"
    assert main("convert", old, "--output", file, "--top-k", 1) == 0
    assert "no run can use the file" in capsys.readouterr().out
    matrix = ProjectionMatrix.load(file)
    assert (matrix.top_k, int(matrix.exact.sum())) == (1, 0)


def test_equal_tokenizers_are_refused(folders: tuple[Path, Path], tmp_path: Path, fails: Callable[..., str]) -> None:
    """Bug: equal tokenizers in different folders are accepted."""
    copy = tmp_path / "copy"
    SMALL["three_digits"].save_pretrained(copy)
    for tool in ("build", "exact_map"):
        error = fails(tool, "--student", folders[0], "--teacher", copy, "--output", tmp_path / "a.safetensors")
        assert "both tokenizers are the same; use type: same_tokenizer" in error
    assert [file.name for file in tmp_path.iterdir()] == ["copy"]


def test_a_tokenizer_without_a_fast_backend(tmp_path: Path, fails: Callable[..., str]) -> None:
    folder = tmp_path / "canine"
    CanineTokenizer().save_pretrained(folder)
    error = fails("build", "--student", folder, "--teacher", "demo:student", "--output", tmp_path / "a.safetensors")
    assert f"--student={folder}: CanineTokenizer has no fast backend" in error
    assert not (tmp_path / "a.safetensors").exists()


@pytest.mark.parametrize("tool", BUILDERS)
def test_impossible_outputs(tool: str, built: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    """Bug: an impossible output fails after the work, or leaves files behind."""
    (tmp_path / "blocking").touch()
    (tmp_path / "folder.safetensors").mkdir()
    files = sorted(tmp_path.rglob("*"))
    more = {"sort_and_cut": ("--top-k", 4), "embedding": ("--embeddings", "demo:student", "demo:teacher_cross")}
    source = PAIR if tool in ("build", "exact_map") else (built,)
    for output, reason in (
        (tmp_path / "a.pt", "is a .safetensors file"),
        (tmp_path / "folder.safetensors", "it is a folder"),
        (tmp_path / "blocking" / "a.safetensors", "blocking is a file, so it cannot be a folder"),
    ):
        assert reason in fails(tool, *source, *more.get(tool, ()), "--output", output)
    assert sorted(tmp_path.rglob("*")) == files


def test_files_that_cannot_be_read(built: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(built.read_bytes()[:1000])
    output = ("--output", tmp_path / "out.safetensors")
    for file, reason in ((bad, "damaged"), (tmp_path / "missing.safetensors", "cannot read")):
        for command in (
            ("inspect", file, "--plot", tmp_path / "out.png"),
            ("multi_token", file, *output),
            ("sort_and_cut", file, "--top-k", 2, *output),
            ("byte_prefix", file, *output),
        ):
            assert reason in fails(*command)
    assert list(tmp_path.iterdir()) == [bad]


def test_tokenizers_that_have_moved(built: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    """Bug: the error lacks the file that names the tokenizer, or the remedy."""
    file = tmp_path / "moved.safetensors"
    with safe_open(built, framework="numpy") as opened:
        metadata = opened.metadata()
    for name, reason in (("/nowhere/student", "--student overrides it"), ("", "give --student")):
        save_file(load_file(built), file, metadata | {"student_name": name})
        error = fails("inspect", file)
        assert reason in error
        assert str(file) in error
        assert main("inspect", file, "--student", "demo:student", "--json") == 0


def test_impossible_plots_and_samples(built: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    assert "cannot write the heat map" in fails("inspect", built, "--plot", built / "map.png")
    assert "cannot write the heat map" in fails("inspect", built, "--plot", tmp_path)
    assert "-1 sample rows" in fails("inspect", built, "--samples", "-1")
    assert not list(tmp_path.iterdir())


def test_nemo_rl_files_can_be_inspected(
    built: Path, tmp_path: Path, fails: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    source = ProjectionMatrix.load(built)
    file = tmp_path / "old.pt"
    torch.save({"indices": torch.from_numpy(source.indices), "likelihoods": torch.from_numpy(source.weights)}, file)
    assert "does not name its student's tokenizer; give --student" in fails("inspect", file)
    assert main("inspect", file, *PAIR, "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows_by_pieces"][0] == 0


def test_bad_conversions(tmp_path: Path, fails: Callable[..., str]) -> None:
    file, output = tmp_path / "old.pt", ("--output", tmp_path / "new.safetensors")
    torch.save({"indices": torch.tensor([[1]]), "likelihoods": torch.tensor([[float("nan")]])}, file)
    assert "row 0 has a weight" in fails("convert", file, *output)
    torch.save({(5, 1000): 1.0, (6, 1001): 1.0}, file)
    assert "give both --student and --teacher" in fails("convert", file, *output, "--student", "demo:student")
    assert "another pair" in fails("convert", file, *output, *PAIR)
    file.write_bytes(pickle.dumps(print, 2))
    assert "names code to run" in fails("convert", file, *output)
    assert not (tmp_path / "new.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--top-k", "0"), "top_k is 0"),
        (("--roles", "<|pad|>"), "write TOKEN=ROLE"),
        (("--roles", "<|nothing|>=pad"), "<|nothing|>"),
        (("--student", "/nowhere"), "--student=/nowhere"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], reason: str, tmp_path: Path, fails: Callable[..., str]) -> None:
    assert reason in fails("build", *PAIR, "--output", tmp_path / "a.safetensors", *arguments)
    assert not list(tmp_path.iterdir())


def test_tools_name_tokenizers_as_the_user_did(folders: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "pair.safetensors"
    assert main("exact_map", "--student", folders[0], "--teacher", "demo:teacher_cross", "--output", file) == 0
    matrix = ProjectionMatrix.load(file)
    assert (matrix.student_name, matrix.teacher_name) == (str(folders[0]), "demo:teacher_cross")
    assert matrix.student_fingerprint == fingerprint(SMALL["three_digits"])
