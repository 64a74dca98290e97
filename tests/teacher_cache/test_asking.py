"""Caches filled by a teacher on several ranks, with contexts, and for segments that a run's cache lacks."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_opd.cli.main import main
from nemo_opd.config.run import RunConfig, from_dict
from nemo_opd.errors import ConfigError, DataError
from nemo_opd.models.stored_output import load_head, sparse_layout
from nemo_opd.preflight.plan import preflight
from nemo_opd.teacher_cache.reader import CacheReader, shard_files
from nemo_opd.teacher_cache.shard import read_manifest
from nemo_opd.training import cache_build
from nemo_opd.training.cache_build import CacheForm, build_cache, fill_caches
from tests.composition import compose
from tests.exit_status import exit_status
from tests.teacher_cache.test_run import TEXTS, curve
from tests.training.templates import STUDENT, TEACHER
from tests.workers.local import RTOL, in_world

pytestmark = pytest.mark.world
SETTINGS = ("train.max_steps=2", "train.global_batch_size=4", "train.max_length=48", "loss=gold", "data.cache=false")


def texts_in(folder: Path, number: int = 3) -> Path:
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": f"{text} {i}"}) + "\n" for i in range(number) for text in TEXTS))
    return file


@pytest.fixture
def live(tmp_path: Path) -> RunConfig:
    return run_with("demo_single", tmp_path)


def run_with(teachers: str, folder: Path) -> RunConfig:
    files = [f"data.{split}.arrow_files=[]" for split in ("train", "validation")]
    files += [f"data.train.jsonl_files={texts_in(folder)}", "train.validate_every=null"]
    return compose(f"teachers={teachers}", *SETTINGS, *files)


def cached(live: RunConfig, folder: Path, **more: Any) -> RunConfig:
    (teacher,) = live.teachers
    entry = {"name": teacher.name, "type": "cached", "cache": str(folder), **more}
    return from_dict(live.model_dump(mode="json") | {"teachers": [entry]})


@dataclass(frozen=True)
class Job:
    config: RunConfig
    folder: Path
    form: CacheForm


def build_all(jobs: Sequence[Job]) -> list[int]:
    return [build_cache(job.config, 1, job.folder, job.form).segments for job in jobs]


def test_several_ranks_equal_one(tmp_path: Path) -> None:
    """Catches another rank's rows, rows of half the vocabulary, a head in the wrong order, and a deadlock when some
    ranks have no segments left.
    """
    layouts: dict[str, dict[str, Any]] = {"sharded": {}, "cut": {"tp": 2}}
    forms, live = {"hidden": CacheForm(None), "some": CacheForm(8, 4)}, run_with("demo_multi", tmp_path)
    build_all([Job(live, tmp_path / form, forms[form]) for form in forms])
    jobs = []
    for name, parallelism in layouts.items():
        settings = live.model_dump(mode="json")
        settings["teachers"][1]["parallelism"] |= parallelism
        jobs += [Job(from_dict(settings), tmp_path / f"{form}_{name}", forms[form]) for form in forms]
    (numbers,) = in_world(2, build_all, [jobs], tmp_path / "world")

    assert set(numbers) == {len(CacheReader(tmp_path / "hidden"))}
    for job in jobs:
        alone = CacheReader(tmp_path / job.folder.name.partition("_")[0])
        for segment in alone.each():
            ids = np.frombuffer(np.pad(segment.tokens, ((0, 0), (0, 4 - segment.tokens.shape[1]))).tobytes(), "<i4")
            rows, expected = (decoded(reader, ids) for reader in (CacheReader(job.folder), alone))
            torch.testing.assert_close(rows, expected, rtol=RTOL, atol=1e-4)
        if job.form.top_k is None:
            heads = [load_head(folder, "cpu") for folder in (job.folder, alone.folder)]
            assert torch.equal(heads[0].weight, heads[1].weight)


def decoded(reader: CacheReader, ids: np.ndarray) -> torch.Tensor:
    rows = torch.from_numpy(np.array(reader.segment(ids).rows))
    if reader.manifest.form == "hidden_states":
        return rows.view(torch.float32)
    sparse = sparse_layout(reader.manifest).decode(rows)
    return torch.cat([sparse.log_p, sparse.log_p_next[:, None].nan_to_num(neginf=0), sparse.log_rest[:, None]], 1)


def test_a_cache_that_lacks_texts_is_filled(live: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a damaged segment that is not replaced or is replaced in each run, and a teacher that is loaded although
    nothing is missing.
    """
    folder = tmp_path / "c"
    num_segments = build_cache(live, 0, folder, CacheForm(None), shard_bytes=30_000).segments
    removed, damaged, *_ = shard_files(folder)
    removed.unlink()
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    config = cached(live, folder, on_missing="ask")
    fill_caches(preflight(config))

    assert curve(config) == curve(live)
    assert len(CacheReader(folder)) == num_segments + 1  # the damaged segment is still there
    monkeypatch.setattr(cache_build, "CacheTeacher", None)
    fill_caches(preflight(config))


