"""Likelihoods and texts for lm-eval equal its Hugging Face backend's, and tasks that cannot be loaded have an error."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from nemo_opd.config.evaluation import Evaluation
from nemo_opd.demo import model_path
from nemo_opd.errors import ConfigError, DataError
from nemo_opd.rollout.engine_interface import BatchLimit, Completion, Generator, Request, Sampling
from nemo_opd.rollout.transformers_engine import Sampler, end_ids
from tests.evaluation.scorer import model_scorer

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from nemo_opd.evaluation.benchmark_tasks import LoadedBenchmark, load_benchmarks  # noqa: E402
from nemo_opd.evaluation.benchmarks import (  # noqa: E402
    LanguageModel,
    TextModel,
    run_benchmark,
)
from nemo_opd.evaluation.estimates import wilson  # noqa: E402

MAX_LENGTH = 48
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
num_fewshot: 1
fewshot_split: test
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
""",
    "sums": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: [" "], max_gen_toks: 8}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}
SHUFFLE = """
import random

def shuffled(rows):
    return rows.select(random.sample(range(len(rows)), len(rows)))
"""
# No text repeats itself: lm-eval's backend scores some of several equal windows at the wrong positions.
ROWS = [
    {"question": f"def {name}(self):\n    return", "choices": [" self.x", f" {name} + 1", "\n\n"], "answer": i % 3}
    | {"text": "".join(f"import {name}\n\nclass {name.title()}{j}:\n    pass\n" for j in range(1 + 4 * i))}
    for i, name in enumerate(("os", "path", "value", "naïve", "数字"))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks")
    rows = path / "rows.json"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {rows}}}}}\ntest_split: test\n"
    for name, task in TASKS.items():
        (path / f"{name}.yaml").write_text(f"task: {name}\n{data}{task}", encoding="utf-8")
    gone = data.replace("rows.json", "gone.json") + TASKS["choices"]
    (path / "gone.yaml").write_text(f"task: gone\n{gone}", encoding="utf-8")
    column = TASKS["choices"].replace("{{question}}", "{{nothing}}")
    (path / "column.yaml").write_text(f"task: column\n{data}{column}", encoding="utf-8")
    (path / "fetched.yaml").write_text(
        f"task: fetched\ndataset_path: nobody/nothing\n{TASKS['sums']}", encoding="utf-8"
    )
    (path / "zero.yaml").write_text(f"task: zero\n{data}{TASKS['sums']}num_fewshot: 0\n", encoding="utf-8")
    (path / "shuffle.py").write_text(SHUFFLE, encoding="utf-8")
    shuffled = TASKS["sums"] + "process_docs: !function shuffle.shuffled\n"
    (path / "shuffled.yaml").write_text(f"task: shuffled\n{data}{shuffled}", encoding="utf-8")
    (path / "programs.yaml").write_text(f"task: programs\nunsafe_code: true\n{data}{TASKS['sums']}", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_path("student"), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ours(model: PreTrainedModel) -> LanguageModel:
    tokenizer = AutoTokenizer.from_pretrained(model_path("student"))
    size = model.config.vocab_size
    ends = end_ids(tokenizer)
    sampler = Sampler(
        model, end_ids=ends, vocab_size=size, limit=BatchLimit(4), device="cpu", tokenizer=lambda: tokenizer
    )
    return LanguageModel(TextModel(tokenizer, MAX_LENGTH, {}), model_scorer(model, "cpu"), sampler)


@pytest.fixture(scope="module")
def theirs(model: PreTrainedModel) -> HFLM:
    tokenizer = AutoTokenizer.from_pretrained(model_path("student"))
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3, max_length=MAX_LENGTH)


def loaded(folder: Path, task: str, **benchmark_settings: Any) -> LoadedBenchmark:
    settings = Evaluation(
        benchmarks=[{"task": task, **benchmark_settings}], task_folder=str(folder), confirm_task_code=True
    )
    (benchmark,) = load_benchmarks(settings, "evaluation.")
    return benchmark


def requests(benchmark: LoadedBenchmark) -> Iterator[Instance]:
    for task in benchmark.tasks["tasks"].values():
        task.build_all_requests(rank=0, world_size=1)
        yield from task.instances


@pytest.mark.parametrize("task", list(TASKS))
def test_each_request_is_answered_as_by_lm_evals_own_backend(
    folder: Path, ours: LanguageModel, theirs: HFLM, task: str
) -> None:
    """Bug: one scored token too many or too few, or another prefix, cut at the limit or vocabulary."""
    instances = list(requests(loaded(folder, task)))
    kind = instances[0].request_type
    answers, expected = (getattr(lm, kind)(instances) for lm in (ours, theirs))

    assert len(answers) == len(expected) >= len(ROWS)
    if kind == "generate_until":
        assert answers == expected
        return
    pairs = [(answer if kind == "loglikelihood" else (answer, True)) for answer in answers]
    expected_pairs = [(answer if kind == "loglikelihood" else (answer, True)) for answer in expected]
    assert [greedy for _, greedy in pairs] == [greedy for _, greedy in expected_pairs]
    torch.testing.assert_close(
        *(torch.tensor([value for value, _ in side]) for side in (pairs, expected_pairs)), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("context", "choice"), [("\n", "\n"), ("a", "b"), (" ", "x"), (" \n", " return y")])
