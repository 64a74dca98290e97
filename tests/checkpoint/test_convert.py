"""Conversion of checkpoints of one and of two ranks to Hugging Face folders and back, bit for bit."""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from nemo_opd.checkpoint.manager import CheckpointManager, Progress, seal
from nemo_opd.checkpoint.run_directory import identity
from nemo_opd.config.composition import to_yaml
from nemo_opd.preflight.corpus import Corpus
from nemo_opd.preflight.plan import Plan, preflight
from nemo_opd.preflight.summary import run_summary
from nemo_opd.training.saving import provenance
from tests.composition import compose
from tests.exit_status import exit_status
from tests.tiny import Tiny
from tests.training.launch import run_here
from tests.workers.local import Trained, Training, first_batches, in_world, plan_of, train

pytestmark = pytest.mark.world

STEPS = 2
TRAIN = ("student.optimizer.lr=1e-2", "student.scheduler.warmup_steps=1")
LORA = {"merged": "student.lora={rank:3,alpha:12}", "adapter": "student.lora={rank:3,alpha:12,export:adapter}"}


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    trained: Trained
    plan: Plan

    @property
    def run(self) -> Path:
        return self.folder.parent.parent


@dataclass(frozen=True)
class Starts:
    """Training from `student.model`, and from a checkpoint of the same weights. Keyed by number of ranks."""

    from_model: dict[int, Trained]
    from_checkpoint: dict[int, Trained]


@dataclass(frozen=True)
class World:
    checkpoints: dict[str, Checkpoint]
    starts: Starts
    start: Path
    """A run's only checkpoint, converted from `weights`."""
    weights: Path
    plan: Plan
    """The run's plan."""


def save_other(folder: Path, tiny: Tiny, dtype: torch.dtype, *, tied: bool, seed: int) -> Path:
    """Save a model with the tiny student's sizes and other weights."""
    config = LlamaForCausalLM.from_pretrained(tiny.student).config
    config.tie_word_embeddings = tied
    torch.manual_seed(seed)
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny.student).save_pretrained(folder)
    return folder


def trained(folder: Path, plans: Mapping[str, Plan], more: Sequence[Training], num_ranks: int) -> list[Trained]:
    """Train every plan in one world, each with a checkpoint in its run directory, then `more`."""
    with ExitStack() as stack:
        jobs = []
        for name, plan in plans.items():
            manager = CheckpointManager(folder / name / "checkpoints", keep_last=1)
            progress = Progress(step=STEPS, loader={}, settings=identity(plan.config))
            target = stack.enter_context(manager.writing(progress))
            (folder / name / "config.yaml").write_text(to_yaml(plan.config))
            jobs.append(Training(plan, first_batches(plan, STEPS), save_to=target))
        return in_world(num_ranks, train, [*jobs, *more], folder / f"world_{num_ranks}")


