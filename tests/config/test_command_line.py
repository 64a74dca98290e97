"""The command line is plain Hydra, with `--config FILE` beside it."""

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nemo_opd.config.command_line import Groups, Sweep, read_command_line
from nemo_opd.config.composition import composition_errors, run_with_hydra
from nemo_opd.config.objective import BytePrefixLoss
from nemo_opd.config.run import RunConfig
from nemo_opd.errors import ConfigError, ModelError
from tests.composition import CONFIGS, DEMO, PRODUCTION, ROOT, command_line, compose_all, configured


def test_overrides_reach_their_keys() -> None:
    """Catches a first override that wins over the last, and a `~` that is ignored."""
    config = configured(
        "train.max_steps=7",
        "student.optimizer.lr=1e-3",
        "run.output_dir=/runs/a",
        "loss.divergence=jsd",
        "train.max_steps=8",
        "~train.validate_every",
    )

    assert (config.train.max_steps, config.student.optimizer.lr) == (8, 1e-3)
    assert (config.run.output_dir, config.loss.divergence) == (Path("/runs/a"), "jsd")
    assert config.train.validate_every is None


def test_the_last_of_two_options_holds(tmp_path: Path) -> None:
    """Bug: Hydra refuses to append a group twice if the file has no `defaults`."""
    (file := tmp_path / "mine.yaml").write_text("student: demo:student\n")
    arguments = ["--config", str(file), "loss=jsd", "lr=1", "loss=gold"]
    assert read_command_line(arguments, CONFIGS, DEMO, RunConfig).overrides == ("++lr=1", "+loss=gold")


def test_a_key_that_no_yaml_mentions_is_set_without_a_plus() -> None:
    """Bug: plain Hydra asks for `+cluster.timeout_s=5`, because YAML files omit defaults."""
    cluster = configured("cluster.timeout_s=5", "+cluster.gpus_per_node=2", "++cluster.cpu_ranks=3").cluster
    assert (cluster.timeout_s, cluster.gpus_per_node, cluster.cpu_ranks) == (5, 2, 3)


def test_a_way_out_of_a_presets_setting_works() -> None:
    """Bug: a message advises to leave out a preset's setting, which `~` could not remove."""
    loss = configured("loss=bpm", "loss.positions=starts", "~loss.ends").loss
    assert isinstance(loss, BytePrefixLoss)
    assert (loss.positions, loss.ends) == ("starts", "drop")


def test_one_teacher_of_the_list_is_changed() -> None:
    config = configured("teachers.0.weight=0.8", "teachers.1.dtype=bfloat16")

    assert [teacher.weight for teacher in config.teachers] == [0.8, 0.5]
    assert [teacher.dtype for teacher in config.teachers] == ["float32", "bfloat16"]
    assert [teacher.model for teacher in config.teachers] == ["demo:teacher_cross", "demo:teacher_same"]


def test_groups_are_swapped_whole() -> None:
    """Catches an option that overwrites a key of its group, or keeps keys of the old option."""
    assert [teacher.name for teacher in configured("teachers=demo_single").teachers] == ["cross"]
    config = configured("teachers.0.weight=0.8", "teachers=phi4mini_llama3b", "student=llama3_2_1b", "cluster=gpu")

    assert [(teacher.name, teacher.weight) for teacher in config.teachers] == [("phi4mini", 0.8), ("llama3b", 0.5)]
    assert (config.student.model, config.cluster.device) == ("meta-llama/Llama-3.2-1B", "cuda")


@pytest.mark.parametrize("text", ["/data/a.arrow", "[/data/a.arrow]"])
def test_one_file_or_a_list_of_files(text: str) -> None:
    assert configured(f"data.train.arrow_files={text}").data.train.arrow_files == ("/data/a.arrow",)


def test_globs_and_quoted_paths_arrive_unchanged() -> None:
    """Bug: Hydra interprets characters of a quoted path."""
    for path in ("/data/**/*.arrow", "/data/part-[0-9].arrow", "/my data/a (1).arrow"):
        assert configured(f'data.train.arrow_files="{path}"').data.train.arrow_files == (path,)