def test_a_cache_is_filled_with_its_own_handoff(live: RunConfig, tmp_path: Path) -> None:
    """Bug: a run with another handoff adds segments from bfloat16 logits to a cache from hidden states."""
    folder, form = tmp_path / "c", CacheForm(4)
    build_cache(live, 0, folder, form)
    with_logits = from_dict(live.model_dump(mode="json") | {"handoff": {"type": "logits"}})
    with pytest.raises(DataError, match="handoff is hidden_states there and logits here"):
        build_cache(with_logits, 0, folder, form)
    for shard in shard_files(folder):
        shard.unlink()
    fill_caches(preflight(cached(with_logits, folder, on_missing="ask")))
    assert read_manifest(folder).handoff == "hidden_states"
    assert len(CacheReader(folder))


def test_a_damaged_or_missing_head_is_written_again(live: RunConfig, tmp_path: Path) -> None:
    """Catches training on a head with a flipped bit, and a command that does not restore a missing head if all segments
    are there.
    """
    folder = tmp_path / "c"
    build_cache(live, 0, folder, CacheForm(None))
    head = folder / "head.safetensors"
    written = head.read_bytes()
    config = cached(live, folder)
    head.write_bytes(written[:-3] + bytes([written[-3] ^ 0x40]) + written[-2:])
    with pytest.raises(DataError, match=r"teachers.0.cache: .*head.safetensors is damaged"):
        preflight(config)
    fill_caches(preflight(cached(live, folder, on_missing="ask")))
    assert head.read_bytes() == written
    head.unlink()
    with pytest.raises(DataError, match=r"teachers.0.cache: .*head.safetensors cannot be read"):
        preflight(config)
    assert build_cache(live, 0, folder, CacheForm(None)).segments == 0
    assert head.read_bytes() == written


def test_verify_finds_a_damaged_head(live: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: the command reports an intact cache although no run can read it."""
    build_cache(live, 0, tmp_path / "c", CacheForm(None))
    head = tmp_path / "c" / "head.safetensors"
    head.write_bytes(head.read_bytes()[:-1] + b"?")
    assert exit_status("cache", "inspect", str(tmp_path / "c"), "--verify") == 1
    assert "head.safetensors is damaged" in capsys.readouterr().err


def test_a_changed_model_does_not_fill_a_cache(live: RunConfig, tmp_path: Path) -> None:
    """Catches answers of two teachers in one cache."""
    folder = tmp_path / "c"
    build_cache(live, 0, folder, CacheForm(4))
    manifest = folder / "cache.yaml"
    lines = [
        f"weights: '{'0' * 64}'" if line.startswith("weights:") else line for line in manifest.read_text().splitlines()
    ]
    manifest.write_text("\n".join(lines))
    for path in shard_files(folder):
        path.unlink()
    with pytest.raises(DataError, match="is a cache of other answers: weights is"):
        fill_caches(preflight(cached(live, folder, on_missing="ask")))
    with pytest.raises(ConfigError, match=r"on_missing=ask has no effect without cache; set teachers\.0\.cache"):
        compose("teachers=demo_single", "teachers.0.on_missing=ask")


@pytest.mark.parametrize("type_", ["same_tokenizer", "cross_tokenizer"])
def test_a_cache_with_a_context(type_: str, tmp_path: Path) -> None:
    """Catches a run that renders another prompt than the cache's, and answers with another record's context."""
    for name, template in (("student", STUDENT), ("teacher", TEACHER)):
        (tmp_path / f"{name}.jinja").write_text(template)
    rows = [
        {
            "chat": [{"role": "user", "content": f"{i % 3}?"}, {"role": "assistant", "content": f"It is {i % 3}."}],
            "hint": f"think of {i}",
        }
        for i in range(6)
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kind = type_.removesuffix("_tokenizer")
    teacher = {
        "name": kind,
        "type": type_,
        "model": f"demo:teacher_{kind}",
        "dtype": "float32",
        "chat_template": str(tmp_path / "teacher.jinja"),
        "context": {"template": "{prompt} ({hint})"},
    }
    settings = compose(*SETTINGS, "teachers=demo_single").model_dump(mode="json")
    settings["data"] = {"train": {"jsonl_files": [str(file)]}, "messages_key": "chat", "cache": False}
    settings["student"]["chat_template"] = str(tmp_path / "student.jinja")
    live = from_dict(settings | {"teachers": [teacher]})
    assert build_cache(live, 0, tmp_path / "c", CacheForm(None)).segments == 6

    config = cached(live, tmp_path / "c", context=teacher["context"])
    assert [teacher_config.type for teacher_config in preflight(config).config.teachers] == [type_]
    assert curve(config) == curve(live)
    with pytest.raises(ConfigError, match=r"context\.gap_every=5: cache="):
        cached(live, tmp_path / "c", context={**teacher["context"], "gap_every": 5})


def test_the_command_can_run_twice_in_a_process(
    live: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a second process group in the same process."""
    files = ["--model", "demo:teacher_same", "--data", str(texts_in(tmp_path)), "--output", str(tmp_path / "c")]
    for output in ("0 were there", "0 segments of 0 tokens added"):
        assert main(["cache", "build", *files, "--top-k", "4"]) == 0
        assert output in capsys.readouterr().out
