"""A whole run on a real vLLM beside it, as docs/on_policy.md starts one."""

import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nemo_opd.models.adapter_folder import resolve
from tests.tiny import save_model
from tests.training.launch import ROOT, start

VENV = os.environ.get("NEMO_OPD_VLLM")
pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not VENV, reason="NEMO_OPD_VLLM names no environment with vLLM"),
]


def test_a_run_samples_with_vllm(tmp_path: Path) -> None:
    """The student's head is not tied, and new weights reach the server through memory.

    Bugs: vLLM asks for nine tenths of the machine's memory and does not start; the server keeps the head it started
    with.
    """
    # vLLM's attention on CPUs needs heads of at least 32.
    student = save_model(
        tmp_path / "student",
        AutoTokenizer.from_pretrained(resolve("demo:arithmetic_student")),
        width=64,
        seed=0,
        tied=False,
    )
    run = start(
        tmp_path / "run",
        [
            f"student.model={student}",
            "student.optimizer.lr=1e-2",
            "student.scheduler.warmup_steps=0",
            "cluster.launcher=local",
            "rollout=server",
            f"rollout.command=[{VENV}/bin/vllm,serve]",
            # vLLM still asks for its share of the memory, but does not fill it.
            "rollout.options=[--enforce-eager,'--num-gpu-blocks-override=64']",
            "evaluation=null",
            "train.max_steps=2",
            "train.global_batch_size=8",
            "train.micro_batch_size=8",
            "train.save_every=null",
        ],
        script=ROOT / "examples" / "run_on_policy_distillation.py",
    )
    run.wait_for_step(1)
    run.processes()
    assert run.end() == 0, run.output
    assert run.leftovers() == []
    for record in run.metrics:
        assert record["train/mismatch"] < 1e-4
        assert record["rollout/staleness"] == 0
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