@pytest.fixture(scope="module")
def world(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("converted")
    half = save_other(folder / "half", tiny, torch.bfloat16, tied=False, seed=5)
    weights = save_other(folder / "weights", tiny, torch.float32, tied=True, seed=6)
    on_two = ("cluster.cpu_ranks=2", f"student.model={half}")
    alone = {"plain": plan_of(tiny.overrides(*TRAIN))}
    alone |= {name: plan_of(tiny.overrides(*TRAIN, lora)) for name, lora in LORA.items()}
    together = {
        "two ranks": plan_of(tiny.overrides(*TRAIN, *on_two)),
        "tensor parallel": plan_of(tiny.overrides(*TRAIN, *on_two, "student.parallelism.tp=2")),
    }
    start = folder / "start" / "checkpoints" / "step_000000"
    (folder / "config.yaml").write_text(to_yaml(alone["plain"].config))
    assert from_hf(weights, start, f"--config={folder / 'config.yaml'}") == 0
    plan_from_weights = plan_of(tiny.overrides(*TRAIN, f"student.model={weights}"))
    batches = first_batches(plan_from_weights, STEPS)
    starts = [Training(plan_from_weights, batches), Training(alone["plain"], batches, load_from=start)]
    *first, from_model_1, from_checkpoint_1 = trained(folder, alone, starts, 1)
    *second, from_model_2, from_checkpoint_2 = trained(folder, together, starts, 2)
    plans = alone | together
    return World(
        {
            name: Checkpoint(folder / name / "checkpoints" / f"step_{STEPS:06d}", result, plans[name])
            for name, result in zip(plans, [*first, *second], strict=True)
        },
        Starts({1: from_model_1, 2: from_model_2}, {1: from_checkpoint_1, 2: from_checkpoint_2}),
        start,
        weights,
        alone["plain"],
    )


def assert_equal(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert tensors[name].dtype == value.dtype, name
        assert torch.equal(tensors[name], value), name


def from_hf(model: Path, output: Path, *more: str) -> int:
    return exit_status("checkpoint", "from-hf", f"--model={model}", f"--output={output}", *more)


def to_hf(checkpoint: Path, output: Path, *more: str) -> int:
    return exit_status("checkpoint", "to-hf", f"--checkpoint={checkpoint}", f"--output={output}", *more)


def weights_in(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["plain", "merged", "two ranks", "tensor parallel"])
def test_it_is_what_the_run_exported(name: str, world: World, tmp_path: Path) -> None:
    checkpoint = world.checkpoints[name]
    assert to_hf(checkpoint.folder, tmp_path / "out") == 0

    assert_equal(weights_in(tmp_path / "out"), weights_in(checkpoint.folder / "student"))
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == (torch.bfloat16 if checkpoint.plan.config.cluster.cpu_ranks == 2 else torch.float32)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == checkpoint.plan.student_vocab_size
    both = [{file.name for file in folder.iterdir()} for folder in (tmp_path / "out", checkpoint.folder / "student")]
    assert both[0] == both[1] | {"README.md"}
    assert "generation_config.json" in both[0]
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert f"The student after {STEPS} steps" in card.text
    assert yaml.safe_load(card.text.split("~~~~~~yaml\n")[1].split("~~~~~~")[0])["run"]["seed"] == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_adapters_are_what_the_run_exported(world: World, tmp_path: Path) -> None:
    checkpoint = world.checkpoints["adapter"]
    assert to_hf(checkpoint.folder, tmp_path / "out") == 0

    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (checkpoint.folder / "student" / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "dtype"), [("plain", "bfloat16"), ("two ranks", "float32"), ("tensor parallel", "float32")]
)
def test_it_is_the_masters_in_the_precision_asked_for(name: str, dtype: str, world: World, tmp_path: Path) -> None:
    """Bug: fp32 master weights are rounded to the bf16 of the model that the run started from."""
    checkpoint, kind = world.checkpoints[name], getattr(torch, dtype)
    tmp_path = tmp_path / "runs" / "deep"
    assert to_hf(checkpoint.folder, tmp_path, f"--dtype={dtype}") == 0

    expected = {key: value.to(kind) for key, value in checkpoint.trained.weights.items()}
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_equal({key: value for key, value in model.state_dict().items() if key in expected}, expected)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_starts_from_it_as_from_its_own_model(num_ranks: int, world: World) -> None:
    """Bugs: step counters include torch's step without gradients; the warm-up is lost."""
    from_model, from_checkpoint = world.starts.from_model[num_ranks], world.starts.from_checkpoint[num_ranks]
    for expected, actual in zip(from_model.curve, from_checkpoint.curve, strict=True):
        assert {**actual, "peak_memory_gb": 0} == {**expected, "peak_memory_gb": 0}
    assert_equal(from_checkpoint.weights, from_model.weights)
    plain = world.checkpoints["plain"].trained
    assert from_model.curve[0]["ce"] != pytest.approx(plain.curve[0]["ce"], rel=1e-2)


def test_there_and_back_is_the_same(world: World, tmp_path: Path) -> None:
    assert to_hf(world.start, tmp_path / "out") == 0

    assert_equal(weights_in(tmp_path / "out"), weights_in(world.weights))


def test_a_start_belongs_to_a_run_that_finds_out_its_teachers_type(world: World, tiny: Tiny, tmp_path: Path) -> None:
    """Bugs: the teacher's type is not found out; a layout that needs GPUs is refused."""
    run = tmp_path / "run"
    models = [override for override in tiny.overrides(*TRAIN) if not override.startswith("teachers")]
    settings = [*models, f"teachers=[{tiny.teacher_cross}]", f"run.output_dir={run}", "run.resume=auto"]
    (tmp_path / "run.yaml").write_text(to_yaml(compose(*settings, "student.parallelism.cp=2")))
    assert from_hf(world.weights, run / "checkpoints" / "step_000000", f"--config={tmp_path / 'run.yaml'}") == 0

    assert preflight(compose(*settings)).progress is not None


def test_an_average_begins_with_the_weights(
    world: World, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a start's average has tied weights twice, unlike a run's."""
    average = "teachers=[{name: mean, type: same_tokenizer, weights: ema}]"
    models = [override for override in tiny.overrides(*TRAIN) if not override.startswith("teachers")]
    config, start = tmp_path / "run.yaml", tmp_path / "run" / "checkpoints" / "step_000000"
    config.write_text(to_yaml(plan_of([*models, average]).config))
    assert from_hf(world.weights, start, f"--config={config}") == 0
    assert to_hf(start, tmp_path / "out", "--average=mean") == 0

    assert_equal(weights_in(tmp_path / "out"), weights_in(world.weights))
    message = refused(capsys, "to-hf", f"--checkpoint={start}", f"--output={tmp_path / 'no'}", "--average=student")
    assert "--average=student: not a teacher with weights: ema; the run has mean" in message


def test_trained_weights_there_and_back(world: World, tmp_path: Path) -> None:
    """Catches differences for untied weights in bf16 from two ranks."""
    checkpoint = world.checkpoints["two ranks"]
    start = tmp_path / "run" / "checkpoints" / "step_000000"
    config = f"--config={checkpoint.run / 'config.yaml'}"
    assert from_hf(checkpoint.folder / "student", start, config) == 0
    assert to_hf(start, tmp_path / "out") == 0

    assert_equal(weights_in(tmp_path / "out"), weights_in(checkpoint.folder / "student"))


def test_adapters_there_and_back(world: World, tmp_path: Path) -> None:
    checkpoint = world.checkpoints["adapter"]
    start = tmp_path / "run" / "checkpoints" / "step_000000"
    config = f"--config={checkpoint.run / 'config.yaml'}"
    assert from_hf(checkpoint.folder / "student", start, config) == 0
    assert to_hf(start, tmp_path / "out") == 0

    name = "adapter_model.safetensors"
    assert_equal(load_file(tmp_path / "out" / name), load_file(checkpoint.folder / "student" / name))
    # The first step of the warm-up has learning rate 0.
    (begun,) = in_world(1, train, [Training(checkpoint.plan, first_batches(checkpoint.plan, 1), start)], tmp_path)
    assert_equal(begun.weights, checkpoint.trained.weights)


def test_a_run_finds_it_and_its_place_in_the_data(world: World, tiny: Tiny) -> None:
    run = world.start.parent.parent
    plan = preflight(plan_of(tiny.overrides(*TRAIN, f"run.output_dir={run}", "run.resume=auto")).config)

    assert plan.progress is not None
    assert plan.progress.step == 0
    assert str(world.weights) in run_summary(plan).student
    assert provenance(plan, run_summary(plan)).student.model == world.weights.name
    assert (run / "config.yaml").is_file()
    assert isinstance(plan.data, Corpus)
    with plan.data.loader(plan.config) as loader:
        beginning = loader.state_dict()
        loader.load_state_dict(plan.progress.loader)
        assert loader.state_dict() == beginning


def test_later_checkpoints_know_it(world: World, tiny: Tiny, tmp_path: Path) -> None:
    """Bug: after a save and a resume, the header and the model card name student.model as the start."""
    run = shutil.copytree(world.start.parent.parent, tmp_path / "run")
    run_here(run, tiny.overrides(*TRAIN, "run.resume=auto", "train.max_steps=1"))
    newest = CheckpointManager(run / "checkpoints", keep_last=1).newest()
    assert newest is not None
    assert (newest.progress.step, newest.progress.started_from) == (1, str(world.weights))


def edited(checkpoint: Checkpoint, folder: Path, old: str, new: str) -> str:
    """Return the argument for a copy of the run's settings with `old` replaced."""
    text = (checkpoint.run / "config.yaml").read_text()
    assert old in text
    (folder / "edited.yaml").write_text(text.replace(old, new))
    return f"--config={folder / 'edited.yaml'}"


def copied(checkpoint: Checkpoint, folder: Path) -> Path:
    shutil.copytree(checkpoint.run, folder / "run")
    return folder / "run" / "checkpoints" / checkpoint.folder.name


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the last line on stderr of a command that must fail; lines of progress may precede it."""
    assert exit_status("checkpoint", *arguments) == 1
    printed = capsys.readouterr().err.splitlines()[-1]
    assert printed.startswith("error: ")
    return printed


def test_an_incomplete_checkpoint(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = copied(world.checkpoints["plain"], tmp_path)
    shutil.rmtree(checkpoint / "state")

    error = refused(capsys, "to-hf", f"--checkpoint={checkpoint}", f"--output={tmp_path / 'out'}")
    assert "it has no state; it is incomplete" in error
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run"]


def test_a_shard_that_is_damaged(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: only the sizes of files are compared with the manifest."""
    checkpoint = copied(world.checkpoints["plain"], tmp_path)
    shard = checkpoint / "state" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)

    error = refused(capsys, "to-hf", f"--checkpoint={checkpoint}", f"--output={tmp_path / 'out'}")
    assert re.search(r"state/__0_0\.distcp .* has the SHA-256 .*; use another checkpoint", error), error
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("has_manifest", [True, False])
def test_code_in_a_checkpoint_is_not_run(
    has_manifest: bool, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: `to-hf` runs code from a hostile checkpoint with correct hashes, or in an older version's form without."""
    checkpoint = copied(world.checkpoints["plain"], tmp_path)
    mark = tmp_path / "mark"
    (checkpoint / "state" / ".metadata").write_bytes(f"cposix\nmkdir\n(V{mark}\ntR.".encode())
    seal(checkpoint)
    if not has_manifest:
        (checkpoint / "manifest.json").unlink()
        record = checkpoint / "progress.json"
        record.write_text(record.read_text().replace('"format": 2', '"format": 1'))

    error = refused(capsys, "to-hf", f"--checkpoint={checkpoint}", f"--output={tmp_path / 'out'}")
    assert "it names posix.mkdir" in error
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run"]


def test_what_is_no_checkpoint(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = world.checkpoints["plain"].folder
    (tmp_path / ".incomplete_step_000004").mkdir()
    for path, message in {
        tmp_path / "absent": "there is no such folder",
        tmp_path / ".incomplete_step_000004": "not completely written",
        folder.parent: f"it is a folder of checkpoints; name one of them, such as {folder}",
        folder.parent.parent: f"it is a folder of checkpoints; name one of them, such as {folder}",
        folder / "student": "it is a Hugging Face folder already",
        tmp_path: "it has no progress.json; it is incomplete or not a checkpoint",
    }.items():
        error = refused(capsys, "to-hf", f"--checkpoint={path}", f"--output={tmp_path / 'out'}")
        assert error.startswith(f"error: --checkpoint={path}: ")
        assert message in error


@pytest.mark.parametrize("name", ["plain", "adapter"])
def test_settings_that_do_not_fit(
    name: str, world: World, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = world.checkpoints[name]
    command = ["to-hf", f"--checkpoint={checkpoint.folder}", f"--output={tmp_path / 'out'}"]
    other_model = edited(checkpoint, tmp_path, f"model: {tiny.student}", f"model: {tiny.teacher_same}")
    assert f" with student.model={tiny.teacher_same} and " in refused(capsys, *command, other_model)
    if name == "adapter":
        error = refused(capsys, *command, edited(checkpoint, tmp_path, "alpha: 12", "alpha: 24"))
        assert "student.lora.alpha=24, there 12; restore these settings" in error
        assert "--dtype=float16: student.lora.export=adapter" in refused(capsys, *command, "--dtype=float16")
    assert not (tmp_path / "out").exists()


def test_settings_that_are_absent(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = copied(world.checkpoints["plain"], tmp_path)
    config = tmp_path / "run" / "config.yaml"
    command = ["to-hf", f"--checkpoint={checkpoint}", f"--output={tmp_path / 'out'}"]
    config.write_text("a: [b")
    assert f"{config} cannot be read (" in refused(capsys, *command)
    config.unlink()
    assert f"--config: there is no {config}; give the run's settings" in refused(capsys, *command)
    assert "--config=absent.yaml: there is no absent.yaml" in refused(capsys, *command, "--config=absent.yaml")


def test_nothing_is_overwritten(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "note").write_text("mine")
    error = refused(capsys, "to-hf", f"--checkpoint={world.checkpoints['plain'].folder}", f"--output={tmp_path}")
    assert "it exists and is not empty" in error
    assert "it exists and is not empty" in refused(
        capsys, "from-hf", f"--model={world.weights}", f"--output={world.start}"
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["note"]


def test_a_start_must_be_where_a_run_looks_for_it(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(world.checkpoints["plain"], tmp_path).parent.parent
    model = f"--model={world.weights}"
    for name in ("checkpoints/step_000007", "step_000000"):
        error = refused(capsys, "from-hf", model, f"--output={run / name}")
        assert "name it RUN/checkpoints/step_000000" in error
    error = refused(capsys, "from-hf", model, f"--output={run / 'checkpoints' / 'step_000000'}")
    assert f"already has a checkpoint of step {STEPS}" in error
    assert [entry.name for entry in (run / "checkpoints").iterdir()] == [f"step_{STEPS:06d}"]


def test_weights_that_do_not_fit(world: World, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    untied = save_other(tmp_path / "untied", tiny, torch.float32, tied=False, seed=7)
    plain, adapter = world.checkpoints["plain"], world.checkpoints["adapter"]
    for checkpoint, model, message in (
        (plain, tiny.teacher_same, "does not fit the run's settings: "),
        (
            plain,
            untied,
            "lm_head.weight and model.embed_tokens.weight differ, but they are one tied weight in student.model",
        ),
        (plain, tmp_path / "absent", "no such folder"),
        (adapter, world.weights, "no adapter can be read there"),
        (plain, tmp_path, "config.json"),
    ):
        config = f"--config={checkpoint.run / 'config.yaml'}"
        output = tmp_path / "run" / "checkpoints" / "step_000000"
        error = refused(capsys, "from-hf", f"--model={model}", f"--output={output}", config)
        assert error.startswith(f"error: --model={model}")
        assert message in error
        assert not (tmp_path / "run").exists()
    other_alpha = edited(adapter, tmp_path, "alpha: 12", "alpha: 24")
    error = refused(capsys, "from-hf", f"--model={adapter.folder / 'student'}", f"--output={output}", other_alpha)
    assert "adapter_config.json has lora_alpha=12, but the run has 24 (student.lora.alpha=24)" in error


def test_a_model_that_computes_otherwise_is_pointed_out(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(world.weights, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))
    plain = world.checkpoints["plain"]
    start = tmp_path / "run" / "checkpoints" / "step_000000"
    command = ["from-hf", f"--model={tmp_path / 'model'}", f"--output={start}", f"--config={plain.run / 'config.yaml'}"]

    assert exit_status("checkpoint", *command) == 0
    assert "which differs: rms_norm_eps=1e-06, there 0.25\n" in capsys.readouterr().out
