"""Catches stand-alone evaluations with files, figures or settings that contradict the command line."""

import json
import re
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from nemo_opd.cli.settings_verbs import evaluation_recipe, evaluation_settings
from nemo_opd.config.composition import run_with_hydra, to_yaml
from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.config.run import validated
from nemo_opd.errors import ConfigError, DataError
from nemo_opd.logging.scores import SampleLog
from nemo_opd.training.standalone import evaluate
from tests.composition import CONFIGS, command_line
from tests.exit_status import exit_status


def compose(*arguments: str, config_name: str = "evaluation") -> EvaluationConfig:
    configs: list[EvaluationConfig] = []
    with command_line(arguments):
        run_with_hydra(
            configs.append, EvaluationConfig, config_dir=CONFIGS, config_name=config_name, prepare=evaluation_settings
        )
    return configs[0]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    rows = [{"text": f"{i} + {i} = ", "answer": 2 * i} for i in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"text": "1 + " * 200, "answer": 0}]))
    return file


def small_evaluation(questions: Path) -> tuple[str, ...]:
    return ("model=demo:student", f"data.jsonl_files={questions}", "data.messages_key=null", "reward=numeric")


@pytest.mark.parametrize(
    ("columns", "named", "read"),
    [
        (["question", "answer"], [], ("text", None, ("question",))),
        (["question", "answer"], ["data.text_key=question"], ("question", None, ())),
        (["prompt", "response"], [], ("text", None, ("prompt",))),
        (["text", "answer"], [], ("text", None, ())),
        (["messages", "text"], [], ("text", "messages", ())),
        (["messages", "text"], ["data.text_key=text", "data.messages_key=messages"], ("text", "messages", ())),
        (["body"], [], ("text", "messages", ())),
    ],
)
def test_the_columns_of_questions_are_found_out(
    tmp_path: Path, columns: list[str], named: list[str], read: tuple[object, ...]
) -> None:
    """Bug: `data=FILE reward=numeric`, as the command prints it, requires `messages` whatever the file has."""
    (tmp_path / "q.jsonl").write_text(json.dumps(dict.fromkeys(columns, "1")))
    data = compose("model=demo:student", f"data={tmp_path}/q.jsonl", "reward=numeric", *named).data
    assert (data.text_key, data.messages_key, data.prompt_key) == read


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (["question", "answer"], "model=demo:student has no chat template, which conversations need; write chat_"),
        (["question", "answer"], "chat_template=plain, a file, or data.text_key=question to continue texts"),
        (["body", "answer"], "its columns: body, answer; for texts, set data.text_key"),
        (["prompt", "answer"], "2 ways; write data.text_key=prompt, or data.prompt_key=[prompt]"),
    ],
)
def test_questions_that_cannot_be_read_are_told_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], columns: list[str], says: str
) -> None:
    """Bug: the remedy is `data.completion_key=answer`, which evaluations do not have."""
    (tmp_path / "q.jsonl").write_text(json.dumps(dict.fromkeys(columns, "1")))
    assert exit_status("evaluate", "model=demo:student", f"data={tmp_path}/q.jsonl", "reward=numeric") == 1
    assert says in capsys.readouterr().err


