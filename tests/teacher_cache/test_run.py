"""Runs with cached teachers against the same runs with loaded teachers."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nemo_opd.config.run import RunConfig, from_dict
from nemo_opd.demo import model_path
from nemo_opd.errors import ConfigError, DataError, OPDError
from nemo_opd.logging.loggers import read
from nemo_opd.logging.metrics import values
from nemo_opd.models.load import load_tokenizer
from nemo_opd.preflight.inputs import check_inputs
from nemo_opd.preflight.plan import preflight
from nemo_opd.teacher_cache.reader import CacheReader, shard_files
from nemo_opd.training.cache_build import CacheForm, CacheShard, build_cache
from nemo_opd.training.off_policy import distil
from nemo_opd.types import Batch
from tests.composition import compose
from tests.exit_status import exit_status
from tests.training.templates import STUDENT, TEACHER
from tests.workers.local import evaluate, first_batches, opened, train_step

pytestmark = pytest.mark.world
TEXTS = ["A short text.", "Another one, of some more words; it has 12 numbers.", "x = f(y)\n" * 20, "Die Größe. " * 30]
SETTINGS = ("teachers=demo_multi", "train.max_steps=2", "train.global_batch_size=4", "train.max_length=48", "loss=gold")


@dataclass(frozen=True)
class Built:
    live: RunConfig
    folder: Path

    def cached(self, form: str, **changes: Any) -> RunConfig:
        settings = self.live.model_dump(mode="json") | changes
        settings["teachers"] = [
            {"name": name, "type": "cached", "cache": str(self.folder / f"{name}_{form}"), "weight": 0.5}
            for name in self.live.active_names
        ]
        return from_dict(settings)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build caches of both demo teachers: hidden states, 8 tokens in 3 bytes, and all tokens in 4 bytes."""
    folder = tmp_path_factory.mktemp("caches")
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{text} {i}"}) + "\n" for i in range(3) for text in TEXTS))
    kinds = "arrow_files=[]", f"jsonl_files={texts}"
    files = [f"data.{split}.{kind}" for split in ("train", "validation") for kind in kinds]
    live = compose(*SETTINGS, *files)
    for i, name in enumerate(live.active_names):
        for form, cache_form in (("hidden", CacheForm(None)), ("some", CacheForm(8)), ("all", CacheForm(99_999, 4))):
            build_cache(live, i, folder / f"{name}_{form}", cache_form, shard_bytes=100_000)
    return Built(live, folder)


def curve(config: RunConfig, batches: Sequence[Batch] = ()) -> list[dict[str, float]]:
    """Return the metrics of two steps, of a validation, and of the teachers' bits per byte."""
    plan = preflight(config)
    batches = batches or first_batches(plan, 2)
    with opened(plan) as models:
        steps = [train_step(models, batch) for batch in batches]
        return [*steps, evaluate(models, batches[0]), values(models.evaluate_teachers(batches[0]))]


@pytest.fixture(scope="module")
def live_curve(built: Built) -> list[dict[str, float]]:
    return curve(built.live)


def test_hidden_states_equal_the_loaded_teacher_bit_for_bit(built: Built, live_curve: list[dict[str, float]]) -> None:
    """Catches a row of another token, a head of another shape, and windows that are cut differently than in the run."""
    assert curve(built.cached("hidden")) == live_curve


def test_all_tokens_equal_the_loaded_teacher(built: Built) -> None:
    """Catches scores over a part of the distribution, and rows that the handoff shifts."""
    aggregation = {"type": "weighted_sum", "weights": "max_probability"}
    live = from_dict(built.live.model_dump(mode="json") | {"aggregation": aggregation})
    for ours, theirs in zip(curve(built.cached("all", aggregation=aggregation)), curve(live), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-5)


def test_some_tokens_have_a_lower_divergence(built: Built, live_curve: list[dict[str, float]]) -> None:
    """Catches a lost tail: KD must be below the loaded teacher's, and not near 0."""
    some, live = curve(built.cached("some"))[0], live_curve[0]
    for name in ("kd/cross", "kd/same"):
        assert 0.1 * live[name] < some[name] < live[name]
    assert some["ce"] == live["ce"]


def test_the_type_is_inferred_and_no_model_is_loaded(built: Built) -> None:
    """Catches a cross-tokenizer cache without alignment, and a run that counts a teacher's weights or FLOPs."""
    plan = preflight(built.cached("some"))
    assert [teacher.type for teacher in plan.config.teachers] == ["cross_tokenizer", "same_tokenizer"]
    assert plan.utilization.teachers == (None, None)
    parts = [str(part) for memory in plan.memory.memories for part in memory.parts]
    assert not any("parameters" in part for part in parts if not part.startswith("student"))
    again = preflight(from_dict(plan.config.model_dump(mode="json")))  # from its config.yaml
    assert again.config == plan.config


def test_a_text_without_answers_is_named(built: Built) -> None:
    """Catches a step with zeros in place of answers."""
    plan = preflight(built.cached("hidden"))
    (batch,) = first_batches(plan, 1)
    batch.teachers[0].tokens.ids[0, 1] += 1
    with pytest.raises(OPDError, match="holds no answers of demo:teacher_cross to segment"):
        curve(built.cached("hidden"), [batch])


