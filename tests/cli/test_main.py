"""The installed command: verbs, help and shell completion."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from nemo_opd.cli import check, settings_verbs
from nemo_opd.cli.completion import complete_recipe, complete_setting
from nemo_opd.cli.main import VERBS, Group, main
from nemo_opd.config.run import RunConfig
from tests.composition import CONFIGS
from tests.exit_status import exit_status

ALL = [
    (name, *verb)
    for name, entry in VERBS.items()
    for verb in ([(v,) for v in entry.verbs] if isinstance(entry, Group) else [()])
]


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_every_verb_has_a_command_with_help(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: the table names a module that does not exist, or one without the command."""
    assert exit_status(*words, "--help") == 0
    program = "gpu_check.py" if words == ("check",) else f"nemo-opd {' '.join(words)}"
    assert program in capsys.readouterr().out


def test_check_needs_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CHECKOUT", None)
    with pytest.raises(SystemExit, match="nemo-opd check: its tests are not installed; run it in a checkout"):
        main(["check"])


def test_a_verb_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: the message lists all verbs, instead of the one that is one letter away."""
    assert exit_status("distill") == 2
    assert "distill: there is no such verb; did you mean nemo-opd distil?" in capsys.readouterr().err
    assert exit_status("train") == 2
    assert "train: there is no such verb; did you mean nemo-opd distil?" in capsys.readouterr().err
    assert exit_status("projection", "bild") == 2
    assert "bild: there is no such verb; did you mean nemo-opd projection build?" in capsys.readouterr().err
    assert exit_status("xyz") == 2
    assert "choose from init, distil, distil-on-policy" in capsys.readouterr().err.replace("'", "")
    assert exit_status("projection", "xyz") == 2
    assert "exact-map" in capsys.readouterr().err
    assert exit_status("--", "distil") == 2


def test_without_a_verb_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status() == 0
    out = capsys.readouterr().out
    assert all(entry.help in " ".join(out.split()) for entry in VERBS.values())
    assert exit_status("cache") == 0
    assert "store a teacher's output" in capsys.readouterr().out
    assert exit_status("--version") == exit_status("distil", "--version") == 0
    assert capsys.readouterr().out.split() == ["0.1.0", "0.1.0"]


OFFERED = {
    "nemo-opd dist": ["distil", "distil-on-policy"],
    "nemo-opd projection in": ["inspect"],
    "nemo-opd projection build --stu": ["--student"],
    "nemo-opd distil train.max_st": ["train.max_steps="],
    "nemo-opd distil loss=p_": ["loss=p_kl"],
    "nemo-opd distil --config on_": ["on_policy_demo", "on_policy_distillation"],
}
COMPLETING = """
import os, sys
from nemo_opd.cli.main import main
for i, line in enumerate(sys.argv[2:]):
    if os.fork() == 0:
        said = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": ",", "_ARGCOMPLETE_STDOUT_FILENAME": f"{sys.argv[1]}/{i}"}
        os.environ.update(said | {"COMP_LINE": line, "COMP_POINT": str(len(line))})
        main([])
    os.wait()
"""


@pytest.mark.world
def test_a_shell_completes_a_line(tmp_path: Path) -> None:
    """Bugs: no completions if a verb's arguments are not in the parser; an exception, which shells do not show."""
    subprocess.run([sys.executable, "-c", COMPLETING, str(tmp_path), *OFFERED], check=True)
    completions = [(tmp_path / str(i)).read_text().split(",") for i in range(len(OFFERED))]
    assert [[word.strip() for word in line] for line in completions] == list(OFFERED.values())


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("train.max_s", ["train.max_steps="]),
        ("teachers.0.con", ["teachers.0.context."]),
        ("loss.divergence=", ["loss.divergence=forward_kl", "loss.divergence=jsd"]),
        (
            "train.compile_losses=",
            ["train.compile_losses=true", "train.compile_losses=false", "train.compile_losses=null"],
        ),
        ("loss=", ["loss=p_kl", "loss=gold"]),
        ("lo", ["loss.", "loss=", "logging.", "logging="]),
        ("nothing.at.all", []),
    ],
)
def test_settings_are_completed_part_by_part(typed: str, offered: Sequence[str]) -> None:
    completions = [
        completion for completion in complete_setting(typed, RunConfig, CONFIGS) if completion.startswith(typed)
    ]
    assert set(offered) <= set(completions)
    assert bool(completions) == bool(offered)


