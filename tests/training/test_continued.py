"""Validation texts that the student continues before and after training, in the report of an off-policy run."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_opd.logging.scores import SampleLog
from tests.tiny import Tiny
from tests.training.launch import run_here


def test_texts_are_continued_as_transformers_continues_them(tiny: Tiny, tmp_path: Path) -> None:
    """Catches continuations from other weights, from a wrong position, or cut before they end."""
    run_here(
        tmp_path,
        tiny.overrides(
            "train.max_steps=2",
            "student.optimizer.lr=0.05",
            "student.scheduler.warmup_steps=0",
            "logging.continued_texts=2",
            teachers=1,
        ),
    )
    samples = SampleLog(tmp_path / "samples.jsonl").read()
    assert [(line.step, line.question, line.kind) for line in samples] == [
        (step, text, "continued") for step in (0, 2) for text in (0, 1)
    ]
    for folder, step in ((tiny.student, 0), (tmp_path / "final", 2)):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        for line in (line for line in samples if line.step == step):
            ids = torch.tensor([tokenizer(line.prompt).input_ids])
            continued = model.generate(ids, max_new_tokens=32, do_sample=False)[0, ids.shape[1] :]
            assert tokenizer.decode(continued, skip_special_tokens=True) == line.response
    assert len({line.response for line in samples if not line.question}) == 2
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Validation texts continued" in page
    assert "reward" not in page.partition("config.yaml</summary>")[0]


def test_a_continued_run_keeps_the_texts_of_its_start(
    tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches a restarted run that loses the texts from before training, writes texts twice, or loses metrics without
    a warning.
    """
    settings = tiny.overrides("train.max_steps=1", "logging.continued_texts=1", teachers=1)
    run_here(tmp_path, settings)
    (tmp_path / "metrics.jsonl").unlink()
    run_here(tmp_path, [*settings, "run.resume=auto"])
    assert "; curves begin after step 1" in capfd.readouterr().err
    assert [line.step for line in SampleLog(tmp_path / "samples.jsonl").read()] == [0, 1]
