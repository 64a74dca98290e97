"""Which settings may differ between a checkpoint and the run that continues it."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_opd.checkpoint.manager import CheckpointManager, Progress
from nemo_opd.checkpoint.run_directory import CHECKPOINTS, flatten, identity, progress_to_resume, require_same_run
from nemo_opd.config import RunConfig
from nemo_opd.config.run import from_dict
from nemo_opd.errors import CheckpointError
from tests.composition import compose

FREE = {
    "run.name=other": {"run.name"},
    "run.output_dir=/elsewhere": {"run.output_dir"},
    "run.resume=auto": {"run.resume"},
    "run.dry_run=true": {"run.dry_run"},
    "train.max_steps=900": {"train.max_steps"},
    "train.micro_batch_size=2": {"train.micro_batch_size"},
    "train.validate_every=7": {"train.validate_every"},
    "train.save_every=7": {"train.save_every"},
    "train.keep_last=7": {"train.keep_last"},
    "data.num_workers=3": {"data.num_workers"},
    "data.validation.max_samples=5": {"data.validation.max_samples"},
    "student.activation_checkpointing=true": {"student.activation_checkpointing"},
    "student.offload=true": {"student.offload"},
    "teachers.1.offload=true": {"teachers.1.offload"},
    "handoff.transport=shared_memory": {"handoff.transport"},
    "cluster.cpu_ranks=2": {"cluster.cpu_ranks"},
    "logging.tensorboard.enabled=true": {"logging.tensorboard.enabled"},
}
BOUND = {
    "run.seed=1": {"run.seed"},
    "train.global_batch_size=32": {"train.global_batch_size"},
    "train.max_length=64": {"train.max_length"},
    "train.gradient_clip=2.0": {"train.gradient_clip"},
    "student.model=/other": {"student.model"},
    "student.tokenizer=/other": {"student.tokenizer"},
    "student.dtype=bfloat16": {"student.dtype"},
    "student.optimizer.lr=1e-4": {"student.optimizer.lr"},
    "student.optimizer.betas=[0.9,0.99]": {"student.optimizer.betas.1"},
    "student.scheduler.warmup_steps=3": {"student.scheduler.warmup_steps"},
    "teachers.0.weight=0.8": {"teachers.0.weight"},
    "teachers.0.model=/other": {"teachers.0.model"},
    "teachers.0.projection=/other": {"teachers.0.projection"},
    "loss.divergence=reverse_kl": {"loss.divergence"},
    "loss.temperature=2.0": {"loss.temperature"},
    "data.train.arrow_files=/other": {"data.train.arrow_files.0"},
    "data.text_key=content": {"data.text_key"},
    "data.shuffle=false": {"data.shuffle"},
}


@pytest.fixture(scope="module")
def base() -> RunConfig:
    return compose("run.output_dir=/run")


def changed(config: RunConfig, override: str) -> RunConfig:
    key, _, value = override.partition("=")
    *path, last = key.split(".")
    data: Any = config.model_dump(mode="json")
    node = data
    for part in path:
        node = node[int(part)] if isinstance(node, list) else node[part]
    node[last] = yaml.safe_load(value)
    return from_dict(data)


def keys_that_differ(a: RunConfig, b: RunConfig) -> set[str]:
    ours, theirs = (dict(flatten(config.model_dump(mode="json"))) for config in (a, b))
    return {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}


@pytest.mark.parametrize("override", FREE)
def test_speed_placement_reporting_and_length_may_change(override: str, base: RunConfig) -> None:
    changed_config = changed(base, override)

    assert keys_that_differ(base, changed_config) == FREE[override]  # the override did something
    require_same_run(identity(base), identity(changed_config), "step_000001")


@pytest.mark.parametrize("override", BOUND)
def test_what_is_learned_may_not(override: str, base: RunConfig) -> None:
    changed_config = changed(base, override)
    (key,) = BOUND[override]

    assert keys_that_differ(base, changed_config) == {key}
    with pytest.raises(CheckpointError) as caught:
        require_same_run(identity(base), identity(changed_config), "step_000001")
    message = str(caught.value)
    assert message.startswith(
        f"step_000001 is a checkpoint of another run: {key}={identity(changed_config)[key]!r}, there "
    )
    assert repr(identity(base)[key]) in message
    assert message.endswith("restore these settings, or start anew with another run.output_dir")


def test_every_setting_is_on_one_of_the_two_sides(base: RunConfig) -> None:
    """Catches a field of another section that became free, and a field of a free section that became bound."""
    everything = dict(flatten(base.model_dump(mode="json")))
    free = everything.keys() - identity(base).keys()

    touched = {key.split(".")[0] for key in free}
    assert touched == {
        "run",
        "train",
        "data",
        "student",
        "teachers",
        "handoff",
        "evaluation",
        "health",
        "cluster",
        "logging",
    }
    assert {key for key in everything if key.split(".")[0] in ("health", "cluster", "logging")} <= free
    assert not any(key.startswith(("loss.", "aggregation.", "student.optimizer.")) for key in free)


def test_another_number_of_teachers_is_another_run(base: RunConfig) -> None:
    with pytest.raises(CheckpointError, match=r"and \d+ more; restore these settings"):
        require_same_run(identity(base), identity(compose("teachers=demo_single")), "step_000001")


def test_how_samples_are_obtained_and_judged_may_change() -> None:
    """Bug: a run cannot go on after its server moved or an evaluation was added."""
    server = ("rollout=server", "rollout.staleness=1")
    saved_config = compose(*server, config_name="on_policy_demo")
    current = compose(
        *server,
        "rollout.url=http://other:8000",
        "rollout.concurrency=7",
        "rollout.retries=9",
        "rollout.request_timeout_s=9",
        "rollout.start_timeout_s=9",
        "evaluation=null",
        "health.action=stop",
        "logging.console.interval_s=1",
        config_name="on_policy_demo",
    )
    require_same_run(identity(saved_config), identity(current), "step_000001")
    older_settings = dict(flatten(saved_config.model_dump(mode="json", exclude={"data": {"packing"}})))
    require_same_run(older_settings, identity(current), "step_000001")

    other_policy = compose(*server, "rollout.temperature=0.5", "rollout.program=sglang", config_name="on_policy_demo")
    with pytest.raises(CheckpointError, match=r"rollout\.program='sglang', there 'vllm'; rollout\.temperature=0\.5"):
        require_same_run(identity(saved_config), identity(other_policy), "step_000001")


def test_it_survives_the_file() -> None:
    """Bug: settings read back from JSON differ from the computed ones in a tuple or a float."""
    settings = identity(compose("student.optimizer.lr=3.3e-7", "student.optimizer.betas=[0.9,0.98]"))

    assert json.loads(json.dumps(settings)) == settings


def test_a_setting_that_is_new_and_off_is_no_difference(base: RunConfig) -> None:
    """Bug: a key that an older version's checkpoint lacks ends the run although it is off."""
    current = identity(base)
    saved = {key: value for key, value in current.items() if key != "student.tokenizer"}

    assert current["student.tokenizer"] is None
    require_same_run(saved, current, "step_000001")


