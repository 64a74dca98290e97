"""Distillation in transformers.Trainer: the gradients of our own loop, resuming, evaluation and errors."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from nemo_opd.config.run import RunConfig, from_dict
from nemo_opd.data.row_types import MESSAGES, TEXT
from nemo_opd.distributed.process_group import serve_store
from nemo_opd.errors import ConfigError, DataError, ModelError
from nemo_opd.integrations.distillation import Collator, Distillation, read_settings
from nemo_opd.integrations.hf import DistillationMixin
from nemo_opd.preflight.plan import preflight
from tests import processes
from tests.composition import compose
from tests.tiny import Tiny, save_model, train_tokenizer
from tests.workers.local import as_torchrun_starts, opened, step_metrics, weights

pytestmark = pytest.mark.world

LR = 0.5
SGD = {"type": "class", "name": "torch.optim:SGD", "lr": LR}


class DistillationTrainer(DistillationMixin, Trainer):
    pass


class DistillationSFTTrainer(DistillationMixin, SFTTrainer):
    pass


@pytest.fixture(scope="module")
def config(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Return settings of our loop: three teachers, two with tokenizers of their own, and plain gradient descent."""
    tokenizer = train_tokenizer(r"\p{L}+|\s|[^\s\p{L}]", 310, "<eos>")
    model = save_model(tmp_path_factory.mktemp("teacher") / "other", tokenizer, width=16, seed=4)
    settings = compose(*tiny.overrides("train.gradient_clip=null", "data.packing=false")).model_dump(mode="json")
    settings["teachers"].append({**settings["teachers"][0], "name": "other", "model": str(model), "weight": 0.7})
    settings["student"] |= {"optimizer": SGD, "scheduler": {"type": "constant"}}
    settings["cluster"] |= {"launcher": "local"}
    return from_dict(settings)


@pytest.fixture(scope="module")
def distillation(config: RunConfig) -> Distillation:
    return as_distillation(config)


def as_distillation(config: RunConfig) -> Distillation:
    settings = config.model_dump(mode="json")
    return Distillation(
        {
            "student": {"model": config.student.model},
            **{key: settings[key] for key in ("teachers", "loss", "aggregation")},
            "train": {"max_length": config.train.max_length},
        }
    )


@pytest.fixture(scope="module")
def rows(tiny: Tiny) -> list[dict[str, str]]:
    table: list[dict[str, str]] = pa.ipc.open_stream(pa.memory_map(str(tiny.documents))).read_all().to_pylist()
    return table


