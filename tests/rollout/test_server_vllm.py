"""The contract on a real vLLM, where `NEMO_OPD_VLLM` names its virtual environment (tools/rollout/install_vllm.sh)."""

import os
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest
from transformers import AutoTokenizer

from nemo_opd.config.rollout import ServerRollout
from nemo_opd.rollout.base import Request, Sampling
from nemo_opd.rollout.server import ServerEngine
from tests.rollout.contract import MAX_POSITIONS, EngineContract, Subject, assert_logprobs, requests, save_folders
from tests.tiny import save_model

VENV = os.environ.get("NEMO_OPD_VLLM")

pytestmark = pytest.mark.skipif(not VENV, reason="NEMO_OPD_VLLM names no environment with vLLM")


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    folder = tmp_path_factory.mktemp("vllm")
    folders = save_folders(folder)
    tokenizer = AutoTokenizer.from_pretrained(folders.first)
    for seed, each in enumerate((folders.first, folders.second)):
        # Its attention on CPUs has no heads of less than 32.
        save_model(each, tokenizer, width=64, seed=seed)
    settings = ServerRollout(
        command=(f"{VENV}/bin/vllm", "serve"),
        # Small blocks: prompts that a tiny model has room for fill some, which then are cached.
        options=("--enforce-eager", "--block-size", "32"),
        environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    with ServerEngine(
        settings,
        model=folders.first,
        vocab_size=folders.vocab_size,
        end_ids=folders.end_ids,
        dtype="float32",
        workdir=folder,
        max_length=MAX_POSITIONS,
    ) as engine:
        yield Subject(engine, folders)


def test_new_weights_see_no_cache_of_the_old(subject: Subject) -> None:
    """What vLLM keeps of a prompt is of the weights that read it."""
    engine, folders = subject.engine, subject.folders
    assert isinstance(engine, ServerEngine)
    prompt = np.arange(120, 200, dtype=np.int32)
    asked = [Request(prompt, 8, seed) for seed in range(2)]
    engine.generate(asked, Sampling())
    before = cache_hits(engine.url)
    engine.generate(asked, Sampling())
    assert cache_hits(engine.url) > before

    engine.update_weights(folders.second, 1)
    assert_logprobs(subject, folders.second, asked, engine.generate(asked, Sampling()))

    engine.update_weights(folders.first, 0)


def cache_hits(url: str) -> float:
    """Tokens of prompts that were not computed again."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))


def test_at_the_highest_temperature_ids_are_tokens(subject: Subject) -> None:
    made = subject.engine.generate(requests(16), Sampling(temperature=2.0))

    sampled = np.concatenate([each.ids for each in made])
    assert 0 <= sampled.min() <= sampled.max() < subject.folders.vocab_size


class TestVLLM(EngineContract):
    # It takes no temperature above 2, which the contract asks for.
    test_ids_are_tokens = None  # type: ignore[assignment]