def test_missing_segments_are_named_before_the_run(built: Built, tmp_path: Path) -> None:
    """Catches other texts or a damaged shard that end a run at a later step."""
    settings = built.cached("hidden").model_dump(mode="json")
    settings["train"]["max_length"] -= 1
    with pytest.raises(DataError, match=r"teachers.0.cache: .* holds no answers of demo:teacher_cross to segment"):
        preflight(from_dict(settings))
    teacher = settings["teachers"][0]
    folder = shutil.copytree(teacher["cache"], tmp_path / "c")
    shard, *_ = shard_files(folder)
    shard.write_bytes(shard.read_bytes()[:-1])
    settings["teachers"] = [teacher | {"cache": str(folder), "on_missing": "ask"}]
    with pytest.raises(DataError, match=r"teachers.0.cache: .* is damaged \(its end is missing\)"):
        preflight(from_dict(settings))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": {"type": "gold", "temperature": 2.0}}, "temperature=2"),
        ({"loss": {"type": "p_kl", "vocab_topk": 9}}, "vocab_topk=9"),
    ],
)
def test_settings_that_a_cache_cannot_answer_are_refused_before_the_run(
    built: Built, changes: dict, message: str
) -> None:
    """Catches a loss that fails at the first step, with models loaded."""
    with pytest.raises(ConfigError, match=f"teachers.0.cache=.*{message}"):
        preflight(built.cached("some", **changes))


def test_bad_settings_are_refused(built: Built) -> None:
    """Catches a folder that is not a cache, and ignored settings of a model."""
    settings = built.live.model_dump(mode="json")
    entry = {"name": "cross", "type": "cached", "cache": str(built.folder)}
    with pytest.raises(DataError, match=r"teachers.0.cache: .* is not a teacher cache"):
        preflight(from_dict(settings | {"teachers": [entry]}))
    with pytest.raises(ConfigError, match="dtype is for a model that is loaded"):
        from_dict(settings | {"teachers": [entry | {"dtype": "float16"}]})
    with pytest.raises(ConfigError, match=r"rollout.type=hf: the student of this run samples its texts"):
        build_cache(compose(config_name="on_policy_demo"), 0, built.folder / "none", CacheForm(4))


def test_another_tokenizer_in_the_folder_is_refused(built: Built, tmp_path: Path) -> None:
    """Catches answers to one tokenizer's ids that are read as another tokenizer's, also with a run's config.yaml."""
    saved = preflight(built.cached("some")).config.model_dump(mode="json")
    folder = shutil.copytree(built.folder / "cross_some", tmp_path / "c")
    load_tokenizer("demo:student", key="").save_pretrained(folder)
    message = "teachers.0.cache: its answers were made with another tokenizer .*; put the tokenizer of demo:teach"
    for settings, model in ((built.cached("some").model_dump(mode="json"), {}), (saved, {"model": str(folder)})):
        settings["teachers"] = [settings["teachers"][0] | {"cache": str(folder)} | model]
        with pytest.raises(DataError, match=message):
            preflight(from_dict(settings))


def test_workers_share_the_segments_and_add_only_missing_ones(built: Built, tmp_path: Path) -> None:
    """Catches a segment that no worker or two workers answer, and one that is answered again."""
    parts = [build_cache(built.live, 1, tmp_path / "c", CacheForm(4), part=CacheShard(index, 2)) for index in range(2)]
    assert all(part.segments for part in parts)
    complete = CacheReader(built.folder / "same_some")
    assert sum(part.segments for part in parts) == len(complete) == len(CacheReader(tmp_path / "c"))
    again = build_cache(built.live, 1, tmp_path / "c", CacheForm(4))
    assert (again.segments, again.there) == (0, len(complete))