def trainer(
    distillation: Distillation,
    rows: Sequence[dict[str, str]],
    folder: Path,
    *,
    optimizer: type[torch.optim.Optimizer] | None = None,
    is_sft: bool = False,
    **arguments: Any,
) -> DistillationTrainer | DistillationSFTTrainer:
    model = AutoModelForCausalLM.from_pretrained(distillation.config.student.model, dtype=torch.float32)
    settings = {"logging_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **arguments}
    settings |= {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "train_sampling_strategy": "sequential"}
    optimizers = (None, None) if optimizer is None else (optimizer(model.parameters(), lr=LR), None)
    if is_sft:
        return DistillationSFTTrainer(
            model,
            SFTConfig(str(folder), bf16=False, dataset_kwargs={"skip_prepare_dataset": True}, **settings),
            distillation=distillation,
            train_dataset=Dataset.from_list(list(rows)),
            processing_class=distillation.tokenizer,
            optimizers=optimizers,
        )
    training_arguments = TrainingArguments(str(folder), **settings)
    return DistillationTrainer(
        model,
        training_arguments,
        distillation=distillation,
        train_dataset=rows,
        eval_dataset=rows[:5],
        optimizers=optimizers,
    )


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    assert trainer.model is not None
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def test_gradients_are_those_of_our_loop(
    config: RunConfig, distillation: Distillation, rows: list[dict[str, str]], tmp_path: Path
) -> None:
    """Bugs: a microbatch is divided by its own units, or twice; a teacher's weight, mask or shift is lost.

    With plain gradient descent, weights change by the gradients: sums of about a hundred fp32 numbers.
    """
    ours = trainer(
        distillation,
        rows,
        tmp_path,
        optimizer=torch.optim.SGD,
        max_steps=2,
        max_grad_norm=0,
        save_strategy="no",
        lr_scheduler_type="constant",
    )
    initial = weights_of(ours)
    ours.train()
    after, logs = weights_of(ours), [log for log in ours.state.log_history if "loss" in log]
    batches = [distillation.collator(rows[start : start + 4])["batch"] for start in (0, 4)]
    with opened(preflight(config)) as models:
        curve = [step_metrics(models, batch) for batch in batches]
        theirs = weights(models)

    for name, weight in after.items():
        torch.testing.assert_close(weight - initial[name], theirs[name] - initial[name], rtol=1e-4, atol=1e-6, msg=name)
        assert not torch.equal(weight, initial[name])
    for log, metrics in zip(logs, curve, strict=True):
        for name in ("ce", "kd/cross", "kd/same", "kd/other"):
            assert log[name] == pytest.approx(metrics[name].value(), rel=1e-5), name
        total = config.loss.ce_weight * log["ce"] + config.loss.kd_weight * log["kd"]
        assert log["loss"] == pytest.approx(total, rel=1e-5)


def test_trls_trainer_learns_the_same(distillation: Distillation, rows: list[dict[str, str]], tmp_path: Path) -> None:
    """Bug: SFTTrainer tokenizes or truncates the texts itself, or computes its own loss."""
    arguments = {"max_steps": 2, "max_grad_norm": 0, "save_strategy": "no", "lr_scheduler_type": "constant"}
    plain, sft = (
        trainer(distillation, rows, tmp_path, optimizer=torch.optim.SGD, is_sft=is_sft, **arguments)
        for is_sft in (False, True)
    )
    for run in (plain, sft):
        run.train()
    for name, weight in weights_of(sft).items():
        torch.testing.assert_close(weight, weights_of(plain)[name], rtol=0, atol=0, msg=name)
    assert sft.state.log_history[0]["kd/cross"] == plain.state.log_history[0]["kd/cross"]


def test_a_continued_run_ends_with_the_same_bits(
    distillation: Distillation, rows: list[dict[str, str]], tmp_path: Path
) -> None:
    """Bug: Trainer's checkpoint lacks state that a step depends on."""
    uninterrupted = trainer(distillation, rows, tmp_path, max_steps=4, save_steps=2, save_strategy="steps")
    uninterrupted.train()
    continued = trainer(distillation, rows, tmp_path, max_steps=4, save_strategy="no")
    continued.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))

    assert all(torch.equal(weight, weights_of(continued)[name]) for name, weight in weights_of(uninterrupted).items())


def test_an_evaluation_is_of_all_texts_however_they_are_cut(
    distillation: Distillation, rows: list[dict[str, str]], tmp_path: Path
) -> None:
    """Bugs: the mean of the batches' means; metrics of training or bins of the calibration error in the result."""
    measures = ("loss", "ce", "kd", "bits_per_byte", "accuracy", "calibration_error")
    results = []
    for size in (2, 5):
        evaluated = trainer(distillation, rows, tmp_path, per_device_eval_batch_size=size).evaluate()
        assert not any("calibration_gap" in name for name in evaluated)
        results.append({name: evaluated[f"eval_{name}"] for name in measures})

    assert results[0] == pytest.approx(results[1], rel=1e-5)
    assert results[0]["bits_per_byte"] > 1


def test_an_evaluation_counts_each_text_once_on_two_processes(
    distillation: Distillation, rows: list[dict[str, str]], tmp_path: Path
) -> None:
    """Bug: texts that are repeated to fill the processes' last batches count twice.

    An evaluation of one text leaves the second process without any.
    """
    store = serve_store("127.0.0.1", 60)
    processes.start(_evaluate_on_rank, (store.port, distillation.config, rows, tmp_path), 2)
    results = json.loads((tmp_path / "found.json").read_text())

    assert results == [pytest.approx(expected, rel=1e-5) for expected in evaluated(distillation, rows, tmp_path)]


