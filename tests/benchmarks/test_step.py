"""Counts and reports of the step benchmark, and the layouts in the docs."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from nemo_opd.errors import ConfigError
from nemo_opd.preflight.flops import Flops
from nemo_opd.preflight.model_info import model_size
from tests.tokenizers_fixture import CORPUS, byte_level, sentencepiece
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def step() -> Iterator[dict[str, ModuleType]]:
    """Yield the benchmark's modules, keyed by name; they import each other as scripts do."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs" / "figures"))
        patch.syspath_prepend(str(ROOT / "benchmarks"))  # ahead: both have an `alignment`
        import large_vocabulary
        import scaling
        import scaling_models
        import step_flops
        import step_gold
        import step_models
        import step_ours
        import step_report

        modules = (
            large_vocabulary,
            scaling,
            scaling_models,
            step_flops,
            step_gold,
            step_models,
            step_ours,
            step_report,
        )
        yield {module.__name__: module for module in modules}
        for module in modules:
            sys.modules.pop(module.__name__, None)


@pytest.mark.parametrize("is_trained", [True, False])
def test_timed_products_have_the_flops_of_a_step(step: dict[str, ModuleType], is_trained: bool) -> None:
    """Bug: the yardstick lacks a matrix or a pass, or counts it twice, so that the ratio is meaningless."""
    size = model_size(LlamaConfig(vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=3))
    work = step["step_flops"].StepWork((300, 212), ((290, 200),), (333,))
    products = step["large_vocabulary"].step_products(size, size, work, is_trained=is_trained)
    flops = work.flops(size, {"teacher": size})
    expected = flops["student"].total * (3 if is_trained else 1) / 3 + flops["teacher"].total
    # Causal attention has n (n + 1) / 2 scores for n >= 200 tokens, the yardstick n · n / 2.
    assert sum(product.flops for product in products) == pytest.approx(expected, rel=1 / 200)


def test_a_teachers_head_is_counted_where_it_is_compared(step: dict[str, ModuleType]) -> None:
    size = model_size(LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3))
    work = step["step_flops"].StepWork((10, 8), ((12, 9), (10, 8)), (7, 16))
    flops_of = work.flops(size, {"cross": size, "same": size})
    head = 32 * 96
    assert {name: flops.head for name, flops in flops_of.items()} == {
        "student": 6 * head * 18,
        "cross": 2 * head * 7,
        "same": 2 * head * 16,
    }
    assert flops_of["cross"].matrices * 18 * 3 == flops_of["student"].matrices * 21


def test_presets_are_the_models_that_they_are_named_for(step: dict[str, ModuleType]) -> None:
    """Catches presets without the published number of weights."""
    presets = step["step_models"].PRESETS
    assert model_size(presets["llama_1b"]()).parameters == 1_235_814_400
    assert model_size(presets["llama_3b"]()).parameters == 3_212_749_824
    assert model_size(presets["qwen_4b"]()).parameters == 4_022_468_096


@pytest.mark.world
def test_models_are_made_in_a_process_that_ends(step: dict[str, ModuleType], tmp_path: Path) -> None:
    """Bug: models created in the driver leave memory in its GPU allocator, which no estimate includes."""
    models = step["step_models"]
    to_write = [models.Written("llama_tiny", "demo:student", tmp_path / name) for name in ("student", "same")]
    random_state = torch.get_rng_state()  # creating a model would change it
    models.write_apart(to_write, torch.float32, "cpu")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all((model.folder / "model.safetensors").is_file() for model in to_write)

    written = (to_write[0].folder / "model.safetensors").stat().st_mtime_ns
    models.write_apart(to_write, torch.float32, "cpu")
    assert (to_write[0].folder / "model.safetensors").stat().st_mtime_ns == written


def test_a_tokenizer_that_is_far_smaller_than_the_head_is_refused(step: dict[str, ModuleType], tmp_path: Path) -> None:
    """Bug: without real tokenizers, heads are cut to some thousand columns, and the loss costs almost nothing."""
    models = step["step_models"]
    with pytest.raises(SystemExit, match=r"llama_1b: its head has 128,256 rows .* set NEMO_OPD_TOKENIZERS"):
        models.write_apart([models.Written("llama_1b", "demo:student", tmp_path / "a")], torch.float32, "cpu")
    models.check_tokenizer("qwen_4b", 151_936, 151_669)


def test_texts_fill_a_sequence_of_neither_tokenizer_beyond_its_end(step: dict[str, ModuleType], tmp_path: Path) -> None:
    models, length = step["step_models"], 40
    tokenizers = (byte_level(), sentencepiece())
    text = "\n".join(CORPUS) * 20
    file = models.write_texts(tmp_path / "texts.jsonl", text, tokenizers, count=5, length=length)
    texts = [json.loads(row)["text"] for row in file.read_text(encoding="utf-8").splitlines()]
    assert len(set(texts)) == 5
    for line in texts:
        lengths = [len(tokenizer.encode(line, add_special_tokens=False)) for tokenizer in tokenizers]
        # A cut text may have one more token at its end; the room for marks allows it.
        assert length - 2 * models.MARKS <= max(lengths) <= length


BASE = {
    "train": {"max_steps": 2},
    "student": {"model": "demo:student"},
    "teachers": [{"name": "t", "type": "cross_tokenizer", "model": "demo:teacher_cross"}],
    "data": {"train": {"jsonl_files": ["a"]}},
}


def test_overrides_are_settings_of_the_run(step: dict[str, ModuleType]) -> None:
    configured = step["step_ours"].configured
    config = configured(BASE, ["teachers.0.parallelism.tp=2", "cluster.cpu_ranks=4", "student.offload=true"])
    assert config.teachers[0].parallelism.tp == 2
    assert config.cluster.cpu_ranks == 4
    assert config.student.offload is True
    with pytest.raises(ConfigError, match=r"student\.paralelism"):
        configured(BASE, ["student.paralelism.tp=2"])


