"""The contract on a real vLLM, where `NEMO_OPD_VLLM` names its virtual environment (tools/rollout/install_vllm.sh)."""

import json
import os
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread

import numpy as np
import psutil
import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from nemo_opd.config.rollout import ServerRollout
from nemo_opd.config.teacher import Endpoint
from nemo_opd.errors import EndpointError
from nemo_opd.handoff.shared_memory import HeldWeights
from nemo_opd.rollout.requests import EngineSpec, Request, Sampling
from nemo_opd.rollout.server.engine import ServerEngine
from nemo_opd.rollout.server.vllm import VLLM
from nemo_opd.served.answers import check_endpoint
from tests.rollout.contract import (
    MAX_POSITIONS,
    ServerContract,
    Subject,
    asked_as_a_teacher,
    assert_logprobs,
    requests,
    save_folders,
    server_of,
)
from tests.tiny import save_model

VENV = os.environ.get("NEMO_OPD_VLLM")

pytestmark = [pytest.mark.server, pytest.mark.skipif(not VENV, reason="NEMO_OPD_VLLM names no environment with vLLM")]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """Its head is tied to the embeddings; test_on_vllm has one that is not."""
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
        EngineSpec(folders.vocab_size, folders.end_ids, "float32", folder, MAX_POSITIONS),
        folders.first,
    ) as engine:
        yield Subject(engine, folders)


@pytest.fixture(scope="module")
def url(subject: Subject) -> Iterator[str]:
    """A port that leads to the server's socket."""
    path = str(server_of(subject)._socket)

    class ToSocket(BaseRequestHandler):
        def handle(self) -> None:
            with socket.socket(socket.AF_UNIX) as server:
                server.connect(path)
                answers = Thread(target=_copy, args=(server, self.request), daemon=True)
                answers.start()
                _copy(self.request, server)
                answers.join()

    with ThreadingTCPServer(("127.0.0.1", 0), ToSocket) as proxy:
        proxy.daemon_threads = True
        thread = Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{proxy.server_address[1]}"
        proxy.shutdown()
        thread.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(2**16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def test_weights_come_through_memory(subject: Subject, url: str) -> None:
    """Also when the memory is gone. vLLM keeps a copy of a tied head in another form on CPUs."""
    engine, folders, asked = server_of(subject), subject.folders, requests(4)
    assert engine.takes_memory
    for version, folder in ((3, folders.second), (0, folders.first)):
        weights = HeldWeights(load_file(folder / "model.safetensors"))
        assert engine.update_from_memory(weights.file, version)
        weights.close()

        made = engine.generate(asked, Sampling())
        assert_logprobs(subject, folder, asked, made)
        assert {each.version for each in made} == {version}
        assert weight_version(url) == str(version)
        assert not is_mapped(weights.file.name)


def is_mapped(name: str) -> bool:
    """By any process."""
    return any(name in maps(process.pid) for process in psutil.process_iter())


def maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def weight_version(url: str) -> str:
    """What the server itself says."""
    with urllib.request.urlopen(f"{url}/weight_info") as response:
        return str(json.load(response)["weight_version"])


def test_files_that_it_cannot_see_change_nothing(subject: Subject, url: str, tmp_path: Path) -> None:
    """As in a container, where the paths lead elsewhere."""
    engine, folders, asked = server_of(subject), subject.folders, requests(2)
    before = weight_version(url)

    assert not VLLM().load_files(engine._http, [str(tmp_path / "none")], 9)

    assert weight_version(url) == before
    assert_logprobs(subject, folders.first, asked, engine.generate(asked, Sampling()))


def test_new_weights_see_no_cache_of_the_old(subject: Subject, url: str) -> None:
    """What vLLM keeps of a prompt is of the weights that read it."""
    engine, folders = server_of(subject), subject.folders
    prompt = np.arange(120, 200, dtype=np.int32)
    asked = [Request(prompt, 8, seed) for seed in range(2)]
    engine.generate(asked, Sampling())
    before = cache_hits(url)
    engine.generate(asked, Sampling())
    assert cache_hits(url) > before

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


def test_a_teacher_is_asked_about_sequences(subject: Subject, url: str) -> None:
    """Bugs: rows shifted by one, log-probabilities of the policy that samples, a last row of another distribution, and
    a sequence as long as the server reads, which leaves no room for the token that it samples.
    """
    given = Endpoint(urls=(url,), logprobs=8, retries=0)
    answers, longest = asked_as_a_teacher(subject, given)
    size = subject.folders.vocab_size

    with pytest.raises(EndpointError, match=r"refused prompt 0: status 400"):
        answers.segments([np.arange(5, 6 + longest, dtype=np.int32)])
    with pytest.raises(EndpointError, match=r"serves student and not teacher"):
        check_endpoint(given, "teacher", key="teachers.0", vocab_size=size, token=5, texts=[])
    many = given.model_copy(update={"logprobs": 30})
    with pytest.raises(EndpointError, match=r"teachers.0.logprobs.*--max-logprobs"):
        check_endpoint(many, "student", key="teachers.0", vocab_size=size, token=5, texts=[])


class TestVLLM(ServerContract):
    # It takes no temperature above 2, which the contract asks for.
    test_ids_are_tokens = None  # type: ignore[assignment]