def _evaluate_on_rank(rank: int, port: int, config: RunConfig, rows: list[dict[str, str]], folder: Path) -> None:
    as_torchrun_starts(rank, 2, port)
    results = evaluated(as_distillation(config), rows, folder)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def evaluated(distillation: Distillation, rows: list[dict[str, str]], folder: Path) -> list[dict[str, float]]:
    """Return the measures of one, five and seven texts."""
    measures = ("loss", "ce", "kd/cross", "bits_per_byte", "accuracy")
    evaluating = trainer(distillation, rows, folder, per_device_eval_batch_size=2)
    results = [evaluating.evaluate(rows[:number]) for number in (1, 5, 7)]
    return [{name: result[f"eval_{name}"] for name in measures} for result in results]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": {"max_steps": 5}}, "train.max_steps: the trainer's own arguments"),
        ({"cluster": {}}, "cluster: the trainer's own arguments"),
        ({"loss": {"type": "p_kl", "scaling": "dynamic"}}, "loss.scaling=dynamic: its averages would not be in"),
        ({"teachers": [{"weights": "student"}]}, "teachers.0.weights=student: the trainer owns the student's weights"),
        ({"teachers": [{"offload": "layers"}]}, "teachers.0.offload=layers: teachers are transformers' own models"),
        ({"teachers": [{"projection_lr": 0.1}]}, "teachers.0.projection_lr=0.1: the trainer's optimizer has"),
        ({"teachers": [{"parallelism": {"tp": 2}}]}, "teachers.0.parallelism: each process has unsharded teachers"),
        ({"los": {}}, "los: there is no such key; did you mean loss?"),
        ({"train": {"max_len": 5}}, "train.max_len=5: there is no such key; did you mean train.max_length?"),
    ],
)
def test_what_needs_our_own_loop_is_refused(tiny: Tiny, settings: dict[str, Any], message: str) -> None:
    """Bugs: a setting is accepted and ignored; the message for a misspelled key says that the trainer decides it."""
    teacher = {"name": "cross", "type": "cross_tokenizer", "model": str(tiny.teacher_cross)}
    if (teachers := settings.get("teachers")) and teachers[0].get("weights"):
        teacher = {"name": "same", "type": "same_tokenizer", "loss": {"type": "same_vocab"}}
    base = {"student": {"model": str(tiny.student)}, "train": {"max_length": 48}, "teachers": [teacher]}
    merged = {**base, **settings, "teachers": [{**teacher, **changes} for changes in settings.get("teachers", [{}])]}
    with pytest.raises(ConfigError) as error:
        read_settings({**merged, "train": {**base["train"], **settings.get("train", {})}})  # type: ignore[dict-item]

    assert message in str(error.value)


@pytest.mark.parametrize("section", ["train", "data", "student"])
def test_a_section_that_is_not_a_mapping_is_refused(section: str) -> None:
    """Bug: a TypeError."""
    with pytest.raises(ConfigError, match=f"{section}=3: "):
        read_settings({"student": {"model": "a"}, section: 3})


def test_a_row_without_text_is_refused(distillation: Distillation) -> None:
    """Bug: an assertion without a message."""
    with pytest.raises(DataError, match=r"a row's text is None \(NoneType\); correct it, or leave the row out"):
        distillation.collator([{"text": "a"}, {"text": None}])