def save(checkpoints: CheckpointManager, step: int, config: RunConfig) -> None:
    with checkpoints.writing(Progress(step, {}, identity(config))):
        pass


def test_a_checkpoint_from_before_rows_of_documents_is_one_without_them(base: RunConfig) -> None:
    saved = {key: value for key, value in identity(base).items() if key != "data.packing"}
    without = base.model_copy(update={"data": base.data.model_copy(update={"packing": False})})
    require_same_run(saved, identity(without), "step_000005")
    with pytest.raises(CheckpointError, match=r"data.packing=True, there False"):
        require_same_run(saved, identity(base), "step_000005")
    sampled = identity(compose(config_name="on_policy_demo"))
    require_same_run({key: value for key, value in sampled.items() if key != "data.packing"}, sampled, "step_000005")


def test_the_newest_of_the_same_run_is_found(tmp_path: Path, base: RunConfig) -> None:
    checkpoints = CheckpointManager(tmp_path / CHECKPOINTS, keep_last=5)
    resumed = ("run.resume=auto", f"run.output_dir={tmp_path}")
    assert progress_to_resume(compose(*resumed), tmp_path) is None
    save(checkpoints, 3, base)
    save(checkpoints, 12, base)

    newest = progress_to_resume(compose("train.max_steps=900", *resumed), tmp_path)
    assert newest is not None
    assert newest.progress.step == 12
    with pytest.raises(CheckpointError, match=r"step_000012 is a checkpoint of another run: run\.seed=5, there 0"):
        progress_to_resume(compose("run.seed=5", *resumed), tmp_path)
