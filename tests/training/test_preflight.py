"""Preflight's choices of directory, device, ranks, steps and memory, its warnings, and the output of a dry run."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from nemo_opd.checkpoint import run_directory
from nemo_opd.checkpoint.manager import CheckpointManager, Progress
from nemo_opd.checkpoint.run_directory import default_output_dir, identity
from nemo_opd.config import RunConfig
from nemo_opd.config.cluster import Cluster
from nemo_opd.config.loss import PKLTerm
from nemo_opd.config.rollout import ServerRollout
from nemo_opd.config.teacher import SameTokenizerTeacher
from nemo_opd.data.source_files import resolve_files
from nemo_opd.errors import ConfigError, DataError, ModelError
from nemo_opd.preflight import ranks as module
from nemo_opd.preflight.corpus import Corpus
from nemo_opd.preflight.memory import Phase
from nemo_opd.preflight.model_info import read_model_info
from nemo_opd.preflight.plan import preflight
from nemo_opd.preflight.ranks import reserved_gpus, resolve_device, resolve_ranks
from nemo_opd.preflight.summary import run_summary
from nemo_opd.preflight.teachers import require_same_tokenizer
from nemo_opd.preflight.warnings import check_positions, require_room_to_sample, warn_of_student_as_teacher
from nemo_opd.rollout.server.server_process import server_gpus
from nemo_opd.rotary import RotaryLimit
from nemo_opd.training.off_policy import distil
from tests.composition import compose, nothing_is_created
from tests.tiny import Tiny, save_model, train_tokenizer

Configure = Callable[..., RunConfig]
NUM_DOCUMENTS = 24


@pytest.fixture
def configure(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """A function from overrides to the configuration of a run with the tiny models, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    return lambda *overrides: compose(*tiny.overrides(*overrides))


def test_flops_count_the_heads_rows_that_are_computed(configure: Configure) -> None:
    """Bug: FLOPs of the head's padding rows count although their logits are not computed, so the MFU is too high."""
    plan = preflight(configure())
    teachers = zip(plan.utilization.teachers, plan.teachers, strict=True)

    assert plan.utilization.student.vocab_size == plan.student_vocab_size
    assert all(size is not None and size.vocab_size == teacher.vocab_size for size, teacher in teachers)


# The run's directory


class Noon(datetime):
    @classmethod
    def now(cls, tz: object = None) -> "Noon":
        return cls(2031, 2, 3, 12, 0, 5)


def test_the_default_directory_is_named_after_run_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_directory, "datetime", Noon)

    assert default_output_dir("mine") == Path("outputs/mine/2031-02-03_12-00-05")


def test_runs_of_the_same_second_do_not_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: jobs of a --multirun write to the same directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_directory, "datetime", Noon)
    names = []
    for _ in range(3):
        folder = default_output_dir("mine")
        folder.mkdir(parents=True)
        names.append(folder.name)

    assert names == ["2031-02-03_12-00-05", "2031-02-03_12-00-05_1", "2031-02-03_12-00-05_2"]


def test_a_given_directory_is_used_as_it_is(configure: Configure, tmp_path: Path) -> None:
    """Bug: a directory with other files is refused, or run.resume=auto needs a directory with a run."""
    (tmp_path / "notes").write_text("mine")

    assert preflight(configure(f"run.output_dir={tmp_path}")).output_dir == tmp_path
    fresh = tmp_path / "a" / "b"
    assert preflight(configure(f"run.output_dir={fresh}", "run.resume=auto")).output_dir == fresh
    assert not fresh.parent.exists()


def test_a_run_is_not_continued_beyond_its_end(configure: Configure, tmp_path: Path) -> None:
    """Bug: nothing is trained or exported, and the message says to continue the run with the same settings."""
    config = configure(f"run.output_dir={tmp_path}", "run.resume=auto", "train.max_steps=3")
    checkpoints = CheckpointManager(tmp_path / "checkpoints", keep_last=2)
    with checkpoints.writing(Progress(step=3, loader={}, settings=identity(config))):
        pass
    assert preflight(config).progress is not None, "its model and report are made again"
    with checkpoints.writing(Progress(step=4, loader={}, settings=identity(config))):
        pass
    with pytest.raises(ConfigError, match=r"is at step 4 and this run ends at 3; raise train\.max_steps"):
        preflight(config)


# Devices and ranks