def test_a_choice_that_starts_inside_a_token_has_a_likelihood(ours: LanguageModel, context: str, choice: str) -> None:
    """Bug: a choice whose first token is merged with its context, or has no context, always wins."""
    ((likelihood, _),) = ours.loglikelihood([Instance("loglikelihood", {}, (context, choice), 0)])
    stripped = context.rstrip()
    apart = ours.tok_encode(stripped) or [ours.prefix_token_id], ours.tok_encode(context[len(stripped) :] + choice)
    ((expected, _),) = ours._loglikelihood_tokens([(None, *apart)])

    assert likelihood == expected < -0.1


def test_figures_are_those_of_lm_eval_with_an_interval_over_questions(
    folder: Path, ours: LanguageModel, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bugs: figures of another filter, answers in another order than the questions, a progress bar of lm-eval."""
    benchmark = loaded(folder, "choices")
    result = run_benchmark(benchmark, ours, 0.95, allows_code=False)
    again = run_benchmark(benchmark, ours, 0.95, allows_code=False)
    right = sum(result.values["acc"].values())

    assert "it/s" not in capsys.readouterr().err
    assert result == again
    assert result.num_questions == len(ROWS)
    assert result.estimates["acc"] == wilson(right, len(ROWS), 0.95)
    assert result.metrics.keys() == {f"eval/choices/acc{end}" for end in ("", "_low", "_high")}


def test_a_task_draws_the_same_each_time(folder: Path, ours: LanguageModel) -> None:
    """Bug: a resumed run asks other questions, as the task shuffles them anew."""
    state = random.getstate()
    first, again = (run_benchmark(loaded(folder, "shuffled"), ours, 0.95, allows_code=False) for _ in range(2))

    assert list(first.values["exact_match"]) == list(again.values["exact_match"])
    assert len(first.values["exact_match"]) == len(ROWS)
    assert random.getstate() == state


def test_a_long_answer_leaves_the_question_half_of_the_room(
    folder: Path, ours: LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: only the question's last token is left."""
    silent = Silent()
    model = LanguageModel(TextModel(ours.tokenizer, MAX_LENGTH, {}), lambda rows: [], silent)
    instances = [
        Instance("generate_until", {}, ("1 2 3 4 5 6 7 8 9 " * 20, {"max_new_tokens": 999, "max_gen_toks": None}), 0),
        Instance("generate_until", {}, ("1 2 3", {"max_gen_toks": 999, "temperature": 0.7}), 1),
    ]

    assert model.generate_until(instances) == ["", ""]
    (greedy, long), (sampled, short) = silent.requests
    assert (greedy.temperature, sampled.temperature) == (0.0, 0.7)
    assert (len(long.prompt_ids), long.max_new_tokens) == (MAX_LENGTH // 2, MAX_LENGTH // 2)
    assert short.max_new_tokens == MAX_LENGTH - len(short.prompt_ids) > MAX_LENGTH // 2
    assert "up to 999 tokens" in caplog.text


def test_an_answer_ends_at_a_stop_text(folder: Path, ours: LanguageModel) -> None:
    """Bug: answers are sampled up to the task's limit and cut afterwards."""
    instances = list(requests(loaded(folder, "sums")))
    counted = Counted(ours._generator)
    stopped = LanguageModel(ours._model, ours._scorer, counted).generate_until(instances)
    free = Counted(ours._generator, stops=False)

    assert stopped == LanguageModel(ours._model, ours._scorer, free).generate_until(instances)
    assert free.num_tokens == 8 * len(ROWS)
    assert counted.num_tokens < free.num_tokens / 2


class Counted(Generator):
    """Counts sampled tokens. stops: whether stop texts are passed on."""

    def __init__(self, inner: Generator, *, stops: bool = True) -> None:
        self._inner, self._stops, self.num_tokens = inner, stops, 0

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        passed = requests if self._stops else [replace(request, stop=()) for request in requests]
        completions = self._inner.generate(passed, sampling)
        self.num_tokens += sum(len(completion.ids) for completion in completions)
        return completions


class Silent(Generator):
    """Returns empty completions and records the requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[Sampling, Request]] = []

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        self.requests += [(sampling, request) for request in requests]
        empty = np.zeros(0, np.float32)
        return [Completion(empty.astype(np.int32), empty, empty, "stop", 0) for _ in requests]


def test_a_limit_and_shots_reach_the_task(folder: Path, ours: LanguageModel) -> None:
    benchmark = loaded(folder, "choices", shots=2, limit=3)
    result = run_benchmark(benchmark, ours, 0.95, allows_code=False)

    assert (result.name, result.num_questions) == ("choices_2shot", 3)
    assert benchmark.tasks["tasks"]["choices"].get_config("num_fewshot") == 2


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        (
            "choice",
            ConfigError,
            "evaluation.benchmarks.0.task='choice': lm-eval has no such task; similar names are choices, choices_2",
        ),
        ("gone", DataError, "gone.yaml, or the files and columns that it names"),
        ("column", DataError, "evaluation.benchmarks.0.task=column: it cannot be read (UndefinedError: 'nothing' is "),
        ("fetched", DataError, "').load(['fetched'])"),
        ("programs", ConfigError, "evaluation.confirm_run_unsafe_code=true"),
        ("zero", ConfigError, "evaluation.benchmarks.0.shots=5: zero supports no examples"),
    ],
)
def test_a_task_that_cannot_be_loaded_has_one_message(
    folder: Path, task: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: advice to fetch data if a file of the user is wrong; a traceback of lm-eval."""
    monkeypatch.setattr("nemo_opd.evaluation.benchmark_tasks.task_names", lambda: {"choices_2"})
    with pytest.raises(error) as caught:
        loaded(folder, task, shots=5 if task == "zero" else None)

    assert message in str(caught.value)