def test_an_evaluation_writes_its_results(questions: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    config = compose(
        *small_evaluation(questions),
        "n=2",
        "k=[1,2]",
        "max_new_tokens=4",
        "max_prompt_length=40",
        f"output_dir={folder}",
    )
    console = Console(record=True, width=100)
    result = evaluate(config, console)[""]
    results = json.loads((folder / "results.json").read_text())
    answers = SampleLog(folder / "samples.jsonl").read()

    assert (results["num_questions"], results["num_dropped"]) == (3, 1)
    assert list(results["estimates"]) == ["pass@1", "pass@2", "maj@2", "mean@2", "greedy"]
    assert [(answer.question, answer.kind, answer.sample) for answer in answers] == [
        (i, *place) for i in range(3) for place in (("greedy", 0), ("sampled", 0), ("sampled", 1))
    ]
    assert all(answer.num_tokens <= 4 for answer in answers)
    assert "pass@2" in console.export_text()

    again = validated(yaml.safe_load((folder / "config.yaml").read_text()), EvaluationConfig)
    assert again == config
    assert evaluate(again.model_copy(update={"output_dir": tmp_path / "again"}), console)[""].metrics == result.metrics
    assert (tmp_path / "again" / "samples.jsonl").read_text() == (folder / "samples.jsonl").read_text()


def test_programs_get_the_results_alone_on_stdout(
    questions: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Bug: stdout has the table, or lacks the folder."""
    folder = tmp_path / "out"
    options = ("n=1", "k=[1]", "max_new_tokens=2", "max_prompt_length=40", f"output_dir={folder}")
    assert (
        exit_status("evaluate", *small_evaluation(questions), *options, "cluster.launcher=local", "--json", "--quiet")
        == 0
    )
    output = capfd.readouterr()
    assert json.loads(output.out) == {"output_dir": str(folder)} | json.loads((folder / "results.json").read_text())
    assert "pass@1" not in output.err


def test_questions_that_are_all_too_long_are_an_error(questions: Path, tmp_path: Path) -> None:
    config = compose(*small_evaluation(questions), "max_prompt_length=1", f"output_dir={tmp_path / 'out'}")

    with pytest.raises(DataError, match=r"^data: none of 4 prompts has 1 tokens or less; .* max_prompt_length=1; "):
        evaluate(config)
    assert not (tmp_path / "out").exists()


def test_a_run_is_not_overwritten(questions: Path, tmp_path: Path) -> None:
    """Bug: the evaluation overwrote the run's config.yaml, so that the run's report had no results."""
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=f"output_dir={tmp_path} holds a run.*such as {tmp_path}/evaluation"):
        evaluate(compose("model=demo:student", f"data={questions}", "reward=numeric", f"output_dir={tmp_path}"))


def test_an_answer_that_the_reward_cannot_read_is_named(questions: Path, tmp_path: Path) -> None:
    with questions.open("a") as file:
        file.write('{"text": "Q", "answer": null}\n')

    with pytest.raises(DataError, match=r"row 4 .*column 'answer': there is no answer"):
        evaluate(compose(*small_evaluation(questions), f"output_dir={tmp_path / 'out'}"))


def test_the_demo_needs_no_arguments() -> None:
    config = compose(config_name="evaluation_demo")

    assert config.model == "demo:arithmetic_student"
    assert config.data.arrow_files == ("demo:arithmetic_validation",)
    assert to_yaml(validated(yaml.safe_load(to_yaml(config)), EvaluationConfig)) == to_yaml(config)


@pytest.mark.parametrize("option", [f"reward={file.stem}" for file in (CONFIGS / "reward").glob("*.yaml")])
def test_every_reward_composes(option: str) -> None:
    needed = {
        "reward=environment": ["environment=calculator"],
        "reward=function": ["reward.function=package.module:name"],
    }

    reward = compose("model=m", "data.jsonl_files=a", option, *needed.get(option, [])).reward
    assert reward.type == option.removeprefix("reward=")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("reward=numeric",), "model: required, but not given"),
        (("model=m", "data.jsonl_files=a", "reward=numerical"), r"reward=numerical: there is no such option; [^\n]*$"),
        (("model=m", "data.jsonl_files=a"), "reward: answers are scored by the reward; set reward"),
        (("model=m", "reward=numeric", "n=2", "k=[1,4]"), r"k=\[1, 4\]: 4 of n=2 answers"),
        (("model=m", "reward=numeric", "rollout.n=4"), "rollout.n is for training.*write n="),
        (("model=m", "reward=numeric", "temprature=1"), "did you mean temperature?"),
        (("model=m", "reward=environment"), "there is no environment"),
        (("model=m", "reward=math", "environment=calculator", "data.messages_key=null"), "data.messages_key"),
        (("model=m", "reward=math", "output_dir="), "output_dir"),
    ],
)
def test_settings_that_cannot_work_are_told(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(*arguments)


@pytest.mark.parametrize("column", ["text_key=prompt", "prompt_key=[prompt]"])
def test_a_named_column_replaces_the_recipes(column: str, tmp_path: Path) -> None:
    """Bug: the remedy for a missing column is refused beside the recipe's column."""
    file = tmp_path / "questions.jsonl"
    file.write_text('{"prompt": "1 + 1 =", "answer": 2}\n')
    questions = ("model=demo:student", f"data.jsonl_files={file}", "reward=numeric")
    with pytest.raises(DataError, match=f"write .*data.{re.escape(column)}"):
        evaluate(compose(*questions))
    assert compose(*questions, f"data.{column}").data.messages_key is None


def test_an_evaluation_without_questions_is_told() -> None:
    with pytest.raises(ConfigError, match="name nothing to ask; set one of them"):
        evaluate(compose("model=demo:student", "reward=numeric"))


def test_files_of_the_user_take_the_place_of_the_demos() -> None:
    assert evaluation_recipe(["model=m", "data.jsonl_files=a"]) == "evaluation"
    assert evaluation_recipe(["++data.hub.path=a"]) == "evaluation"
    assert evaluation_recipe(["model=m", "data=a.jsonl"]) == "evaluation"
    assert evaluation_recipe(["model=m", "data.max_samples=3"]) == "evaluation_demo"
    assert evaluation_recipe(["model=m", "sets.sums.n=3"]) == "evaluation"
    assert evaluation_recipe(["model=m", "benchmarks=[gsm8k]"]) == "evaluation"


def test_sets_and_benchmarks_have_their_own_figures(questions: Path, tmp_path: Path) -> None:
    """Bugs: figures under the wrong set; likelihoods of a different model than the answers."""
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    source = f"data:{{jsonl_files:{questions},text_key:text,max_samples:3}}"
    sets = f"sets={{sums:{{{source},n:1}},boxes:{{{source},reward:{{type:format,extract:{{type:boxed}}}}}}}}"
    more = ("benchmarks=[{task:next_line,limit:8}]", "task_folder=demo:tasks", f"output_dir={tmp_path / 'out'}")
    config = compose("model=demo:student", "reward=numeric", "n=2", "max_new_tokens=4", sets, *more)
    console = Console(record=True, width=100)
    set_results = evaluate(config, console)
    results = json.loads((tmp_path / "out" / "results.json").read_text())

    assert {name: values["n"] for name, values in results["sets"].items()} == {"sums": 1, "boxes": 2}
    assert "maj@2" not in set_results["boxes"].estimates
    assert results["benchmarks"]["next_line"]["num_questions"] == 8
    assert 0 <= results["benchmarks"]["next_line"]["estimates"]["acc"]["value"] <= 1
    assert {answer.set for answer in SampleLog(tmp_path / "out" / "samples.jsonl").read()} == {"sums", "boxes"}
    assert "next_line: 8 questions" in console.export_text()