@pytest.mark.parametrize("form", [("--config", "FILE"), ("--config=FILE",), ("-c", "FILE"), ("FILE",)], ids=" ".join)
def test_a_config_file_anywhere_finds_the_groups(form: tuple[str, ...], tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [{student: demo}, {teachers: demo_multi}, {data: demo}, _self_]\ntrain: {max_steps: 3}\n"
    )
    monkeypatch.chdir(tmp_path)
    config = configured(
        *(word.replace("FILE", "mine.yaml") for word in form), "teachers=qwen3_4b", "train.max_length=64"
    )

    assert (config.train.max_steps, config.train.max_length) == (3, 64)
    assert [teacher.model for teacher in config.teachers] == ["Qwen/Qwen3-4B"]
    assert list(tmp_path.iterdir()) == [tmp_path / "mine.yaml"], "Hydra has written nothing"


def test_a_config_file_brings_options_of_its_own(tmp_path: Path) -> None:
    """Bug: `teachers=<your file>` is searched in configs/ only, and not beside the config file."""
    (tmp_path / "mine.yaml").write_text((CONFIGS / "off_policy_demo.yaml").read_text())
    (tmp_path / "teachers").mkdir()
    (tmp_path / "teachers" / "own.yaml").write_text(
        "# @package _global_\nteachers: [{name: own, type: same_tokenizer, model: /models/own}]\n"
    )
    config = configured("--config", str(tmp_path / "mine.yaml"), "teachers=own")

    assert [teacher.model for teacher in config.teachers] == ["/models/own"]


def test_a_config_file_of_this_repository_by_its_path() -> None:
    assert configured("--config", str(CONFIGS / f"{PRODUCTION}.yaml")) == configured(config_name=PRODUCTION)


