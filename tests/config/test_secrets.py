"""Secrets of a configuration stay out of a run's files and output, and the run can still be repeated."""

from pathlib import Path

import pytest
import yaml

from nemo_opd.cli.settings_verbs import main
from nemo_opd.config import secrets
from nemo_opd.config.composition import from_yaml, run_with_hydra, to_yaml
from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.config.run import RunConfig, from_dict, validated
from nemo_opd.config.secrets import MASK, without_secrets
from nemo_opd.config.teacher import Endpoint, SameTokenizerTeacher, Teacher
from nemo_opd.errors import ConfigError, RolloutError
from nemo_opd.logging.loggers import JsonlLogger, Loggers
from nemo_opd.logging.records import read_config
from nemo_opd.logging.report import write_report
from tests.composition import CONFIGS, command_line, compose, configured
from tests.config.settings import VALID
from tests.logging.synthetic import CLOSING

VALUE = "hunter2-hunter2"
ON_POLICY = "on_policy_demo"
STARTED = (
    "rollout=server",
    f"rollout.options=['--hf-token',{VALUE},'--hf-token={VALUE}','--max-num-batched-tokens','8192']",
    f"rollout.environment={{HF_TOKEN:{VALUE},NAME:{VALUE},PIN_KEY:'1234',CUDA_VISIBLE_DEVICES:'0,1'}}",
)
REFERENCE = "${oc.env:OF_A_TEST}"
TYPED = tuple(override.replace(VALUE, REFERENCE).replace("PIN_KEY:'1234',", "") for override in STARTED)
"""The same overrides with a reference, as a command line accepts them."""
RUNNING = ("rollout=server", f"rollout.url='https://me:{VALUE}@example.org/v1?api_key={VALUE}&page=2'")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_replacements", {})
    monkeypatch.setattr(secrets, "_references", {})
    monkeypatch.setattr(secrets, "_written", set())


def composed(*overrides: str) -> RunConfig:
    return compose.__wrapped__(*overrides, config_name=ON_POLICY)


def written(config: RunConfig, folder: Path) -> str:
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    return (folder / "config.yaml").read_text(encoding="utf-8")


def test_an_address_has_none(tmp_path: Path) -> None:
    text = written(composed(*RUNNING), tmp_path)
    assert VALUE not in text
    assert yaml.safe_load(text)["rollout"]["url"] == f"https://{MASK}@example.org/v1?api_key={MASK}&page=2"


