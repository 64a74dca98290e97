"""A user's mistake stops the run before a process starts, with one error of the right class, and creates nothing."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, T5Config

from nemo_opd.checkpoint.manager import CheckpointManager, Progress
from nemo_opd.checkpoint.run_directory import RunLock, identity
from nemo_opd.config import RunConfig
from nemo_opd.errors import (
    AlignmentError,
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    OPDError,
    ProjectionError,
)
from nemo_opd.preflight.corpus import Corpus
from nemo_opd.preflight.inputs import check_inputs
from nemo_opd.preflight.plan import preflight
from nemo_opd.projection import build_projection
from tests.composition import ROOT, compose, nothing_is_created
from tests.tiny import Tiny, train_tokenizer

Configure = Callable[..., RunConfig]
Refused = Callable[..., str]


@pytest.fixture
def configure(tiny: Tiny) -> Configure:
    """A function from overrides to the configuration of a run with the tiny models."""
    return lambda *overrides: compose(*tiny.overrides(*overrides))


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A folder for wrong files."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    return folder


@pytest.fixture
def refused(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """A function from overrides to the error message of a run with them."""
    monkeypatch.chdir(tmp_path)

    def message(kind: type[OPDError], *overrides: str) -> str:
        with nothing_is_created(tmp_path), pytest.raises(kind) as caught:
            preflight(configure(*overrides))
        assert len(str(caught.value).splitlines()) == 1
        return str(caught.value)

    return message


def test_the_same_run_without_a_mistake_passes(configure: Configure, tmp_path: Path, monkeypatch) -> None:
    """Otherwise every test here could pass because of another mistake."""
    monkeypatch.chdir(tmp_path)
    with nothing_is_created(tmp_path):
        preflight(configure())


# Data


def test_all_missing_paths_are_named_at_once(configure: Configure, tmp_path: Path) -> None:
    """Bug: a user has to start the run again for each path."""
    missing = {
        "student.model": tmp_path / "student",
        "teachers.0.model": tmp_path / "teacher",
        "teachers.0.projection": tmp_path / "pair.safetensors",
        "data.train.arrow_files": tmp_path / "texts.arrow",
    }
    with pytest.raises(ModelError) as caught:
        check_inputs(configure(*(f"{key}={path}" for key, path in missing.items())), on_policy=False)
    lines = str(caught.value).splitlines()
    assert [next(key for key in missing if line.startswith(key)) for line in lines] == list(missing)


def save_arrow(file: Path, table: pa.Table) -> Path:
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return file


# Models


def copied(source: Path, target: Path, *, without: str = "") -> Path:
    shutil.copytree(source, target)
    if without:
        (target / without).unlink()
    return target


def test_a_model_folder_without_weights(refused: Refused, tiny: Tiny, inputs: Path) -> None:
    folder = copied(tiny.student, inputs / "model", without="model.safetensors")
    message = refused(ModelError, f"teachers.1.model={folder}")

    assert message.startswith(f"teachers.1.model={folder}: the folder has no weights (none of model.safetensors, ")
    assert message.endswith("copy them there or name another folder")


def test_a_teachers_cache_as_a_model(refused: Refused, tiny: Tiny, inputs: Path) -> None:
    folder = copied(tiny.student, inputs / "cache", without="model.safetensors")
    (folder / "cache.yaml").touch()

    assert refused(ModelError, f"teachers.0.model={folder}") == (
        f"teachers.0.model={folder}: the folder is a teacher's cache, without weights; name a model, or in a run write "
        f"the teacher as {{type: cached, cache: {folder}}}"
    )


def test_a_hub_name_that_cannot_be_reached(refused: Refused) -> None:
    message = refused(ModelError, "teachers.0.model=nobody/nothing")

    assert message.startswith("teachers.0.model=nobody/nothing: no model configuration could be read (")
    assert message.endswith("or a hub name that this machine can reach")


def test_a_model_that_does_not_continue_text(refused: Refused, tiny: Tiny, inputs: Path) -> None:
    folder = copied(tiny.student, inputs / "model")
    T5Config().save_pretrained(folder)
    message = refused(ModelError, f"student.model={folder}")

    assert message == f"student.model={folder}: t5 is not a causal language model; name a model that continues text"


def test_a_tokenizer_that_is_missing(refused: Refused, tiny: Tiny, inputs: Path) -> None:
    """Bug: the message names student.model or teachers.0.model although the user set the tokenizer's key."""
    folder = copied(tiny.student, inputs / "model", without="tokenizer.json")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)

    for_model = refused(ModelError, f"teachers.0.model={folder}")
    assert for_model.startswith(f"teachers.0.model={folder}: no tokenizer could be loaded (")
    for_tokenizer = refused(ModelError, f"student.tokenizer={folder}")
    assert for_tokenizer.startswith(f"student.tokenizer={folder}: no tokenizer could be loaded (")