@pytest.mark.parametrize("arguments", [["--config", "nowhere.yaml"], ["--config"], ["--config=."]])
def test_a_config_file_that_is_not_there(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^--config=.*: there is no such file; give the path of a YAML file"):
        configured(*arguments)


def test_options_of_hydra_are_not_taken_for_overrides() -> None:
    typed = ["--cfg", "job", "train.max_steps=1", "-m", "teachers=demo_single", "~run.name"]
    arguments = read_command_line(typed, CONFIGS, DEMO, RunConfig).for_hydra

    assert arguments[4:7] == ["--cfg", "job", "--multirun"]
    assert arguments[-3:] == ["++train.max_steps=1", "teachers=demo_single", "~run.name"]


def test_help_names_the_groups_and_runs_nothing(capsys) -> None:
    assert compose_all("--help") == []
    printed = capsys.readouterr().out
    assert printed.startswith("distil [FILE]")  # not the name of a module
    assert max(map(len, printed.splitlines())) <= 80
    for part in ("docs/settings.md", "max_steps", "p_kl", "--cfg job"):
        assert part in printed
    for group in sorted(folder.name for folder in CONFIGS.iterdir() if any(folder.glob("*.yaml"))):
        assert f"{group}: " in printed


def test_a_group_counts_before_what_is_said_of_its_elements() -> None:
    """Bug: the message counts the two teachers that the group replaces."""
    with pytest.raises(ConfigError, match=r"^teachers\.2\.weight=1: teachers is a list of 1, teachers\.0; "):
        configured("teachers.2.weight=1", "teachers=demo_single")


def test_a_full_disk_under_stdout_is_not_a_fault_of_the_config() -> None:
    command = read_command_line([], CONFIGS, "off_policy_demo", RunConfig)
    reason = r"^stdout cannot be written \(No space left on device\)"
    with pytest.raises(ConfigError, match=reason), composition_errors(command, lambda _: None):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_all_options_that_do_not_exist_are_told_with_the_other_problems() -> None:
    """Bugs: one wrong option at a time, and wrong keys at the end; an unknown option's keys are reported, too."""
    with pytest.raises(ConfigError) as caught:
        configured("cluster=gpuu", "logging=nn", "loss=goldd", "loss.uncommon_topk=8", "train.max_stepz=4")
    wrong = [line.partition(":")[0] for line in str(caught.value).splitlines()]
    assert wrong == ["logging=nn", "cluster=gpuu", "loss=goldd", "train.max_stepz=4"]


def test_each_run_of_a_sweep_has_a_folder_named_by_what_it_varies(tmp_path: Path, monkeypatch) -> None:
    """Bug: folders are named by a run's start time, which says nothing about its settings."""
    monkeypatch.chdir(tmp_path)
    jobs = compose_all("--multirun", "train.max_steps=1,2", "run.seed=3", "loss.temperature=1.0,2.0")
    (root,) = {job.run.output_dir.parent for job in jobs}
    assert [(job.train.max_steps, job.loss.temperature) for job in jobs] == [(1, 1.0), (1, 2.0), (2, 1.0), (2, 2.0)]
    assert list(tmp_path.iterdir()) == [], "Hydra has written nothing"
    assert root.parent == Path("outputs/demo")
    assert root.name.startswith("sweep_2")
    assert [job.run.output_dir.name for job in jobs] == [
        f"train.max_steps={steps},loss.temperature={temperature}" for steps in (1, 2) for temperature in (1.0, 2.0)
    ]


def test_a_sweep_goes_where_it_is_told(tmp_path: Path, monkeypatch) -> None:
    """Bug: all runs share one folder, and the second run is refused."""
    monkeypatch.chdir(tmp_path)
    received: list[object] = []
    with command_line(("-m", "run.seed=1,2", f"run.output_dir={tmp_path / 'sweep'}")):
        run_with_hydra(
            lambda config: received.append(config.run.output_dir),
            RunConfig,
            config_dir=CONFIGS,
            config_name="off_policy_demo",
            after_sweep=lambda root, names: received.extend((root, names)),
        )
    root, names = tmp_path / "sweep", ["run.seed=1", "run.seed=2"]
    assert received == [*(root / name for name in names), root, names]


def test_an_interruption_ends_a_sweep(tmp_path: Path, monkeypatch) -> None:
    """Bug: after a scheduler's signal, the sweep still started its remaining runs."""
    monkeypatch.chdir(tmp_path)
    done: list[int] = []
    with command_line(("-m", "run.seed=1,2,3,4")), pytest.raises(KeyboardInterrupt) as caught:
        run_with_hydra(
            lambda config: done.append(config.run.seed),
            RunConfig,
            config_dir=CONFIGS,
            config_name="off_policy_demo",
            is_interrupted=lambda: len(done) == 2,
        )
    assert done == [1, 2]
    assert caught.value.__notes__ == ["these runs of the sweep were not started: run.seed=3, run.seed=4"]


def test_an_error_before_an_interruption_does_not_hide_the_runs_not_started(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    begun: list[int] = []

    def fail(config: RunConfig) -> None:
        begun.append(config.run.seed)
        raise ModelError("the run's own")

    with command_line(("-m", "run.seed=1,2")), pytest.raises(ModelError) as caught:
        run_with_hydra(
            fail, RunConfig, config_dir=CONFIGS, config_name="off_policy_demo", is_interrupted=lambda: bool(begun)
        )
    assert caught.value.__notes__ == ["these runs of the sweep were not started: run.seed=2"]


def test_a_folder_for_temporary_files_may_have_any_name(tmp_path: Path, monkeypatch) -> None:
    """Bug: the name was parsed as Hydra's grammar, and every command failed."""
    folder = tmp_path / "a b ü(x),'q\\"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert configured("train.max_steps=3").train.max_steps == 3
    assert list(folder.iterdir()) == []


def test_an_error_after_a_sweep_does_not_hide_the_error_of_a_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    def fail(*_: object) -> None:
        raise ModelError("the run's own")

    def fail_too(*_: object) -> None:
        raise ValueError("of the page")

    with command_line(("-m", "run.seed=1,2")), pytest.raises(ModelError, match="the run's own"):
        run_with_hydra(fail, RunConfig, config_dir=CONFIGS, config_name="off_policy_demo", after_sweep=fail_too)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ((["+teachers=a"], ["+teachers=b"]), ["teachers=a", "teachers=b"]),
        ((["teachers='x y/z'"], ["teachers='x y?z'"]), ["teachers=_x_y_z", "teachers=_x_y_z_1"]),
        ((["teachers=" + "x" * 300], ["teachers=" + "x" * 301]), None),
    ],
)
def test_names_of_swept_runs_are_folders_that_differ(overrides, names) -> None:
    sweep = Sweep(("teachers",))
    placed = [
        sweep.place({"run": {"output_dir": "out"}}, run_overrides)["run"]["output_dir"] for run_overrides in overrides
    ]
    assert len(set(placed)) == 2
    assert all(len(Path(folder).name) <= 120 for folder in placed)
    if names:
        assert [Path(folder).name for folder in placed] == names


