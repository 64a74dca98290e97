"""What preflight settles: directory, device, ranks, steps, memory; and what a dry run prints of it."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from nemo_opd.config import RunConfig
from nemo_opd.config.cluster import Cluster
from nemo_opd.config.teacher import SameTokenizerTeacher
from nemo_opd.config.train import Train
from nemo_opd.errors import ConfigError, DataError, ModelError
from nemo_opd.training import layout as module
from nemo_opd.training.layout import default_output_dir, require_batch_divides, resolve_device, resolve_ranks
from nemo_opd.training.memory import Phase
from nemo_opd.training.off_policy import distil
from nemo_opd.training.preflight import preflight
from nemo_opd.training.sides import require_same_tokenizer
from tests.composition import compose, nothing_is_created
from tests.tiny import Tiny

Configure = Callable[..., RunConfig]
NUM_DOCUMENTS = 24


@pytest.fixture
def configure(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Overrides → the configuration of a run with the tiny models, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    return lambda *overrides: compose(*tiny.overrides(*overrides))


@pytest.fixture(scope="module")
def config() -> RunConfig:
    """The demo's, for checks that look at no model."""
    return compose()


# The run's directory


class Noon(datetime):
    @classmethod
    def now(cls, tz: object = None) -> "Noon":
        return cls(2031, 2, 3, 12, 0, 5)


def test_the_default_directory_is_named_after_run_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "datetime", Noon)

    assert default_output_dir("mine") == Path("outputs/mine/2031-02-03_12-00-05")


def test_runs_of_the_same_second_do_not_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs of a --multirun, for example."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "datetime", Noon)
    names = []
    for _ in range(3):
        folder = default_output_dir("mine")
        folder.mkdir(parents=True)
        names.append(folder.name)

    assert names == ["2031-02-03_12-00-05", "2031-02-03_12-00-05_1", "2031-02-03_12-00-05_2"]


def test_a_given_directory_is_used_as_it_is(configure: Configure, tmp_path: Path) -> None:
    """Also where it is there already, with other things in it, and also to resume where there is nothing yet."""
    (tmp_path / "notes").write_text("mine")

    assert preflight(configure(f"run.output_dir={tmp_path}")).output_dir == tmp_path
    fresh = tmp_path / "a" / "b"
    assert preflight(configure(f"run.output_dir={fresh}", "run.resume=auto")).output_dir == fresh
    assert not fresh.parent.exists()


# Devices and ranks


@pytest.mark.parametrize(("gpu", "device"), [(True, "cuda"), (False, "cpu")])
def test_auto_follows_the_machine(gpu: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)

    assert resolve_device(Cluster()) == device
    assert resolve_device(Cluster(device="cpu")) == "cpu"


def test_a_remote_cluster_has_gpus_that_this_machine_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    remote = Cluster(device="cuda", num_nodes=16, gpus_per_node=8, address="auto")

    assert resolve_device(remote) == "cuda"
    assert resolve_ranks(remote, "cuda") == 128
    with pytest.raises(ConfigError, match=r"^cluster\.gpus_per_node: this machine has no GPU to count; say how many"):
        resolve_ranks(remote.model_copy(update={"gpus_per_node": None}), "cuda")


def test_all_gpus_of_a_machine_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    assert resolve_ranks(Cluster(), "cuda") == 4
    assert resolve_ranks(Cluster(gpus_per_node=2), "cuda") == 2
    assert resolve_ranks(Cluster(gpus_per_node=2), "cpu") == 1


@pytest.mark.parametrize("size", [1, 3, 4, 5, 6, 7, 11, 12, 13, 60])
def test_a_batch_divides_into_ranks_and_microbatches(size: int, config: RunConfig) -> None:
    """The size that the message proposes is one that passes."""

    def with_size(size: int) -> RunConfig:
        return config.model_copy(update={"train": Train(max_steps=1, global_batch_size=size, micro_batch_size=3)})

    if size % 6 == 0:
        require_batch_divides(with_size(size), 2)
        return
    with pytest.raises(ConfigError) as caught:
        require_batch_divides(with_size(size), 2)
    proposed = str(caught.value).partition("write train.global_batch_size=")[2].partition(",")[0]
    require_batch_divides(with_size(int(proposed)), 2)


# Steps


@pytest.mark.parametrize(
    ("batch", "micro", "epochs", "steps_per_epoch"),
    [(4, 2, 1, 6), (4, 2, 3, 6), (16, 2, 2, 2), (5, 1, 2, 5), (48, 2, 3, 1)],
)
def test_epochs_become_steps(configure: Configure, batch: int, micro: int, epochs: int, steps_per_epoch: int) -> None:
    """The last batch of an epoch may be short, and counts as a step."""
    plan = preflight(
        configure(
            "train.max_steps=null",
            f"train.epochs={epochs}",
            f"train.global_batch_size={batch}",
            f"train.micro_batch_size={micro}",
        )
    )

    assert len(plan.data.train) == NUM_DOCUMENTS
    assert plan.steps_per_epoch == steps_per_epoch
    assert plan.total_steps == epochs * steps_per_epoch