def test_the_commands(built: Built, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches flags that cut other segments than a run's settings do."""
    folder = tmp_path / "c"
    files = ["--model", "demo:teacher_same", "--data", str(built.folder / "texts.jsonl"), "--dtype", "float32"]
    assert exit_status("cache", "build", *files, "--output", str(folder), "--max-length", "48", "--top-k", "8") == 0
    assert exit_status("cache", "inspect", str(folder), "--verify", "--json") == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["top_k"] == 8
    assert facts["segments"] == len(CacheReader(folder))
    reader = CacheReader(folder)
    for segment in CacheReader(built.folder / "same_some").shards[0].keys[:5]:
        assert segment.tobytes() in reader
    assert exit_status("cache", "inspect", str(folder)) == 0
    assert "hidden size" not in capsys.readouterr().out  # only for the other form
    assert exit_status("cache", "inspect", str(folder), "--segment", "0") == 0
    assert "likeliest" in capsys.readouterr().out
    assert exit_status("cache", "inspect", str(folder), "--segment", "99999") == 1
    assert f"has {len(reader)}, counted from 0" in capsys.readouterr().err
    assert exit_status("cache", "build", *files, "--output", str(folder), "--hidden-states") == 1
    assert "is a cache of other answers" in capsys.readouterr().err
    run_arguments = ["--config", str(tmp_path / "run.yaml"), "--output", str(folder), "--top-k", "8"]
    assert exit_status("cache", "build", *run_arguments, "--dtype", "float32") == 1
    assert "--dtype=float32 has no effect with --config" in capsys.readouterr().err
    chats = ["--model", "demo:teacher_same", "--data", "chats.jsonl", "--messages-key", "chat", "--output", str(folder)]
    assert exit_status("cache", "build", *chats, "--top-k", "8", "--no-packing") == 1
    assert "--no-packing=True has no effect with --messages-key" in capsys.readouterr().err
    missing = ["--model", "demo:teacher_same", "--data", str(tmp_path / "none.jsonl")]
    assert exit_status("cache", "build", *missing, "--output", str(tmp_path / "none"), "--top-k", "8") == 1
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("content", "extra_arguments", "message"),
    [
        ("[1, 2]", [], "run.yaml: the configuration cannot be composed (primary config 'run' must be a DictConfig"),
        ("", [], "data: required, but not given"),
        ("run: {name: '${nowhere}'}", [], "run.name: Interpolation key 'nowhere' not found; correct the reference"),
        ("run: {name: a}", ["run.name=[1"], "run.name=[1: cannot be read as key=value; quote"),
        ("run: {name: a}", ["--urls", "http://127.0.0.1:1"], "--urls: requests to the servers need the model's name"),
    ],
)
def test_invalid_settings_are_one_message(
    content: str, extra_arguments: Sequence[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bugs: a traceback; servers that are named and never used."""
    (tmp_path / "run.yaml").write_text(content)
    arguments = [
        "--config",
        str(tmp_path / "run.yaml"),
        "--output",
        str(tmp_path / "cache"),
        "--top-k",
        "8",
        *extra_arguments,
    ]
    assert exit_status("cache", "build", *arguments) == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_a_configuration_with_defaults(tmp_path: Path) -> None:
    """Bug: the file that `nemo-opd init` writes is refused because of its `defaults`."""
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": TEXTS[1]}))
    assert exit_status("init", str(tmp_path)) == 0
    files = [f"data.{split}.jsonl_files={tmp_path / 'texts.jsonl'}" for split in ("train", "validation")]
    files += [f"data.{split}.arrow_files=null" for split in ("train", "validation")]
    config = ["--config", str(tmp_path / "distil.yaml"), "--output", str(tmp_path / "c"), "--top-k", "4"]
    assert exit_status("cache", "build", *config, *files) == 0
    assert len(CacheReader(tmp_path / "c")) == 1


def test_a_folder_with_other_files_is_not_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: the teacher's config.json and tokenizer.json replace a model's."""
    model = tmp_path / "model"
    shutil.copytree(model_path("student"), model)
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": TEXTS[0]}))
    arguments = ["--model", "demo:teacher_same", "--data", str(tmp_path / "texts.jsonl"), "--top-k", "4"]
    contents = {path.name: path.read_bytes() for path in model.iterdir()}
    assert exit_status("cache", "build", *arguments, "--output", str(model)) == 1
    assert "it is not a cache and holds other files, such as " in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in model.iterdir()} == contents


def test_conversations_keep_their_template(built: Built, tmp_path: Path) -> None:
    """Catches a run that renders conversations with another template than the cache's."""
    (tmp_path / "student.jinja").write_text(STUDENT)
    (tmp_path / "teacher.jinja").write_text(TEACHER)
    chats = tmp_path / "chats.jsonl"
    turns = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"It is {i}."}] for i in range(6)]
    chats.write_text("".join(json.dumps({"chat": chat}) + "\n" for chat in turns))
    settings = built.live.model_dump(mode="json")
    settings["data"] = {"train": {"jsonl_files": [str(chats)]}, "messages_key": "chat", "cache": False}
    settings["student"]["chat_template"] = str(tmp_path / "student.jinja")
    settings["teachers"][0]["chat_template"] = str(tmp_path / "teacher.jinja")
    live = from_dict(settings)
    for i, name in enumerate(live.active_names):
        build_cache(live, i, tmp_path / f"{name}_hidden", CacheForm(None))
    cached = Built(live, tmp_path).cached("hidden")
    assert [teacher.type for teacher in preflight(cached).config.teachers] == ["cross_tokenizer", "same_tokenizer"]
    assert curve(cached) == curve(live)


def test_a_run_resumes_from_its_checkpoint(built: Built, tmp_path: Path) -> None:
    """Catches a refused checkpoint, as it records the teacher's inferred type."""
    for steps in (1, 2):
        changes = {"max_steps": steps, "save_every": 1, "validate_every": None}
        config = built.cached("some", train=built.live.train.model_dump() | changes)
        run = {"output_dir": str(tmp_path / "run"), "resume": "auto"}
        config = from_dict(config.model_dump(mode="json") | {"run": run, "cluster": {"launcher": "local"}})
        check_inputs(config, on_policy=False)
        distil(config)
    assert [record["step"] for record in read(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]