def test_no_section_is_the_only_offer() -> None:
    """Bug: a single completion ends with a space, which the user has to remove before the next part of the key."""
    offered = complete_setting("student.opti", RunConfig, CONFIGS)
    assert len(offered) > 1
    assert all(completion.startswith("student.optimizer.") for completion in offered)
    assert complete_setting("train.max_steps", RunConfig, CONFIGS) == ["train.max_steps="]


def test_recipes_are_named_and_files_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "on_mine.yaml").touch()
    (tmp_path / "one").mkdir()
    (tmp_path / "on.txt").touch()
    assert set(complete_recipe("on", CONFIGS)) >= {"on_mine.yaml", "one/", "on_policy_demo"}
    assert "on.txt" not in complete_recipe("on", CONFIGS)


def test_a_section_of_the_settings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    assert exit_status("distil", "--help", "train") == 0
    out = capsys.readouterr().out
    assert "train.max_steps  (int | null; default null)\n      Optimizer steps; by default" in out
    assert "loss." not in out.replace("compile_losses", "")
    for section, way_out in {"trian": "did you mean train?", "xyz": "choose one of run, train,"}.items():
        assert exit_status("distil", "--help", section) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"error: --help {section}: there is no such section or key")
        assert way_out in error


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("teachers.0.context", "teachers.0.context.contrast  (bool"),
        ("train.max_steps", "train.max_steps  (int | null; default null)"),
        ("teachers.0.weight", "teachers.0.weight  (float; default 1.0)"),
        ("loss.temperature", "loss of type=uld: temperature  (float; default 1.0)"),
        ("gradients", "logging.gradients_every"),
        ("num_generations", "num_generations of TRL or transformers is rollout.n here, in nemo-opd distil-on-policy"),
    ],
)
def test_help_answers_for_a_key_or_a_word(word: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: an unknown section is reported for a key, a list element, a word of a meaning or another trainer's word."""
    assert exit_status("help", "distil", word) == 0
    assert line in capsys.readouterr().out


def test_a_run_without_a_file_says_that_it_is_the_demo(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: if the user forgets the file, the demo's tiny models are trained silently for minutes."""
    tasks: list[object] = []
    monkeypatch.setattr(settings_verbs, "DISTIL", replace(settings_verbs.DISTIL, task=tasks.append))
    for words, is_demo in (((), True), (("off_policy_demo",), False), (("--cfg", "job"), False)):
        assert exit_status("distil", *words) == 0
        assert ("starts from the demo off_policy_demo" in capsys.readouterr().err) == is_demo
    assert len(tasks) == 2


def test_the_package_is_a_command() -> None:
    """Bug: `nemo_opd is a package and cannot be directly executed`."""
    assert import_module("nemo_opd.__main__").main is main


def test_generate_prints_samples(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("generate", "--model", "demo:arithmetic_student", "--prompt", "12+30=", "--max-new-tokens", "4")
    assert exit_status(*command, "--n", "2", "--json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert exit_status(*command, "--n", "2", "--json") == 0
    assert capsys.readouterr().out.splitlines() == lines  # the same seed
    assert ['"sample": 0' in lines[0], '"sample": 1' in lines[1], len(lines)] == [True, True, 2]
    assert exit_status(*command, "--top-p", "0") == 1
    assert "--top-p=0: must be above 0" in capsys.readouterr().err
    assert exit_status(*command, "--temperature", "nan") == 1
    assert "--temperature=nan: must be at least 0" in capsys.readouterr().err
    assert exit_status(*command, "--chat") == 1
    assert "has no chat template, which --chat needs; leave out --chat" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "command"),
    [
        ("--data", ("cache", "build", "--top-k", "4")),
        ("--text", ("transplant", "--tokenizer", "demo:student")),
    ],
)
def test_a_command_names_its_own_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, command: tuple[str, ...]
) -> None:
    """Bug: the remedy is data.text_key, which these commands do not have."""
    (file := tmp_path / "q.jsonl").write_text('{"question": "1+1", "answer": "2"}')
    assert exit_status(*command, "--model", "demo:teacher_cross", "--output", tmp_path / "new", option, file) == 1
    error = f"{option}='{file}' has no column 'text'; set --text-key to one of its columns: question, answer\n"
    assert capsys.readouterr().err.endswith(error)


def test_a_seed_that_no_generator_takes_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: a traceback of the overflow."""
    command = ("transplant", "--model", "demo:teacher_cross", "--tokenizer", "demo:student", "--random", "all")
    assert exit_status(*command, "--output", tmp_path / "new", "--seed", 10**20) == 1
    assert "--seed=100000000000000000000: must be at most 4611686018427387904" in capsys.readouterr().err