def case(step: dict[str, ModuleType], gold: list[float] | None) -> Any:
    report, flops = step["step_report"], step["step_flops"]
    record = {"perf/step_s": 2.0, "perf/data_wait_s": 0.5, "perf/teacher_s": 0.5, "perf/loss_s": 0.75}
    return report.Case(
        student="small",
        teacher="large",
        loss="gold",
        length=1024,
        layout="one rank each",
        threads=1,
        work=flops.StepWork((100,), ((90,),), (80,)),
        flops={"student": Flops(10**12, 10**12, 0), "teacher": Flops(10**12, 0, 10**12)},
        devices=2,
        ours=report.Way(report.OURS, [1.0, 2.0, 4.0], 1.5),
        gold=None if gold is None else report.Way(report.GOLD, gold, 2.5),
        gold_is_missing="" if gold else "TRL is not installed",
        records=[record, record],
        memory=[step["step_ours"].MemoryFound("workers", 1.0, 1.25)],
        load=(1.0, 2.0),
    )


def test_the_report_has_the_results(step: dict[str, ModuleType], tmp_path: Path) -> None:
    """Catches ratios of medians instead of rounds, and MFU over the wrong number of devices (GOLD uses one)."""
    report = step["step_report"]
    both = case(step, [4.0, 2.0, 1.0])
    assert both.ratio == 1.0
    assert both.mfu(both.ours, 1e12) == pytest.approx(4 / (2 * 2))
    assert both.mfu(both.gold, 1e12) == pytest.approx(4 / 2)
    assert both.parts() == {"data": 0.5, "teachers": 0.5, "loss": 0.75, "other": 0.25}
    text = report.write(tmp_path, report.Found([both, case(step, None)], 1e12, {"commit": "abc"}), "formula")
    assert (tmp_path / "step.md").read_text(encoding="utf-8") == text
    assert "| small ← large, 1,024 tokens, gold | nemo_opd | 2.00 | 1.00–4.00 | 50 | 100.0% | 1.00 | 1.50 |" in text
    assert "not measured: TRL is not installed" in text
    assert "| small ← large, 1,024 tokens, gold | loss | 750.0 | 37.5% |" in text
    stored = json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))
    assert stored["cases"][0]["gold"]["seconds"] == [4.0, 2.0, 1.0]
    assert stored["facts"] == {"commit": "abc"}


@pytest.mark.world
def test_the_fullest_moment_of_a_gpu_counts(
    step: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a single reading after the steps, when caches are freed, was below the student's tensors."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho 5; echo 40; touch {tmp_path}/read; echo 3; exec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with step["step_ours"].watching_gpus() as most:
        wait_until(lambda: (tmp_path / "read").exists() and most() > 5 * 2**20, "the second reading")
    assert most() == 40 * 2**20


def test_a_missing_baseline_is_said(step: dict[str, ModuleType]) -> None:
    """Bug: GOLD runs out of memory, and the check of a GPU passes without a comparison."""
    report = step["step_report"]
    both, alone = case(step, [4.0, 4.0, 4.0]), case(step, None)
    assert report.gold_is_missing([both, alone]) == [f"{alone.name}: GOLD is not measured: TRL is not installed"]
    assert both.summary(1e12) == {
        "case": both.name,
        "nemo_opd": {"tokens/s": 50.0, "MFU": 1.0, "peak, GiB": 1.5},
        "TRL GOLD": {"tokens/s": 25.0, "MFU": 1.0, "peak, GiB": 2.5},
        "ours / GOLD": 0.5,
    }
    assert alone.summary(None) == {
        "case": alone.name,
        "nemo_opd": {"tokens/s": 50.0, "MFU": None, "peak, GiB": 1.5},
        "ours / GOLD": None,
    }


@pytest.mark.parametrize(
    ("estimated", "mfu", "problem"),
    [
        (11.9, 0.3, None),
        (12.1, 0.3, "10.00 GiB measured, 12.10 GiB estimated"),
        (7.9, 0.3, "10.00 GiB measured, 7.90 GiB estimated"),
        (10.0, 0.29, "MFU 29.0% is below 30%"),
    ],
)
def test_a_wrong_estimate_or_a_low_mfu_is_a_problem(
    step: dict[str, ModuleType], estimated: float, mfu: float, problem: str | None
) -> None:
    memory = [step["step_ours"].MemoryFound("workers", 10.0, estimated)]
    one = replace(case(step, None), records=[{"perf/mfu": value} for value in (0.1, mfu, 0.9)], memory=memory)
    problems = step["step_report"].too_slow_or_misjudged([one], 0.3)
    assert len(problems) == (problem is not None)
    assert problem is None or problems[0].endswith(problem)


def test_an_error_of_the_other_trainer_is_one_line(
    step: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs: the benchmark waits for a process that has died; a table cell has many lines."""
    gold = step["step_gold"]

    def fails(*_: object) -> None:
        raise ValueError("no such loss\nsecond line")

    monkeypatch.setattr(gold, "train", fails)
    ours, theirs = Pipe()
    gold.work(theirs, None)
    assert ours.recv() == "ValueError: no such loss"


def test_examples_of_the_docs_are_not_refused(step: dict[str, ModuleType]) -> None:
    """Bug: a layout in docs/scaling.md does not fit, as a dry run would say."""
    scaling = step["scaling"]
    page = scaling.PAGE.read_text(encoding="utf-8")
    examples = scaling.documented(page)
    assert len(examples) == page.count("```yaml")
    for example in examples:
        assert scaling.check(example).memory.fits, example.title