@pytest.mark.parametrize(("gpu", "device"), [(True, "cuda"), (False, "cpu")])
def test_auto_follows_the_machine(gpu: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)

    assert resolve_device(Cluster()) == device
    assert resolve_device(Cluster(device="cpu")) == "cpu"


def test_a_remote_cluster_may_have_more_gpus_than_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    remote = Cluster(device="cuda", num_nodes=16, gpus_per_node=8, address="auto")

    assert resolve_device(remote) == "cuda"
    assert resolve_ranks(remote, "cuda") == 128
    with pytest.raises(ConfigError, match=r"^cluster\.gpus_per_node: this machine has no GPU to count; set it to"):
        resolve_ranks(remote.model_copy(update={"gpus_per_node": None}), "cuda")


def test_all_gpus_of_a_machine_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    assert resolve_ranks(Cluster(), "cuda") == 4
    assert resolve_ranks(Cluster(gpus_per_node=2), "cuda") == 2
    assert resolve_ranks(Cluster(gpus_per_node=2), "cpu") == 1


# Steps


@pytest.mark.parametrize(
    ("batch", "micro", "epochs", "steps_per_epoch"),
    [(4, 2, 3, 6), (5, 1, 2, 5), (48, 2, 3, 1)],
)
def test_epochs_become_steps(configure: Configure, batch: int, micro: int, epochs: int, steps_per_epoch: int) -> None:
    """The last batch of an epoch may be short, and counts as a step."""
    plan = preflight(
        configure(
            "train.max_steps=null",
            f"train.epochs={epochs}",
            f"train.global_batch_size={batch}",
            f"train.micro_batch_size={micro}",
            "data.packing=false",
        )
    )

    assert len(plan.data.train) == NUM_DOCUMENTS
    assert plan.steps_per_epoch == steps_per_epoch
    assert plan.total_steps == epochs * steps_per_epoch


def test_epochs_of_packed_documents_are_counted(configure: Configure) -> None:
    """Bug: every epoch counts as many rows as the first, although their order and so their packing differ."""
    plan = preflight(
        configure(
            "train.max_steps=null",
            "train.epochs=3",
            "train.global_batch_size=2",
            "train.max_length=20",
        )
    )

    assert isinstance(plan.data, Corpus)
    with plan.data.loader(plan.config) as loader:
        epochs = []
        for _ in range(plan.total_steps + 1):
            loader.next()
            epochs.append(loader.epoch)
    assert epochs[-2:] == [2, 3], "the last step ends the third epoch"
    assert epochs.count(0) == plan.steps_per_epoch


def test_steps_of_packed_documents_are_estimated_without_reading_all(configure: Configure) -> None:
    plan = preflight(configure("train.max_steps=7", "train.global_batch_size=2", "train.max_length=20"))

    assert plan.total_steps == 7
    assert isinstance(plan.data, Corpus)
    counted = plan.data.steps(plan.config)[0]
    assert abs(plan.steps_per_epoch - counted) <= 0.15 * counted


def test_validation_is_limited_or_absent(configure: Configure) -> None:
    limited = preflight(configure("data.validation.max_samples=5")).data.validation
    assert limited is not None
    assert len(limited) == 5
    assert preflight(configure("data.validation.arrow_files=null")).data.validation is None


# Teachers


def test_inactive_teachers_are_not_read(configure: Configure) -> None:
    """Bug: kd_weight=0, which trains on text alone, needs the teachers' files."""
    plan = preflight(configure("loss.kd_weight=0", "teachers.0.model=/nowhere", "teachers.1.model=/nowhere"))

    assert plan.teachers == ()
    assert {part.owner for memory in plan.memory.memories for part in memory.parts} == {"student"}


def test_a_projection_from_a_file_is_the_one_that_auto_builds(configure: Configure, tmp_path: Path) -> None:
    built = preflight(configure()).teachers[0].projection
    assert built is not None
    built.save(tmp_path / "pair.safetensors")
    read = preflight(configure(f"teachers.0.projection={tmp_path / 'pair.safetensors'}")).teachers[0].projection

    assert read is not None
    assert (read.indices == built.indices).all()
    assert (read.weights == built.weights).all()


def tokenizers(tiny: Tiny) -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
    return AutoTokenizer.from_pretrained(tiny.student), AutoTokenizer.from_pretrained(tiny.teacher_same)


SAME = SameTokenizerTeacher(name="same", type="same_tokenizer", model="/same")