def test_max_steps_go_beyond_the_data(configure: Configure) -> None:
    assert preflight(configure("train.max_steps=1000")).total_steps == 1000


def test_validation_is_limited_or_absent(configure: Configure) -> None:
    limited = preflight(configure("data.validation.max_samples=5")).data.validation
    assert limited is not None
    assert len(limited) == 5
    assert preflight(configure("data.validation.arrow_files=null")).data.validation is None


# Teachers


def test_teachers_without_a_say_are_not_looked_at(configure: Configure) -> None:
    """kd_weight=0 trains on text alone, also where the teachers are not there."""
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
    """Also where one side has more tokens behind: the map must agree, not the size."""
    student, teacher = tokenizers(tiny)
    require_same_tokenizer(1, SAME, student, teacher)
    teacher.add_tokens(["<more>"])
    require_same_tokenizer(1, SAME, student, teacher)
    require_same_tokenizer(1, SAME, teacher, student)


def test_one_token_that_differs_is_another_tokenizer(tiny: Tiny) -> None:
    """Equal sizes say nothing: the last id is another token."""
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
    """Counted in the file; tied weights are in it once."""
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
    """Against the files: fp32 master, gradient and two moments; teachers and their output in their dtype."""
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


def test_parameters_are_sharded_over_ranks(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """So are the rows of a batch; a microbatch is each rank's own, and so is a head to make logits with."""
    monkeypatch.setattr(module, "num_cores", lambda: 2)
    (one,), (two,) = (preflight(configure(f"cluster.cpu_ranks={ranks}")).memory.memories for ranks in (1, 2))
    own = ("student: logits and their gradients", "head handed over")
    halved = ("student: parameters", "student: optimizer", "hidden states handed over", "cross: parameters")
    for first, second in zip(one.parts, two.parts, strict=True):
        if str(first).endswith(own):
            assert second.at(Phase.LOSS) == first.at(Phase.LOSS), str(first)
        if str(first).endswith(halved):
            assert second.at(Phase.LOSS) == first.at(Phase.LOSS) // 2, str(first)


def test_what_is_offloaded_is_settled(configure: Configure) -> None:
    """Workers and config.yaml get no `auto`; on CPU there is nowhere to offload to."""
    config = preflight(configure()).config

    assert config.student.offload is False
    assert [teacher.offload for teacher in config.teachers] == [False, False]


# Dry run


def test_a_dry_run_prints_the_plan_and_creates_nothing(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with nothing_is_created(tmp_path):
        distil(configure("run.dry_run=true", f"run.output_dir={tmp_path / 'run'}"))
    printed = capsys.readouterr().out
    rows = {cells[1].strip(): cells[2].strip() for line in printed.splitlines() if len(cells := line.split("│")) > 3}

    assert float(rows["overlap"]) > 0.5
    assert rows["recommended loss"] == "p_kl"
    assert rows["training documents"] == str(NUM_DOCUMENTS)
    assert rows["sequences a step"] == "4"
    assert rows["microbatches a rank"] == "2 of 2"
    assert rows["steps an epoch"] == "6"
    assert rows["steps"] == "4"
    assert {"cross: hidden states handed over", "same: parameters", "all"} <= rows.keys()


def test_special_tokens_beyond_the_embeddings_are_left_out(configure: Configure, tiny: Tiny, tmp_path: Path) -> None:
    """Gemma-3-1B has the tokenizer of its siblings that see, but no embedding for their image token."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.student)
    size = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    plan = preflight(configure(f"student.tokenizer={tmp_path / 'tokenizer'}"))

    assert plan.student.vocab_size == size
    with pytest.raises(DataError, match="a document holds '<image>', for which the model has no embedding"):
        plan.data.make_sample("a picture: <image>")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("student.parallelism.tp=2", "num_attention_heads=3 of LlamaForCausalLM cannot be cut into 2 equal parts"),
        ("teachers.0.parallelism.cp=2", "needs a GPU"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_before_a_process_starts(
    override: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, ModelError)) as caught:
        preflight(compose("cluster.cpu_ranks=2", override))
    assert str(caught.value).startswith(f"{override}: {says}")


def test_a_head_in_fp32_is_refused_before_a_process_starts(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a teacher in bf16; the student, in fp32 on a CPU, has nothing that would be rounded."""
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["lm_head"])

    with pytest.raises(ModelError, match=r"teachers.1.model=.*write teachers.1.dtype=float32"):
        preflight(configure("teachers.0.dtype=float32", "teachers.1.dtype=bfloat16"))
    preflight(configure("teachers.0.dtype=float32", "teachers.1.dtype=float32"))
