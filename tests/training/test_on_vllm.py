"""A whole run on a real vLLM beside it, as docs/on_policy.md starts one."""

import os
from pathlib import Path

import pytest

from tests.training.launch import ROOT, start

VENV = os.environ.get("NEMO_OPD_VLLM")
pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not VENV, reason="NEMO_OPD_VLLM names no environment with vLLM"),
]


def test_a_run_samples_with_vllm(tmp_path: Path) -> None:
    """Bug: a vLLM that takes nine tenths of the machine's memory did not start beside a run on 24 GiB."""
    run = start(
        tmp_path / "run",
        [
            "rollout=server",
            f"rollout.command=[{VENV}/bin/vllm,serve]",
            "rollout.options=[--enforce-eager]",
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
        assert record["train/mismatch"] < 1e-3
        assert record["rollout/staleness"] == 0
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