def test_equal_maps_are_the_same_tokenizer(tiny: Tiny) -> None:
    """Bug: a tokenizer with further tokens at its end is refused."""
    student, teacher = tokenizers(tiny)
    require_same_tokenizer(1, SAME, student, teacher)
    teacher.add_tokens(["<more>"])
    require_same_tokenizer(1, SAME, student, teacher)
    require_same_tokenizer(1, SAME, teacher, student)


def test_one_token_that_differs_is_another_tokenizer(tiny: Tiny) -> None:
    """Bug: tokenizers of equal size count as equal."""
    student, teacher = tokenizers(tiny)
    student.add_tokens(["<ours>"])
    teacher.add_tokens(["<theirs>"])
    index = len(student) - 1

    with pytest.raises(
        ModelError, match=rf"in 1 of \d+ tokens \({index} is '<ours>' and '<theirs>'\); write type: cross_tok"
    ):
        require_same_tokenizer(1, SAME, student, teacher)


def test_a_token_with_two_ids_is_another_tokenizer(tiny: Tiny) -> None:
    student, teacher = tokenizers(tiny)
    size = len(student)
    student.add_tokens(["<a>", "<b>"])
    teacher.add_tokens(["<b>", "<a>"])

    with pytest.raises(ModelError, match=rf"in 2 of \d+ tokens \('<a>' is {size} and {size + 1}; "):
        require_same_tokenizer(1, SAME, student, teacher)


# Memory


def stored_parameters(folder: Path) -> int:
    """Return the number of parameters in the model's file, which has tied weights once."""
    total = 0
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            size = 1
            for length in file.get_slice(name).get_shape():
                size *= length
            total += size
    return total


@pytest.mark.parametrize("handoff", ["hidden_states", "logits"])
def test_the_memory_estimate(configure: Configure, tiny: Tiny, handoff: str) -> None:
    """Compares with the files: fp32 weights, gradients and two moments; teachers and their output in their dtype."""
    plan = preflight(configure("teachers.0.max_length=40", "teachers.1.dtype=bfloat16", f"handoff={handoff}"))
    student, cross, same = map(stored_parameters, (tiny.student, tiny.teacher_cross, tiny.teacher_same))
    vocabulary, wide = (len(AutoTokenizer.from_pretrained(folder)) for folder in (tiny.student, tiny.teacher_cross))
    d_cross, d_same = (
        AutoConfig.from_pretrained(folder).hidden_size for folder in (tiny.teacher_cross, tiny.teacher_same)
    )
    handed_over = {
        "logits": {"cross: logits handed over": 4 * 40 * wide * 4, "same: logits handed over": 4 * 48 * vocabulary * 2},
        "hidden_states": {
            "cross: hidden states handed over": 4 * 40 * d_cross * 4,
            "cross: head handed over": wide * d_cross * 4,
            "same: hidden states handed over": 4 * 48 * d_same * 2,
            "same: head handed over": vocabulary * d_same * 2,
        },
    }
    exact = {
        "student: parameters": 4 * student,
        "student: optimizer": 8 * student,
        "student: gradients": 4 * student,
        "cross: parameters": 4 * cross,
        "same: parameters": 2 * same,
        **handed_over[handoff],
    }
    (memory,) = plan.memory.memories
    parts = {str(part): part.at(Phase.BACKWARD) for part in memory.parts}
    assert {name: parts[name] for name in exact} == exact
    assert memory.peak == sum(part.at(memory.peak_phase) for part in memory.parts)


