"""The contract with a real SGLang, if `NEMO_OPD_SGLANG` names its virtual environment (sglang_on_cpu/install.sh).

The environment has SGLang 0.5.23, PyTorch for CPUs, and stand-ins (`sglang_on_cpu`) for packages that need CUDA.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from nemo_opd.config.rollout import ServerRollout
from nemo_opd.config.teacher import Endpoint
from nemo_opd.errors import EndpointError
from nemo_opd.rollout.engine_interface import EngineSpec, Sampling
from nemo_opd.rollout.server.engine import ServerEngine
from tests.rollout.contract import MAX_POSITIONS, ServerContract, Subject, check_as_a_teacher, save_folders, server_of
from tests.tiny import save_model

VENV = os.environ.get("NEMO_OPD_SGLANG")

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not VENV, reason="NEMO_OPD_SGLANG names no environment with SGLang"),
]
OPTIONS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--grammar-backend", "none"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--max-total-tokens", "8192"),
)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """Start a server whose context is as long as its model's."""
    folder = tmp_path_factory.mktemp("sglang")
    folders = save_folders(folder)
    tokenizer = AutoTokenizer.from_pretrained(folders.first)
    for seed, model_folder in enumerate((folders.first, folders.second)):
        save_model(model_folder, tokenizer, width=64, seed=seed)
    settings = ServerRollout(
        program="sglang",
        command=(f"{VENV}/bin/python", "-m", "sglang.launch_server"),
        options=OPTIONS,
        environment={"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(Path(__file__).parent / "sglang_on_cpu")},
    )
    spec = EngineSpec(folders.vocab_size, folders.end_ids, "float32", folder, MAX_POSITIONS)
    with ServerEngine(settings, spec, folders.first) as engine:
        yield Subject(engine, folders)


def test_a_teachers_log_probabilities(subject: Subject) -> None:
    """Bugs: the highest id, which SGLang echoes as 0; a sequence longer than its context; rows shifted by one."""
    server = server_of(subject)
    key = server._headers["Authorization"].removeprefix("Bearer ")
    settings = Endpoint(program="sglang", urls=(server.url,), logprobs=8, retries=0, api_key=key)
    answers, longest = check_as_a_teacher(subject, settings, last=subject.folders.vocab_size - 1)

    with pytest.raises(EndpointError, match=r"refused prompt 0: status 400.*Input length"):
        answers.segments([np.arange(5, 6 + longest, dtype=np.int32)])


class TestSGLang(ServerContract):
    @pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.6), Sampling(1.4)], ids=str)
    def test_behaviour_log_probabilities_are_of_the_sampling_policy(self, subject: Subject, sampling: Sampling) -> None:
        """Leaves out top-k and top-p, since SGLang does not report probabilities after them."""
        super().test_behaviour_log_probabilities_are_of_the_sampling_policy(subject, sampling)

    test_zz_a_closed_engine_does_not_sample = ServerContract.test_zz_a_closed_engine_does_not_sample  # must run last