@pytest.mark.parametrize(
    ("key", "row", "passage"),
    [
        ("text", {"text": "ab\ud83d"}, "at the end of 'ab"),
        ("messages", {"messages": [{"role": "user", "content": "ab\ud83d"}]}, "ab"),
        ("messages", {"messages": '[{"role": "user", "content": "ab\\ud83d"}]'}, "ab"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused(
    distillation: Distillation, key: str, row: dict[str, Any], passage: str
) -> None:
    """Bug: the tokenizer's TypeError, without the row and the character."""
    columns = {"text": TEXT} if key == "text" else {"messages": MESSAGES}
    collator = Collator(distillation.collator.make_sample, columns)
    with pytest.raises(DataError, match=f"half of a surrogate pair.*{passage}"):
        collator([row])


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_rows_are_grouped_by_a_column_of_lengths(
    distillation: Distillation, rows: list[dict[str, str]], tmp_path: Path, strategy: str
) -> None:
    """Bugs: the error asks for `input_ids`, which the collator makes; the column is removed before it is read."""
    ours = trainer(distillation, rows, tmp_path, max_steps=1, save_strategy="no", is_sft=True)
    ours.args.train_sampling_strategy = strategy
    with pytest.raises(ConfigError, match=f"train_sampling_strategy={strategy}.* add a column length"):
        ours.train()
    ours.train_dataset = Dataset.from_list([{**row, "length": len(row["text"])} for row in rows])
    ours.train()
    assert ours.state.global_step == 1


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_rows_of_a_list_are_grouped_by_their_length(
    distillation: Distillation, rows: list[dict[str, str]], tmp_path: Path, strategy: str
) -> None:
    """Bug: the error asks for a column that all rows of the list have."""
    measured = [{**row, "length": len(row["text"])} for row in rows]
    ours = trainer(distillation, measured, tmp_path, max_steps=1, save_strategy="no")
    ours.args.train_sampling_strategy = strategy
    ours.train()
    assert ours.state.global_step == 1
    ours.train_dataset = [*measured[1:], rows[0]]
    with pytest.raises(ConfigError, match=r"add a column length \(length_column_name\) to all rows"):
        ours.train()


def test_a_step_without_tokens_to_learn_warns(distillation: Distillation, tmp_path: Path) -> None:
    """Bug: empty texts have a loss of 0, without a warning."""
    ours = trainer(distillation, [{"text": ""}] * 4, tmp_path, max_steps=1, save_strategy="no")
    with pytest.warns(UserWarning, match="no text of this step has a token to learn"):
        ours.train()


def test_arguments_that_the_distillation_replaces_and_bad_rows_are_refused(
    distillation: Distillation, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="compute_metrics: the distillation provides batches, loss and metrics"):
        DistillationTrainer(distillation=distillation, compute_metrics=print)
    with pytest.raises(ConfigError, match=r"label_smoothing_factor=0\.1: losses have no smoothing"):
        trainer(distillation, [], tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(DataError, match="a row has no column 'text', but 'input_ids'; name it"):
        distillation.collator([{"input_ids": [1, 2]}])
    with pytest.raises(DataError, match="a batch needs at least one row"):
        distillation.collator([])
    with pytest.raises(ModelError, match=r"the student's logits have 3 columns, but the tokenizer of student\.model="):
        distillation.loss(torch.zeros(1, 2, 3), distillation.collator([{"text": "a"}])["batch"])


def test_a_string_is_a_model(tiny: Tiny) -> None:
    """Bug: a teacher without a type has no projection."""
    distillation = Distillation(
        {
            "student": str(tiny.student),
            "teachers": [str(tiny.teacher_same), str(tiny.teacher_cross)],
            "loss": "gold",
            "train": {"max_length": 96},
        }
    )
    assert [teacher.type for teacher in distillation.config.teachers] == ["same_tokenizer", "cross_tokenizer"]


def test_calls_that_a_template_leaves_out_are_refused_before_training(tiny: Tiny, tmp_path: Path) -> None:
    """Bug: the student learns to end its turn in place of a call. In our own loop preflight checks this."""
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}")
    distillation = Distillation(
        {
            "student": {"model": str(tiny.student), "chat_template": str(template)},
            "teachers": [{"name": "t", "type": "same_tokenizer", "model": str(tiny.teacher_same)}],
            "loss": {"type": "same_vocab"},
            "data": {"messages_key": "messages"},
            "train": {"max_length": 96},
        }
    )
    question = {"role": "user", "content": "fox?"}
    call = {"type": "function", "function": {"name": "jump", "arguments": "{}"}}
    rows = [{"messages": [question, {"role": "assistant", "content": None, "tool_calls": [call]}]}]
    with pytest.raises(DataError, match=r"train_dataset: the student's chat template leaves out tool calls in 1 of 1 "):
        trainer(distillation, rows, tmp_path / "run")  # type: ignore[arg-type]