def test_more_ranks_hold_less(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: parameters, optimizer or a batch's rows that are not divided over ranks; a microbatch or a head that is."""
    monkeypatch.setattr(module, "num_cores", lambda: 2)
    memories = (preflight(configure(f"cluster.cpu_ranks={ranks}")).memory.memories[0] for ranks in (1, 2))
    one, two = ({str(part): part.at(Phase.LOSS) for part in memory.parts} for memory in memories)
    for name in ("student: parameters", "student: optimizer", "cross: parameters", "cross: hidden states handed over"):
        assert two[name] == one[name] // 2 > 0, name
    for name in ("student: gradients of hidden states and head", "cross: head handed over"):
        assert two[name] == one[name] > 0, name


def test_offload_auto_is_resolved(configure: Configure) -> None:
    """Bug: workers and config.yaml get `auto`. On CPU, nothing is offloaded."""
    config = preflight(configure()).config

    assert config.student.offload is False
    assert [teacher.offload for teacher in config.teachers] == [False, False]


# Dry run


def test_a_dry_run_prints_the_plan_and_creates_nothing(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with nothing_is_created(tmp_path):
        distil(configure("run.dry_run=true", "logging.console.memory_table=true", f"run.output_dir={tmp_path / 'run'}"))
    printed = capsys.readouterr().out
    rows = {cells[1].strip(): cells[2].strip() for line in printed.splitlines() if len(cells := line.split("│")) > 3}

    assert float(rows["overlap"]) > 0.5
    assert rows["training documents"] == f"{NUM_DOCUMENTS}, from text (text_key)"
    assert rows["packed rows per step"] == "4"
    assert rows["tokens at a time"].endswith(" per rank")
    assert rows["steps per epoch"] == "about 4"
    assert rows["steps"] == "4, about 1 epochs"
    assert rows["learning rate"] == "0.01, adamw, cosine"
    assert "documents cut" not in rows  # packed
    assert {"cross: hidden states handed over", "same: parameters", "all"} <= rows.keys()


def test_the_header_has_losses_truncated_texts_and_advice(configure: Configure) -> None:
    """Bug: half of the texts are truncated without a word; or the header and the help advise different losses."""
    summary = run_summary(preflight(configure("data.packing=false", "train.max_length=8", "loss.normalizer=units")))
    losses = "p_kl (forward_kl) normalizer=units, same_vocab (forward_kl)"
    assert summary.choices["loss"] == f"{losses}, KD weight 1, cross-entropy weight 1"
    assert re.search(r", \d+ of \d+ checked reach train.max_length=8 and may be cut; data.packing=true", summary.data)
    (advice,) = [line for teacher in summary.teachers for line in teacher.coverage if ": take " in line]
    assert advice == f"p_kl: take {PKLTerm.take}"


def test_a_dry_run_says_that_it_passed_and_lists_unread_weights(
    configure: Configure, tiny: Tiny, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    distil(configure("run.dry_run=true"))
    output = capsys.readouterr()
    lines, warnings = output.out.splitlines(), output.err.splitlines()
    assert max(map(len, lines)) <= 80
    unread = next(i for i, line in enumerate(lines) if line.startswith("not read: the weights of "))
    assert tiny.student.name in "".join(lines[unread:])
    passed = next(line for line in lines[unread:] if line.startswith("dry run passed"))
    assert passed.startswith("dry run passed with ") == any(line.startswith("warning: ") for line in warnings)


def test_a_dry_run_of_a_run_that_does_not_fit_fails(
    configure: Configure, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: `dry run passed` and exit status 0 although the estimate exceeds the memory."""
    plan = preflight(configure("run.dry_run=true"))
    memories = tuple(replace(memory, capacity=memory.peak // 2) for memory in plan.memory.memories)
    monkeypatch.setattr(
        "nemo_opd.training.off_policy.preflight",
        lambda config: replace(plan, memory=replace(plan.memory, memories=memories), warnings=("a", "b")),
    )
    with pytest.raises(
        ConfigError, match=r"^the run does not fit: .* at the peak .* more than the usable .*; nothing was written$"
    ):
        distil(plan.config)
    assert "dry run passed" not in capsys.readouterr().out


def test_special_tokens_beyond_the_embeddings_are_left_out(configure: Configure, tiny: Tiny, tmp_path: Path) -> None:
    """As for Gemma-3-1B: its tokenizer has an image token, but the model has no embedding for it."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.student)
    size = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    plan = preflight(configure(f"student.tokenizer={tmp_path / 'tokenizer'}"))

    assert plan.student_vocab_size == size
    with pytest.raises(DataError, match="a document holds '<image>', for which the model has no embedding"):
        plan.data.make_sample("a picture: <image>")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("student.parallelism.tp=2", "num_attention_heads=3 of LlamaForCausalLM cannot be cut into 2 equal parts"),
        ("teachers.0.parallelism.cp=2", "needs a GPU"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_before_a_process_starts(
    override: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, ModelError)) as caught:
        preflight(compose("cluster.cpu_ranks=2", override))
    assert str(caught.value).startswith(f"{override}: {message}")


def test_a_head_in_fp32_is_refused_before_a_process_starts(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only for a teacher in bf16: the student is in fp32 on a CPU, so its head is not rounded."""
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["lm_head"])

    with pytest.raises(ModelError, match=r"teachers.1.model=.*write teachers.1.dtype=float32"):
        preflight(configure("teachers.0.dtype=float32", "teachers.1.dtype=bfloat16"))
    preflight(configure("teachers.0.dtype=float32", "teachers.1.dtype=float32"))


# Warnings about texts and teachers


def write_texts(folder: Path, column: str, rows: list[object]) -> str:
    file = folder / f"{column}.jsonl"
    file.write_text("".join(json.dumps({column: row}) + "\n" for row in rows))
    return str(file)


def from_file(file: str, *more: str) -> list[str]:
    no_validation = "data.validation.arrow_files=null"
    return ["data.train.arrow_files=null", f"data.train.jsonl_files={file}", no_validation, *more]


def test_a_teacher_of_another_tokenizer_reads_all_of_the_students_text(configure: Configure, tmp_path: Path) -> None:
    """Bug: the teacher's text ends at train.max_length of its own, shorter tokens, so half of the text has no KD."""
    file = write_texts(tmp_path, "text", ["123" * 80] * 4)
    plan = preflight(configure(*from_file(file, "train.max_length=32")))
    limited = "train.max_length=32", "teachers.0.max_length=32", "data.packing=false"
    cut = preflight(configure(*from_file(file, *limited)))
    cross, same = plan.survey.coverage
    assert cross is not None
    assert cross > 0.9
    assert same == 1
    assert plan.survey.widths[0] > 40
    assert plan.warnings == ()
    short = cut.survey.coverage[0]
    assert short is not None
    assert short < 0.7
    assert cut.survey.widths == (32, 32)
    (warning,) = cut.warnings
    assert re.match(
        rf"teachers\.0 \(cross\): only {short:.0%} of the scored tokens in 4 texts get KD from it; "
        r"teachers\.0\.max_length=32 may truncate texts; remove it",
        warning,
    )


def test_a_teacher_is_bounded_by_its_positions(configure: Configure, tmp_path: Path) -> None:
    """Bug: a teacher reads more than its 128 positions; or no warning about a model that reads more than it has."""
    file = write_texts(tmp_path, "text", [" ".join(str(123456 * i) for i in range(200))] * 2)
    plan = preflight(configure(*from_file(file, "train.max_length=160")))
    assert plan.survey.widths == (128, 160)
    assert len(plan.data.make_sample("1 " * 300).teachers[0].tokens) == 128
    limits = [warning for warning in plan.warnings if warning.startswith("train.max_length=160")]
    assert len(limits) == 2
    assert "has 128 positions" in limits[0]


def test_a_batch_of_more_texts_than_there_are_is_a_warning(configure: Configure, tmp_path: Path) -> None:
    """Bug: batches are smaller than the settings say, without a warning."""
    file = write_texts(tmp_path, "text", ["The fox sleeps."] * 3)
    (warning,) = preflight(configure(*from_file(file, "data.packing=false", "train.global_batch_size=8"))).warnings
    assert warning.startswith("train.global_batch_size=8: a step takes 8 texts, the data have 3")


def test_teachers_that_are_the_student_are_a_warning() -> None:
    """Bug: a folder that is set twice trains the student for hours towards itself."""
    same = [f"{key}=folder" for key in ("student.model", "teachers.0.model", "teachers.1.model")]
    (warning,) = warn_of_student_as_teacher(compose(*same))
    assert "it is the model that the student starts from" in warning
    assert not list(warn_of_student_as_teacher(compose(*same[:2])))


def test_texts_that_spell_special_tokens_are_a_warning(configure: Configure, tiny: Tiny, tmp_path: Path) -> None:
    """Bug: a rendered conversation, or HTML with <s>, is read as special tokens without a warning."""
    eos = AutoTokenizer.from_pretrained(tiny.student).eos_token
    file = write_texts(tmp_path, "text", ["The fox sleeps.", f"The {eos} sleeps."] * 3)
    one_row = "train.global_batch_size=1"
    (warning,) = preflight(configure(*from_file(file, one_row))).warnings
    assert warning.startswith("3 of 6 checked texts")
    assert eos in warning
    assert "data.messages_key" in warning
    assert preflight(configure(*from_file(file, one_row, "data.special_tokens=text"))).warnings == ()


def test_a_batch_of_more_rows_than_the_data_have_is_a_warning(configure: Configure, tmp_path: Path) -> None:
    """Bug: no warning about 100,000 rows per step of 300 texts."""
    (warning,) = preflight(configure(*from_file(write_texts(tmp_path, "text", ["The fox sleeps."])))).warnings
    assert "packed rows, the data have about 1, so each step takes them all" in warning


def test_rows_that_are_too_long_for_a_teacher_are_surveyed(configure: Configure, tmp_path: Path) -> None:
    """Bugs: steps that depend on a teacher's limit; coverage as if the teacher read all tokens; no warning."""
    file = write_texts(tmp_path, "text", [" ".join(str(123456 * i) for i in range(1, 40))] * 12)
    limited = "train.max_length=100", "teachers.0.max_length=20", "train.max_steps=2", "train.global_batch_size=2"
    plan = preflight(configure(*from_file(file, *limited)))
    assert isinstance(plan.data, Corpus)
    assert plan.steps_per_epoch == pytest.approx(plan.data.steps(plan.config)[0], rel=0.2)
    coverage = plan.survey.coverage[0]
    assert coverage is not None
    assert coverage < 0.4
    assert plan.data.steps(plan.config) == preflight(
        configure(*from_file(file, *limited, "loss.kd_weight=0"))
    ).data.steps(plan.config)
    (warning,) = (warning for warning in plan.warnings if warning.startswith("train.max_length"))
    limit = r"train\.max_length=100: teachers\.0\.max_length=20"
    match = re.match(rf"{limit} ends after about (\d+) student tokens", warning)
    assert match
    assert int(match[1]) <= 20


@pytest.mark.parametrize("packing", ["true", "false"])
def test_runs_with_and_without_teachers_read_the_same_texts(configure: Configure, tmp_path: Path, packing: str) -> None:
    """Bug: teachers' lengths decide which texts fit a row, so runs with and without a teacher cannot be compared."""
    file = write_texts(
        tmp_path, "text", [" ".join(str(123456 * i) for i in range(1, 2 + 7 * k % 40)) for k in range(40)]
    )
    limits = "train.max_length=30", "teachers.0.max_length=25", f"data.packing={packing}", "train.global_batch_size=3"
    read = []
    for weight in (0, 1):
        plan = preflight(configure(*from_file(file, *limits, f"loss.kd_weight={weight}")))
        assert isinstance(plan.data, Corpus)
        with plan.data.loader(plan.config) as loader:
            batches = [loader.next() for _ in range(2 * plan.data.steps(plan.config)[0])]
        read.append(
            [(batch.student.ids.tolist(), None if batch.row is None else batch.row.tolist()) for batch in batches]
        )
    assert read[0] == read[1]


def test_texts_longer_than_a_table_of_positions_are_refused(configure: Configure, tiny: Tiny, tmp_path: Path) -> None:
    """Bug: the student fails at its first long text."""
    config = GPT2Config(vocab_size=500, n_positions=40, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    AutoTokenizer.from_pretrained(tiny.student).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ConfigError, match=r"train\.max_length=48: .* has a table of only 40 positions .* set train"):
        preflight(configure(f"student.model={tmp_path / 'gpt2'}"))


def test_there_is_room_to_sample() -> None:
    demo = compose("train.max_length=600", config_name="on_policy_demo")
    with pytest.raises(ConfigError, match=r"may have 600 tokens, but demo:arithmetic_student has 512 positions"):
        require_room_to_sample(demo, 512)
    require_room_to_sample(
        compose("train.max_length=600", "rollout.max_prompt_length=99", config_name="on_policy_demo"), 512
    )


@pytest.mark.parametrize(
    ("setting", "rotary", "expected"),
    [
        ("train.max_length=160", RotaryLimit(160, grows=False), []),
        ("train.max_length=161", RotaryLimit(160, grows=False), ["trained on with other probabilities"]),
        (
            "train.max_length=161",
            RotaryLimit(160, grows=True),
            ["trained on with other probabilities", "depend on the order of texts"],
        ),
    ],
)
def test_lengths_with_other_rotary_factors_are_warnings(setting: str, rotary: RotaryLimit, expected: list[str]) -> None:
    """Catches samples that begin with the rotary factors of short texts, and factors that depend on earlier texts."""
    config = compose(setting, "rollout.max_new_tokens=100", config_name="on_policy_demo")
    student = replace(read_model_info(config.student, "student", "cpu"), rotary=rotary)
    teachers = [replace(student, rotary=None)] * len(config.active_teachers)
    warnings = check_positions(config, student, teachers)
    assert [next(text for text in expected if text in warning) for warning in warnings] == expected


def test_context_parallel_ranks_do_not_choose_different_rotary_factors() -> None:
    """Catches ranks that read parts of the same text with different rotary factors."""
    config = compose("student.parallelism.cp=2", "train.max_length=64")
    info = read_model_info(config.student, "student", "cuda")
    teachers = [info] * len(config.active_teachers)
    with pytest.raises(ConfigError, match=r"train\.max_length=64: .*more than 63 tokens.*context-parallel.*cp=1"):
        check_positions(config, replace(info, rotary=RotaryLimit(63, grows=False)), teachers)


CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def conversations(tmp_path: Path, *roles: str) -> list[str]:
    rows: list[object] = [[{"role": role, "content": f"The quick brown fox {i}"} for role in roles] for i in range(4)]
    (tmp_path / "chat.jinja").write_text(CHAT)
    template = f"student.chat_template={tmp_path / 'chat.jinja'}"
    return from_file(write_texts(tmp_path, "messages", rows), "data.messages_key=messages", template)


def test_conversations_without_an_answer_are_refused(configure: Configure, tmp_path: Path) -> None:
    """Bug: a run learns nothing."""
    overrides = conversations(tmp_path, "system", "user")
    with pytest.raises(
        DataError, match=r"none of 4 conversations has an assistant message to learn \(roles: system, user"
    ):
        preflight(configure(*overrides, f"teachers.0.chat_template={tmp_path / 'chat.jinja'}"))


def test_texts_that_are_cut_before_their_answer_are_refused(configure: Configure, tmp_path: Path) -> None:
    overrides = conversations(tmp_path, "user", "assistant")
    template = f"teachers.0.chat_template={tmp_path / 'chat.jinja'}"
    with pytest.raises(DataError, match=r"4 of 4 checked texts .* have no assistant turn .*longest has \d\d"):
        preflight(configure(*overrides, template, "train.max_length=4"))


def test_the_header_proposes_a_length_for_all_conversations(configure: Configure, tmp_path: Path) -> None:
    """Bug: all conversations are truncated, and no setting is named."""
    overrides = [*conversations(tmp_path, "user", "assistant"), f"teachers.0.chat_template={tmp_path / 'chat.jinja'}"]
    cut = run_summary(preflight(configure(*overrides, "train.max_length=33"))).data
    (longest,) = re.findall(r", 4 of 4 checked are cut at train.max_length=33; set (\d+) for all$", cut)
    summary = run_summary(preflight(configure(*overrides, f"train.max_length={longest}"))).data
    assert "are cut" not in summary


def test_a_context_is_the_reason_why_earlier_turns_have_no_kd(configure: Configure, tmp_path: Path) -> None:
    """Bug: the warning blames `equal_history` and the tokenizers, and its proposals change nothing."""
    overrides = conversations(tmp_path, *("user", "assistant") * 2)
    templates = [f"teachers.{i}.chat_template={tmp_path / 'chat.jinja'}" for i in (0, 1)]
    contexts = [f"teachers.{i}.context.template='{{prompt}} Think.'" for i in (0, 1)]
    plan = preflight(configure(*overrides, *templates, *contexts, "train.max_length=128"))
    assert plan.survey.coverage == pytest.approx((0.5, 0.5), abs=0.1)
    for i, warning in enumerate(plan.warnings):
        assert f"teachers.{i}.context.template has it compare only the answer to the user's last message" in warning
    assert len(plan.warnings) == 2


def test_one_tokenizer_with_two_templates_is_cross_tokenizer(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its projection is the identity. With the student's template, type=cross_tokenizer is refused."""
    monkeypatch.chdir(tmp_path)
    overrides = [*conversations(tmp_path, "user", "assistant"), f"teachers.0.model={tiny.teacher_same}"]

    def configure(*more: str) -> RunConfig:
        return compose(*tiny.overrides(*overrides, *more, teachers=1))

    with pytest.raises(ModelError, match="so there is nothing to align"):
        preflight(configure(*overrides, f"teachers.0.chat_template={tmp_path / 'chat.jinja'}"))
    (tmp_path / "other.jinja").write_text(CHAT.replace("<|{{", "<|the {{").replace("<|assistant", "<|the assistant"))
    plan = preflight(configure(*overrides, f"teachers.0.chat_template={tmp_path / 'other.jinja'}"))
    matrix, (coverage,) = plan.teachers[0].projection, plan.survey.coverage
    assert matrix is not None
    assert (matrix.indices[:, 0] == np.arange(len(matrix.indices))).mean() > 0.99
    assert coverage is not None
    assert coverage > 0.5


def with_more_tokens(source: Path, folder: Path, **tokens: list[str]) -> str:
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"additional_special_tokens": tokens.get("special", [])})
    tokenizer.add_tokens(tokens.get("added", []))
    model = AutoModelForCausalLM.from_pretrained(source)
    model.resize_token_embeddings(len(tokenizer))
    model.config.eos_token_id = tokenizer.eos_token_id
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("side", ["student", "teachers.1"])
def test_either_side_may_have_further_tokens(configure: Configure, tiny: Tiny, tmp_path: Path, side: str) -> None:
    source = tiny.student if side == "student" else tiny.teacher_same
    plan = preflight(
        configure(f"{side}.model={with_more_tokens(source, tmp_path / 'm', special=['<i>'], added=['<t>'])}")
    )
    sizes = plan.student_vocab_size, plan.teachers[1].vocab_size
    assert abs(sizes[0] - sizes[1]) == 2
    sample = plan.data.make_sample("a <i> and <t> b")
    assert sample.teachers[1].tokens.ids.max() < sizes[1]


def test_tokens_of_ordinary_text_may_not_be_missing(configure: Configure, tmp_path: Path) -> None:
    """Bug: a teacher whose vocabulary splits texts differently counts as same-tokenizer."""
    smaller = train_tokenizer(r"\p{N}{1,3}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+", 300, "<|end|>")
    model = save_model(tmp_path / "smaller", smaller, width=24, seed=2)
    with pytest.raises(
        ModelError, match=r"the student's tokenizer has \d+ tokens of ordinary text that same lacks .* cross_"
    ):
        preflight(configure(f"teachers.1.model={model}"))


def test_a_teacher_with_another_end_token_is_a_warning(configure: Configure, tiny: Tiny, tmp_path: Path) -> None:
    """Bug: no warning for a base student with an instruct teacher. Across tokenizers, roles align the end tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.teacher_same)
    end_token = tokenizer.convert_ids_to_tokens(5)
    tokenizer.eos_token = end_token
    tokenizer.save_pretrained(tmp_path / "instruct")
    warning, _ = preflight(configure(f"teachers.1.tokenizer={tmp_path / 'instruct'}")).warnings
    assert warning.startswith(
        f"teachers.1 (same) ends its responses with {end_token}, but the student stops only at <|end|>"
    )
    assert f"set student.tokenizer={tmp_path / 'instruct'}" in warning


def test_validation_on_training_texts_is_a_warning(configure: Configure, tmp_path: Path) -> None:
    """Bug: the validation curve measures memorized texts, without a warning."""
    link = tmp_path / "held_out.arrow"
    (trained_on,) = resolve_files(configure().data.train.arrow_files, key="data.train.arrow_files")
    link.symlink_to(trained_on)
    (warning,) = preflight(configure(f"data.validation.arrow_files={link}")).warnings
    assert warning.startswith(f"data.validation.arrow_files: {link} is also in data.train")


def test_gpus_of_the_rollout_server_are_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the student trains on a GPU whose memory its server takes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert resolve_ranks(Cluster(), "cuda", reserved=1) == 3
    assert server_gpus(ServerRollout(gpus=1)) == ("3",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert server_gpus(ServerRollout(gpus=2)) == ("6", "7")
    assert server_gpus(ServerRollout()) == ()
    assert [reserved_gpus(rollout, "cuda") for rollout in (None, ServerRollout(), ServerRollout(gpus=2))] == [0, 0, 2]
    with pytest.raises(ConfigError, match=r"rollout\.sleep=true: the run is on CPUs"):
        reserved_gpus(ServerRollout(sleep=True), "cpu")
    with pytest.raises(
        ConfigError, match=r"gpus_per_node=4: this machine has 3 in addition to those of rollout\.gpus=1"
    ):
        resolve_ranks(Cluster(gpus_per_node=4), "cuda", reserved=1)
    with pytest.raises(ConfigError, match=r"rollout\.gpus=4: this machine has 4 GPUs, which leaves none"):
        resolve_ranks(Cluster(), "cuda", reserved=4)
    with pytest.raises(ConfigError, match=r"rollout\.gpus=1: the run is on CPUs; leave it out"):
        resolve_ranks(Cluster(), "cpu", reserved=1)
    with pytest.raises(ConfigError, match=r"rollout\.gpus=1: Ray assigns the GPUs of cluster\.address"):
        resolve_ranks(Cluster(address="auto"), "cuda", reserved=1)