def test_config_report_and_trackers_have_none(tmp_path: Path) -> None:
    text = written(composed(*STARTED), tmp_path)
    assert VALUE not in text
    rollout = yaml.safe_load(text)["rollout"]
    assert rollout["options"] == ["--hf-token", MASK, f"--hf-token={MASK}", "--max-num-batched-tokens", "8192"]
    assert rollout["environment"] == {
        "HF_TOKEN": MASK,
        "NAME": MASK,
        "PIN_KEY": MASK,
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    write_report(tmp_path, CLOSING)
    assert VALUE not in (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert VALUE not in str(read_config(tmp_path))


def test_other_settings_are_written_as_they_are(tmp_path: Path) -> None:
    """Bug: names with `key` or `token`, such as columns and tokenizers, are masked."""
    config = composed("reward.answer_key=secret_token", "run.name=my_token")
    assert yaml.safe_load(written(config, tmp_path)) == config.model_dump(mode="json")


def test_a_reference_to_the_environment_is_kept_and_repeats_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_A_TEST", VALUE)
    config = composed(
        "rollout=server",
        "rollout.environment={HF_TOKEN:'${oc.env:OF_A_TEST}',ALSO:'${rollout.environment.HF_TOKEN}'}",
        "run.output_dir=${oc.env:OF_A_TEST}/run",
    )
    assert str(config.run.output_dir) == f"{VALUE}/run"
    text = written(config, tmp_path)
    assert VALUE not in text
    assert yaml.safe_load(text)["run"]["output_dir"] == "${oc.env:OF_A_TEST}/run"
    assert from_yaml(tmp_path / "config.yaml") == config
    assert configured("--config", str(tmp_path / "config.yaml")) == config
    monkeypatch.delenv("OF_A_TEST")
    with pytest.raises(ConfigError, match="'OF_A_TEST' not found"):
        from_yaml(tmp_path / "config.yaml")


def test_a_served_teachers_key_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the key is written after the resolved teacher's settings have moved to `served`."""
    monkeypatch.setenv("THE_KEY", VALUE)
    teacher = {"name": "big", "type": "served", "urls": [f"http://u:{VALUE}@x"], "model": "m"}
    for key, expected in (("${oc.env:THE_KEY}", "${oc.env:THE_KEY}"), (VALUE, MASK)):
        resolved = VALID | {"teachers": [teacher | {"api_key": VALUE}]}
        secrets.remember(VALID | {"teachers": [teacher | {"api_key": key}]}, resolved)
        config = from_dict(resolved)
        moved = config.model_copy(update={"teachers": (_settled(config.teachers[0]),)})
        for saved_config, section in ((config, ()), (moved, ("served",))):
            text = written(saved_config, tmp_path)
            assert VALUE not in text
            saved = yaml.safe_load(text)["teachers"][0]
            for part in section:
                saved = saved[part]
            assert saved["api_key"] == expected
            assert saved["urls"] == [f"http://{MASK}@x"]
        secrets._references.clear()


def test_an_equal_value_is_not_another_ones_reference() -> None:
    """Bug: a teacher's literal model became another teacher's reference, and changed with it."""
    resolved = {"teachers": [{"model": "folder"}, {"model": "folder"}]}
    secrets.remember({"teachers": [{"model": "${oc.env:OF_A_TEST}"}, {"model": "folder"}]}, resolved)
    teachers = secrets.shown_config(resolved)["teachers"]
    assert teachers == [{"model": "${oc.env:OF_A_TEST}"}, {"model": "folder"}]


def test_a_secret_may_be_outside_all_sections() -> None:
    """Bug: an IndexError in place of the message about an unknown key."""
    secrets.remember({"api_key": VALUE}, {"api_key": VALUE})
    assert without_secrets(f"api_key={VALUE}") == f"api_key={MASK}"


def test_a_secret_under_a_wrong_key_is_masked() -> None:
    """Bug: the message about an unknown key shows the secret."""
    with pytest.raises(ConfigError, match=r"run\.push_to_hub\.token=\*\*\*: there is no such key"):
        composed("+run.push_to_hub={repo:me/model}", f"+run.push_to_hub.token={VALUE}")
    with pytest.raises(ConfigError, match=r"data\.answer_key='solution': there is no such key"):
        composed("+data.answer_key=solution")
    with pytest.raises(ConfigError, match=r"data\.completion_key='answer': there is no such key"):
        validated({"model": "m", "data": {"completion_key": "answer"}}, EvaluationConfig)


def _settled(teacher: Teacher) -> Teacher:
    served = Endpoint(**teacher.model_dump(include=set(Endpoint.model_fields)))
    return SameTokenizerTeacher(name="big", type="same_tokenizer", model="m", served=served)


def test_a_mask_is_no_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a resumed run sends `***` to a server, or starts a server with it."""
    config = composed("rollout=server", f"rollout.environment={{HF_TOKEN:{VALUE}}}")
    written(config, tmp_path)
    again = ("--config", str(tmp_path / "config.yaml"))
    with pytest.raises(ConfigError) as caught:
        configured(*again)
    assert str(caught.value) == (
        "rollout.environment.HF_TOKEN=***: a secret that was masked when the file was written; put it into an "
        "environment variable and write rollout.environment.HF_TOKEN='${oc.env:NAME}', which is kept as it is"
    )
    monkeypatch.setenv("OF_A_TEST", VALUE)
    assert configured(*again, f"rollout.environment.HF_TOKEN={REFERENCE}") == config
    assert from_yaml(tmp_path / "config.yaml").student == config.student, "for tools, which start no server"


@pytest.mark.parametrize("error", [RolloutError, RuntimeError], ids=["known", "any"])
def test_error_lines_have_none(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a secret in a URL, in a server's command line or in its log is printed."""

    def failing(config: RunConfig) -> None:
        failure = error(f"https://me:{VALUE}@example.org died (--hf-token {VALUE}, HF_TOKEN={VALUE})")
        failure.add_note(f"401 for token {VALUE}")
        raise failure

    monkeypatch.setenv("OF_A_TEST", VALUE)
    with command_line(TYPED), pytest.raises(SystemExit):
        main(failing, RunConfig, config_dir=CONFIGS, config_name=ON_POLICY)
    printed = capsys.readouterr().err
    assert VALUE not in printed
    assert f"https://{MASK}@example.org died (--hf-token {REFERENCE}, HF_TOKEN={REFERENCE})" in printed


def test_a_refused_value_has_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OF_A_TEST", VALUE)
    with command_line((*TYPED, "rollout.concurrency=0")), pytest.raises(SystemExit):
        main(lambda _: None, RunConfig, config_dir=CONFIGS, config_name=ON_POLICY)
    with command_line((*TYPED, f"rollout.urls=https://me:{REFERENCE}@example.org")), pytest.raises(SystemExit):
        main(lambda _: None, RunConfig, config_dir=CONFIGS, config_name=ON_POLICY)
    printed = capsys.readouterr().err
    assert "rollout.concurrency=0" in printed
    assert "rollout.urls" in printed
    assert VALUE not in printed


def test_warnings_and_phases_have_none(tmp_path: Path) -> None:
    composed(*STARTED)
    heard: list[str] = []

    class Ear(JsonlLogger):
        def warn(self, message: str) -> None:
            heard.append(message)

        phase = warn

    with Loggers([Ear(tmp_path / "metrics.jsonl")]) as loggers:
        loggers.warn(f"no answer with {VALUE}")
        loggers.phase(f"asking https://{VALUE}@example.org")
    assert heard == [f"no answer with {MASK}", f"asking https://{MASK}@example.org"]


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("http://user:pass@host:1/x", f"http://{MASK}@host:1/x"),
        ("http://host/x?access_token=abc&n=1#top", f"http://host/x?access_token={MASK}&n=1#top"),
        ("see me@example.org, not https://example.org/@me", "see me@example.org, not https://example.org/@me"),
        ("https://h/x?tokenizer=a&keys=2", "https://h/x?tokenizer=a&keys=2"),
        ("http://user:p@ss@host/", f"http://{MASK}@host/"),
        ("postgres://u:pa/ss@host/db", f"postgres://{MASK}@host/db"),
        ("http://host:8080/path@v1", "http://host:8080/path@v1"),
        ('{"url":"http://h/v1","mail":"a@b"}', '{"url":"http://h/v1","mail":"a@b"}'),
        ("(http://localhost:8000):foo@bar", "(http://localhost:8000):foo@bar"),
    ],
)
def test_credentials_in_addresses(text: str, masked: str) -> None:
    assert without_secrets(text) == masked


