"""Forked processes of tests have the environment of the test that starts them."""

import os
from multiprocessing.connection import Connection

import pytest
import torch

from tests import processes

pytestmark = pytest.mark.world


def answer(pipe: Connection) -> None:
    pipe.send((os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.is_initialized()))


def test_a_process_sees_the_gpus_of_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: the environment of the first test that started one; a fork after CUDA has looked for GPUs."""
    for named in ("1", "3,2"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        ours, theirs = processes.context().Pipe()
        process = processes.make(answer, theirs)
        process.start()
        assert ours.recv() == (named, False)
        process.join()