def test_multirun_goes_on_after_a_job_that_fails(tmp_path: Path, monkeypatch) -> None:
    """Bug: a failing job ends the sweep, or its error is lost or wrapped."""
    monkeypatch.chdir(tmp_path)
    done: list[int] = []

    def task(config: RunConfig) -> None:
        if config.train.max_steps == 1:
            raise ModelError("the first job's problem")
        done.append(config.train.max_steps or 0)

    with command_line(("-m", "train.max_steps=1,0,2")), pytest.raises(ModelError, match="the first job's problem"):
        run_with_hydra(task, RunConfig, config_dir=CONFIGS, config_name="off_policy_demo")
    assert done == [2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["loss=nope"],
            r"^loss=nope: there is no such option; choose one of alm, bpm, byte_prefix, dpca, escd",
        ),
        (["~environment"], r"^~environment: the file sets this section itself; write environment=null$"),
        (["loss=gkd"], r"^loss=gkd: there is no such option; gkd of TRL or transformers is loss=jsd here; choose"),
        (["teachers=phi"], r"^teachers=phi: .* choose one of .*demo_multi, .*phi4mini_llama3b"),
        (["run.output_dir=/runs/a(b"], r"^run\.output_dir=/runs/a\(b: cannot be read .* quote a value"),
        (["train"], r"^train: cannot be read as key=value, and is neither a YAML file nor a recipe"),
        (
            ["nemo_opd/demo/models/student"],
            r"student: it is a model's folder; write student=nemo_opd/demo/models/student",
        ),
        (["off_policy_demo", "b.yaml"], r"^b\.yaml: the settings come from off_policy_demo already; name one file$"),
        (
            ["--dry-run"],
            r"^--dry-run: there is no such option; settings are written without dashes: run\.dry_run=true$",
        ),
        (["-c", "job"], r"^-c job: -c names a file; .* --cfg job$"),
        (["--lr", "1e-5"], r"^--lr: there .* without dashes: student\.optimizer\.lr=1e-5$"),
        (["--train.max_steps", "5"], r"^--train\.max_steps: there .* without dashes: train\.max_steps=5$"),
        (
            ["--learning-rate=1"],
            r"^--learning-rate: there .*; learning_rate of TRL .* is student\.optimizer\.lr here; ",
        ),
        (["--nothing-like-it"], r"^--nothing-like-it: there is no such option; distil --help shows the options, and "),
        (["--cfg", "x"], r"^argument --cfg: .* distil --help shows the options$"),
        (["lr=1"], r"^lr=1: there is no such key; did you mean student\.optimizer\.lr\?$"),
        (["num_train_epochs=3"], r"^num_train_epochs=3: there .*; num_train_epochs of TRL .* is train\.epochs here$"),
        (["policy.max_grad_norm=1"], r"^policy: .*; max_grad_norm of TRL .* is train\.gradient_clip here$"),
        (["~train.nope"], r"^~train\.nope: .*'train\.nope' does not exist"),
        (
            ["teachers.7.weight=1"],
            r"^teachers\.7\.weight=1: teachers is a list of 2, teachers\.0 and teachers\.1; write",
        ),
        (["train.max_steps=3", "teachers.weight=1", "run.seed=1"], r"^teachers\.weight=1: teachers is a list of 2, "),
        (["~teachers.5"], r"^~teachers\.5: teachers is a list of 2, "),
        (["~teachers.0"], r"^~teachers\.0: one element of a list cannot be removed; .* teachers=\[…\]$"),
        (
            ["cluster.launcher=local", "cluster.placement=separate"],
            r"^cluster\.placement=separate has no effect with launcher=local; write cluster.launcher=ray",
        ),
        (
            ["cluster.placement=colocated", "cluster.teacher_ranks=[1,1]"],
            r"^cluster\.teacher_ranks=\[1, 1\] has no effect with .*; write cluster\.placement=separate",
        ),
        (["train.max_steps=3", "+loss=gold"], r"^\+loss=gold: cannot be applied \(Multiple values for loss"),
        (
            ["train.max_steps=1,2"],
            r"^train\.max_steps=1,2: several values; write key=\[a,b\] for a list, or add --multirun",
        ),
        (["data.train=[]"], r"^data\.train=\[\]: a group of keys, not a list; set data\.train\.KEY of arrow_files"),
        (["teachers={model:m}"], r"^teachers={'model': 'm'}: must be a list$"),
        (
            ["loss=bpm", "loss.positions=starts"],
            r"^loss\.ends=rest has no effect .*; write loss\.positions=all, or leave ends out \(~loss\.ends\)$",
        ),
        (["=5"], r"^=5: the key is empty; write key=value$"),
        (["--config-name=zzz"], r"^--config=zzz: there is no such file; "),
        (["loss=null"], r"^loss=null: a group of keys, not one value"),
        (["++teachers=5"], r"^teachers=5: must be a list$"),
        (["loss="], r"^loss=: it is empty; choose one of alm, "),
        (["student.model=???"], r"^student\.model: required, but not given"),
        (["student.model=${nope}"], r"^student\.model: Interpolation key 'nope' not found"),
    ],
)
def test_errors_of_hydra_are_one_line(arguments: list[str], message: str) -> None:
    """Bug: Hydra's 30 lines of usage for `--lr`, or its lines about HYDRA_FULL_ERROR."""
    with pytest.raises(ConfigError, match=message) as caught:
        configured(*arguments)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("plus", ["", "++"])