@pytest.mark.parametrize(
    ("arguments", "masked"),
    [
        (("--apikey=abcdef12",), (f"--apikey={MASK}",)),
        (("env", "HF_TOKEN=hf_abcdef", "vllm"), ("env", f"HF_TOKEN={MASK}", "vllm")),
        (("--hf-token", "k1", "k2", "--port", "1"), ("--hf-token", MASK, MASK, "--port", "1")),
        (("bash", "-c", "vllm serve --hf-token abcdef"), ("bash", "-c", f"vllm serve --hf-token {MASK}")),
        (("--header", "Authorization: Bearer sk-1234"), ("--header", f"Authorization: Bearer {MASK}")),
        (("--header=X-Api-Key: sk-abcdef",), (f"--header=X-Api-Key: {MASK}",)),
        (("sh", "-c", "export HF_TOKEN=hf_ab12; vllm"), ("sh", "-c", f"export HF_TOKEN={MASK}; vllm")),
        (("sh", "-c", 'vllm --hf-token "sk-abcdef"'), ("sh", "-c", f'vllm --hf-token "{MASK}"')),
        (("--kwargs", '{"api_key": "sk-abcdef"}'), ("--kwargs", f'{{"api_key": "{MASK}"}}')),
        (("--description=a basic idea",), ("--description=a basic idea",)),
        (("--tokenizer", "gpt2", "--max-num-batched-tokens=8"), ("--tokenizer", "gpt2", "--max-num-batched-tokens=8")),
    ],
)
def test_arguments_of_a_server(arguments: tuple[str, ...], masked: tuple[str, ...], tmp_path: Path) -> None:
    config = composed("rollout=server", f"rollout.command=[{','.join(map(repr, arguments))}]")
    assert config.rollout.command == arguments
    assert yaml.safe_load(written(config, tmp_path))["rollout"]["command"] == list(masked)
    if arguments == ("--apikey=abcdef12",):
        assert without_secrets("no key abcdef12") == f"no key {MASK}"


def test_a_variable_in_an_option_is_known_by_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the server's message about a wrong key shows it."""
    monkeypatch.setenv("OF_A_TEST", VALUE)
    composed("rollout=server", "rollout.options=['--hf-token=${oc.env:OF_A_TEST}']")
    assert without_secrets(f"bad key {VALUE}") == "bad key ${oc.env:OF_A_TEST}"