def test_a_tokenizer_too_large_for_its_model(refused: Refused, tiny: Tiny, inputs: Path) -> None:
    """Bug: an index error in a worker at the first id beyond the embeddings."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.student)
    size = len(tokenizer)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(inputs / "tokenizer")
    message = refused(ModelError, f"student.tokenizer={inputs / 'tokenizer'}")

    assert message.startswith(f"student.tokenizer={inputs / 'tokenizer'}: its tokenizer has ids up to {size}, but ")
    assert f"{size} token embeddings; set student.tokenizer to the model's tokenizer" in message


def test_roles_of_a_token_that_neither_side_has(refused: Refused) -> None:
    message = refused(AlignmentError, "++teachers.0.roles={eos: ['<|nowhere|>']}")

    assert "roles names the token '<|nowhere|>', which neither tokenizer has" in message


# Conversations

CHAT = ("data.validation.arrow_files=null", "++data.messages_key=messages")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
ALTERNATING = "{{ raise_exception('roles must alternate') }}"


@pytest.fixture
def chat(inputs: Path) -> list[str]:
    """Overrides for a run on conversations."""
    messages = [{"role": "user", "content": "fox?"}, {"role": "assistant", "content": "brown"}]
    file = save_arrow(inputs / "chat.arrow", pa.table({"messages": [messages] * 4}))
    return [*CHAT, f"data.train.arrow_files={file}"]


def with_templates(inputs: Path, student: str, teacher: str) -> list[str]:
    (inputs / "student.jinja").write_text(student)
    (inputs / "teacher.jinja").write_text(teacher)
    return [
        f"++student.chat_template={inputs / 'student.jinja'}",
        f"++teachers.0.chat_template={inputs / 'teacher.jinja'}",
    ]


def test_no_chat_template(configure: Configure, chat: list[str]) -> None:
    """Bug: an error that names a folder of the cache but no key, or only one model."""
    with pytest.raises(AlignmentError) as caught:
        preflight(configure(*chat))
    for line, key in zip(str(caught.value).splitlines(), ("student", "teachers.0"), strict=True):
        assert line.startswith(f"{key}.")
        assert f"has no chat template, which conversations need; write {key}.chat_template=plain, a file" in line


def test_a_teacher_without_a_template_is_offered_the_students(refused: Refused, inputs: Path, chat: list[str]) -> None:
    """Bug: an error that names no key, or proposes no value."""
    (template := inputs / "student.jinja").write_text(TEMPLATE)
    message = refused(AlignmentError, *chat, f"++student.chat_template={template}", "teachers.0.type=cross_tokenizer")
    assert message.startswith("teachers.0.")
    assert f"write teachers.0.chat_template={template}, teachers.0.chat_template=plain, a file" in message


def test_a_chat_template_that_is_not_a_file(refused: Refused, chat: list[str]) -> None:
    message = refused(ModelError, *chat, "++student.chat_template=/nowhere.jinja")

    assert message.startswith("student.chat_template=/nowhere.jinja: ")
    assert message.endswith("name a file with a Jinja chat template, a model's folder, or plain")


def test_a_chat_template_that_refuses_the_conversation(refused: Refused, inputs: Path, chat: list[str]) -> None:
    message = refused(DataError, *chat, *with_templates(inputs, TEMPLATE, ALTERNATING))

    assert message.startswith("data.train: the first document cannot be used: the chat template of ")
    assert "roles must alternate" in message


# Projections


def test_a_projection_of_another_pair(refused: Refused, tiny: Tiny, inputs: Path) -> None:
    student = AutoTokenizer.from_pretrained(tiny.student)
    other_tokenizer = train_tokenizer(r"\s+|\S+", 320, "</s>")
    file = inputs / "other.safetensors"
    build_projection(student, other_tokenizer).save(file)
    message = refused(ProjectionError, f"teachers.0.projection={file}")

    assert message.startswith(f"teachers.0.projection: {file} was made for another teacher tokenizer (")
    assert message.endswith("or use projection: auto")


# Batches, devices, processes


def test_a_batch_that_does_not_divide(refused: Refused) -> None:
    message = refused(ConfigError, "train.global_batch_size=7", "cluster.device=cpu", "cluster.cpu_ranks=2")

    assert message.startswith("train.global_batch_size=7 is not a multiple of the student's data-parallel ranks, 2; ")
    assert "write train.global_batch_size=6" in message


def test_more_ranks_than_the_machine_has(refused: Refused) -> None:
    message = refused(ConfigError, "cluster.device=cpu", "cluster.cpu_ranks=10000")
    cores = len(os.sched_getaffinity(0))

    assert message == (
        f"cluster.cpu_ranks=10000: this machine has {cores} cores; write cluster.cpu_ranks={cores} or fewer"
    )


def test_more_gpus_than_the_machine_has(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    message = refused(ConfigError, "cluster.device=cuda", "cluster.gpus_per_node=8")

    assert message == "cluster.gpus_per_node=8: this machine has 2; write cluster.gpus_per_node=2 or fewer"


def test_cuda_without_a_gpu(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = refused(ConfigError, "cluster.device=cuda")

    assert message.startswith("cluster.device=cuda: PyTorch sees no GPU on this machine; write cluster.device=cpu, or ")


def test_several_nodes_without_an_address(refused: Refused) -> None:
    message = refused(ConfigError, "cluster.num_nodes=16")

    assert message.startswith("cluster.num_nodes=16: several nodes need a running Ray cluster; start it with ")
    assert message.endswith("write cluster.address=auto")


def test_cuda_ipc_on_cpu(refused: Refused) -> None:
    message = refused(ConfigError, "cluster.device=cpu", "handoff.transport=cuda_ipc")

    assert message.startswith("handoff.transport=cuda_ipc: the run is on cpu, where only shared_memory works; ")
    assert message.endswith("write handoff.transport=auto or shared_memory")


# The run's directory


def test_an_output_directory_below_a_file(refused: Refused, inputs: Path) -> None:
    """Uses a file in the way, since permissions do not stop root."""
    (inputs / "file").write_text("in the way")
    for folder in (inputs / "file", inputs / "file" / "run"):
        message = refused(ConfigError, f"run.output_dir={folder}")

        assert message.startswith(f"run.output_dir={folder}: {inputs / 'file'} is a file, so it cannot be a folder")
        assert message.endswith("; name another directory")


def test_an_output_directory_that_the_kernel_refuses(refused: Refused) -> None:
    message = refused(ConfigError, "run.output_dir=/proc/nemo_opd/run")

    assert message.startswith("run.output_dir=/proc/nemo_opd/run: /proc is not writable (")


def test_an_output_directory_whose_name_is_too_long(refused: Refused, inputs: Path) -> None:
    """Bug: a traceback."""
    folder = inputs / ("x" * 300)
    assert f"{inputs} is not writable (File name too long)" in refused(ConfigError, f"run.output_dir={folder}")


def save_checkpoint(folder: Path, configure: Configure, *overrides: str) -> CheckpointManager:
    checkpoints = CheckpointManager(folder / "checkpoints", keep_last=2)
    settings = identity(configure(*overrides))
    with checkpoints.writing(Progress(3, {}, settings)):
        pass
    return checkpoints


def test_a_directory_that_holds_a_run(refused: Refused, configure: Configure, inputs: Path) -> None:
    save_checkpoint(inputs, configure)
    message = refused(ConfigError, f"run.output_dir={inputs}", "run.resume=never")

    assert message.startswith(f"run.output_dir={inputs} holds a run with a checkpoint at step 3; write run.resume=auto")
    with RunLock(inputs):
        message = refused(ConfigError, f"run.output_dir={inputs}", "run.resume=never")
    assert message.startswith(f"run.output_dir={inputs} is in use by process {os.getpid()} ")


def test_a_checkpoint_of_another_run(refused: Refused, configure: Configure, inputs: Path) -> None:
    save_checkpoint(inputs, configure, "student.optimizer.lr=0.5", "run.seed=9")
    message = refused(CheckpointError, f"run.output_dir={inputs}", "run.resume=auto", "student.optimizer.lr=0.25")

    assert message.startswith(f"{inputs}/checkpoints/step_000003 is a checkpoint of another run: run.seed=0, there 9; ")
    assert "student.optimizer.lr=0.25, there 0.5; restore these settings, or start anew" in message


def test_a_checkpoint_that_is_damaged(configure: Configure, inputs: Path) -> None:
    checkpoints = save_checkpoint(inputs, configure)
    with checkpoints.writing(Progress(5, {}, identity(configure()))) as folder:
        (folder / "weights").write_bytes(b"as written")
    (checkpoints.path(5) / "weights").write_bytes(b"as wriTten")
    plan = preflight(configure(f"run.output_dir={inputs}", "run.resume=auto"))

    assert plan.progress is not None
    assert plan.progress.step == 3
    assert plan.damaged_steps == (5,)
    (warning,) = [warning for warning in plan.warnings if "damaged" in warning]
    assert warning.startswith(f"{checkpoints.path(5)} is damaged: weights (10 bytes) has the SHA-256 ")
    assert warning.endswith(
        f"the run continues from {checkpoints.path(3)} instead, and renames this one damaged_step_000005"
    )
    assert checkpoints.steps() == [3, 5], "a look at a run changes nothing"


def test_a_disk_without_room(refused: Refused, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: hours of training before the first checkpoint cannot be written."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**6, free=50_000))
    message = refused(ConfigError, f"run.output_dir={inputs}")

    assert re.fullmatch(
        rf"{inputs}: no room for one checkpoint and the trained model \([\d.]+ kB needed, 50\.0 kB free\); free some "
        r"space, or choose another run\.output_dir",
        message,
    )


def test_the_estimated_size_of_a_checkpoint(tiny: Tiny, configure: Configure) -> None:
    """Bugs: a run with room is refused, or one without room starts."""
    weights = sum(tensor.nbytes for tensor in load_file(tiny.student / "model.safetensors").values())
    estimate = preflight(configure()).checkpoint_bytes
    assert estimate == 4 * weights  # fp32 weights, two moments and the exported model
    assert preflight(configure("student.lora={rank:3}")).checkpoint_bytes < 2 * weights


# The real command line


@pytest.mark.world
def test_every_problem_of_a_command_has_its_line(tmp_path: Path) -> None:
    script = ROOT / "examples" / "run_off_policy_distillation.py"
    arguments = [sys.executable, str(script), "train.max_step=5", "run.seed=-1"]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)

    demo, *errors = done.stderr.strip().splitlines()
    assert demo.startswith("no file is named, so this starts from the demo")
    assert sorted(errors) == [
        "error: run.seed=-1: must be greater than or equal to 0",
        "error: train.max_step=5: there is no such key; did you mean train.max_steps?",
    ]
    assert done.returncode == 1
    assert list(tmp_path.iterdir()) == []


def test_texts_validate_a_run_of_conversations(configure: Configure, inputs: Path, chat: list[str]) -> None:
    """Bug: validation texts beside conversations are refused, or read as conversations."""
    (inputs / "validation.txt").write_text("The quick brown fox jumps over the lazy dog")
    config = configure(
        *chat,
        *with_templates(inputs, TEMPLATE, TEMPLATE),
        f"run.output_dir={inputs / 'run'}",
        "data.validation.arrow_files=null",
        "data.validation.max_samples=null",
        f"++data.validation.text_files={inputs / 'validation.txt'}",
    )
    data = preflight(config).data
    assert isinstance(data, Corpus)
    (batch,) = data.validation_batches(4)
    assert batch.student.loss_mask.sum() >= 5, "a text is learned from its second token on"


def test_validation_texts_have_their_own_column(configure: Configure, inputs: Path) -> None:
    """Bug: training texts in column `text` exclude validation texts in column `body`."""
    file = inputs / "validation.jsonl"
    file.write_text('{"body": "The quick brown fox jumps over the lazy dog"}\n')
    source = ["data.validation.arrow_files=null", f"++data.validation.jsonl_files={file}"]
    data = preflight(configure(*source, "data.validation.text_key=body")).data
    assert isinstance(data, Corpus)
    assert data.validation is not None
    assert len(data.validation) == 1