def test_a_whole_group_is_written_on_the_command_line(plus: str) -> None:
    """Catches a group that is merged with the config's option, or refused because the config has none."""
    teachers = "teachers=[{name: a, model: X, type: cross_tokenizer}]"
    config = configured(plus + teachers, "teachers.0.weight=0.3")
    assert [(teacher.model, teacher.weight) for teacher in config.teachers] == [("X", 0.3)]
    data = configured(f"{plus}data={{train: {{jsonl_files: /x.jsonl}}}}").data
    assert data.train.given == {"jsonl_files": ("/x.jsonl",)}
    assert data.validation.given == {}
    assert configured("rollout={type: hf, n: 2, max_new_tokens: 8}").rollout is not None
    assert configured("rollout=hf", "rollout.max_new_tokens=8").rollout is not None
    assert configured("environment=null", config_name="on_policy_demo").environment is None


def test_groups_of_a_config_that_builds_on_another_are_swapped(tmp_path: Path) -> None:
    """Bug: only groups in a file's own defaults could be swapped, so that `self_distillation` took no `loss=`."""
    assert configured("loss=tcad", "--config=self_distillation").loss.type == "tcad"
    for name, base in (("first", "on_policy_demo"), ("second", "first")):
        (tmp_path / f"{name}.yaml").write_text(f"defaults:\n  - {base}\n  - _self_\n")
    config = configured("--config", str(tmp_path / "second.yaml"), "loss=tcad", "teachers=arithmetic_context")
    assert (config.loss.type, config.teachers[0].name) == ("tcad", "told")
    live = "teachers=[{name: live, type: same_tokenizer, weights: student}]"
    assert [teacher.name for teacher in configured("--config", str(tmp_path / "second.yaml"), live).teachers] == [
        "live"
    ]


def test_a_base_of_the_users_folder_hides_a_recipe(tmp_path: Path) -> None:
    """Bug: the hidden recipe's groups count as listed, so that Hydra refuses `loss=`."""
    (tmp_path / "on_policy_demo.yaml").write_text("train: {max_steps: 1}\n")
    (tmp_path / "mine.yaml").write_text("defaults:\n  - on_policy_demo\n  - _self_\n")
    groups = Groups.of(CONFIGS, tmp_path / "mine.yaml")
    assert groups.listed == frozenset()


def test_broken_yaml_is_told_by_its_file_and_line(tmp_path: Path) -> None:
    """Bug: the error names the command line, or the construct's first line."""
    primary = (CONFIGS / "off_policy_demo.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(primary)
    (tmp_path / "teachers").mkdir()
    (tmp_path / "teachers" / "own.yaml").write_text("# @package _global_\nteachers:\n  - name: [a\n    model: b\n")
    arguments = ["--config", str(tmp_path / "mine.yaml"), "train.max_steps=2"]
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/teachers/own\.yaml, line 4, column \d+: invalid YAML: "):
        configured(*arguments, "teachers=own")
    (tmp_path / "mine.yaml").write_text(primary + "  max_steps: 3\n x: 4\n")
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/mine\.yaml, line {len(primary.splitlines()) + 2}, "):
        configured(*arguments)


def test_the_environment_is_as_before(monkeypatch) -> None:
    """Bug: HYDRA_FULL_ERROR, which belongs to the user, changes and reaches every worker."""
    for value in (None, "0"):
        if value is None:
            monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
        else:
            monkeypatch.setenv("HYDRA_FULL_ERROR", value)
        configured()
        with pytest.raises(ConfigError):
            configured("loss=nope")
        assert os.environ.get("HYDRA_FULL_ERROR") == value


@pytest.mark.world
def test_the_example_answers_from_any_directory(tmp_path: Path) -> None:
    script = ROOT / "examples" / "run_off_policy_distillation.py"
    command = [sys.executable, str(script), "--cfg", "job", "train.max_steps=7"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert "max_steps: 7" in done.stdout
    assert "model: demo:student" in done.stdout
    assert list(tmp_path.iterdir()) == []