def test_a_literal_secret_beside_a_reference_is_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a text with a reference was written unmasked."""
    monkeypatch.setenv("OF_A_TEST", "abcdefgh")
    options = {"--hf-token": f"{VALUE}${{oc.env:OF_A_TEST}}", "--token": f"${{oc.env:NOT_THERE,{VALUE}}}"}
    raw = {"rollout": {"options": [word for pair in options.items() for word in pair]}}
    values = [*options, f"{VALUE}abcdefgh", VALUE]
    secrets.remember(raw, {"rollout": {"options": ["--hf-token", values[2], "--token", values[3]]}})
    masked = secrets.shown_config({"rollout": {"options": ["--hf-token", values[2], "--token", values[3]]}})
    assert masked["rollout"]["options"] == ["--hf-token", "***${oc.env:OF_A_TEST}", "--token", "***"]


def test_references_are_kept_where_validation_changes_the_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_A_TEST", "/data")
    file, folder = "${oc.env:OF_A_TEST}//a.arrow", "${oc.env:OF_A_TEST}//x"
    config = composed(f"data.train.arrow_files='{file}'", f"run.output_dir='{folder}'")
    plain = yaml.safe_load(written(config, tmp_path))
    assert plain["run"]["output_dir"] == folder
    assert plain["data"]["train"]["arrow_files"] == [file]
    assert from_yaml(tmp_path / "config.yaml") == config


def test_a_default_and_a_path_are_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: every message had a reference in the place of the word `student`."""
    monkeypatch.setenv("OF_A_TEST", "/home/somebody/else")
    composed("run.name='${oc.env:NOT_THERE,student}'", "run.output_dir='${oc.env:OF_A_TEST}/run'")
    text = "student.model=/home/somebody/else: there is no such folder"
    assert without_secrets(text) == text


def test_a_mask_in_another_place_is_a_text() -> None:
    assert composed("logging.wandb.project='***'").logging.wandb.project == MASK


def test_a_sweep_writes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: Hydra's record of a sweep has the secret, and folders are named by it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_A_TEST", VALUE)
    folders: list[str] = []

    def note(config: RunConfig) -> None:
        folders.append(str(config.run.output_dir))
        assert config.run.output_dir is not None
        config.run.output_dir.mkdir(parents=True)
        (config.run.output_dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")

    swept = f"++rollout.environment.ALSO={VALUE},{VALUE}2"
    with command_line(("-m", *TYPED, swept)):
        run_with_hydra(note, RunConfig, config_dir=CONFIGS, config_name=ON_POLICY)
    assert len(set(folders)) == 2
    assert VALUE not in " ".join(folders)
    for file in filter(Path.is_file, tmp_path.rglob("*")):
        assert VALUE not in file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "override",
    [
        f"rollout.environment.HF_TOKEN={VALUE}",
        f"rollout.environment={{HF_TOKEN:{VALUE}}}",
        f"rollout.options=['--hf-token',{VALUE}]",
        f"rollout.options=['--hf-token={VALUE}']",
        f"rollout.url='https://me:{VALUE}@example.org/v1'",
        f"rollout.url='https://me:{VALUE}@example.org/${{oc.env:PATH}}'",
        f"++teachers.0.served.api_key='${{oc.env:OF_A_TEST,{VALUE}}}'",
        f"++teachers.0.served.api_key={VALUE}",
        f"rollout.environment.HF_TOKEN='{VALUE}${{oc.env:HOME}}'",
        f"rollout.options=['--hf-token','${{oc.env:PATH}}{VALUE}']",
        f"rollout.options=['--hf-token={VALUE}:${{oc.env:PATH}}']",
        f"++teachers.0.served.api_key={VALUE},{VALUE}2",
    ],
)
def test_a_command_line_has_none(override: str) -> None:
    """Bug: other users see the secret in `ps`, in wandb and in Ray's list of jobs."""
    with (
        command_line(("rollout=server", override)),
        pytest.raises(ConfigError, match=r"a secret on the command line .* write '\$\{oc.env:NAME\}'") as caught,
    ):
        run_with_hydra(lambda _: None, RunConfig, config_dir=CONFIGS, config_name=ON_POLICY)
    assert VALUE not in str(caught.value)


def test_the_first_word_of_a_shells_command_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: all of `hf_abcdefgh vllm serve m` counted as the secret, so that the token itself was not masked."""
    composed("rollout=server", "rollout.command=[sh,'-c','HF_TOKEN=hf_abcdefgh vllm serve m']")
    assert without_secrets("token hf_abcdefgh refused") == f"token {MASK} refused"


def test_short_words_and_paths_of_a_servers_environment_stay_readable() -> None:
    composed("rollout=server", "rollout.environment={LEVEL:WARNING,PYTHONPATH:/home/me/here,HF_TOKEN:abcdef}")
    text = f"/home/me/here/data.jsonl: WARNING {MASK}"
    assert without_secrets("/home/me/here/data.jsonl: WARNING abcdef") == text


def test_an_empty_variable_makes_no_reference_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_A_TEST", "")
    data = {"a": "${oc.env:OF_A_TEST}", "b": "${c}/x", "c": "here"}
    secrets.remember(data, {"a": "", "b": "here/x", "c": "here"})
    assert secrets.shown_config({"b": "here/x"}) == {"b": "here/x"}
