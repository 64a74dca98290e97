"""The contract with a real vLLM, if `NEMO_OPD_VLLM` names its virtual environment (tools/rollout/install_vllm.sh)."""

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
from nemo_opd.rollout.engine_interface import EngineSpec, Request, Sampling
from nemo_opd.rollout.server.engine import ServerEngine
from nemo_opd.rollout.server.vllm import VLLM
from nemo_opd.served.answers import check_endpoint
from tests.rollout.contract import (
    MAX_POSITIONS,
    ServerContract,
    Subject,
    assert_logprobs,
    check_as_a_teacher,
    make_requests,
    save_folders,
    server_of,
)
from tests.tiny import save_model

VENV = os.environ.get("NEMO_OPD_VLLM")

pytestmark = [pytest.mark.server, pytest.mark.skipif(not VENV, reason="NEMO_OPD_VLLM names no environment with vLLM")]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """Start a server whose head is tied to the embeddings; test_on_vllm has an untied head."""
    folder = tmp_path_factory.mktemp("vllm")
    folders = save_folders(folder)
    tokenizer = AutoTokenizer.from_pretrained(folders.first)
    for seed, model_folder in enumerate((folders.first, folders.second)):
        # vLLM's attention on CPUs needs heads of at least 32.
        save_model(model_folder, tokenizer, width=64, seed=seed)
    settings = ServerRollout(
        command=(f"{VENV}/bin/vllm", "serve"),
        # Blocks small enough to be filled, and so cached, by a tiny model's prompts.
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
    """Forward a port to the server's socket."""
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
    """Bugs: weights that still map the freed memory; a stale copy of the tied head, which vLLM keeps on CPUs."""
    engine, folders, requests = server_of(subject), subject.folders, make_requests(4)
    assert engine.takes_memory
    for version, folder in ((3, folders.second), (0, folders.first)):
        weights = HeldWeights(load_file(folder / "model.safetensors"))
        assert engine.update_from_memory(weights.file, version)
        weights.close()

        completions = engine.generate(requests, Sampling())
        assert_logprobs(subject, folder, requests, completions)
        assert {completion.version for completion in completions} == {version}
        assert weight_version(url) == str(version)
        assert not is_mapped(weights.file.name)


def is_mapped(name: str) -> bool:
    """Return whether any process maps the file."""
    return any(name in maps(process.pid) for process in psutil.process_iter())


def maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def weight_version(url: str) -> str:
    """Return the version that the server reports."""
    with urllib.request.urlopen(f"{url}/weight_info") as response:
        return str(json.load(response)["weight_version"])


def test_missing_files_change_nothing(subject: Subject, url: str, tmp_path: Path) -> None:
    """Bug: a server in a container, with other paths, loses its weights."""
    engine, folders, requests = server_of(subject), subject.folders, make_requests(2)
    version = weight_version(url)

    assert not VLLM().load_files(engine._http, [str(tmp_path / "none")], 9)

    assert weight_version(url) == version
    assert_logprobs(subject, folders.first, requests, engine.generate(requests, Sampling()))


def test_new_weights_clear_the_cache(subject: Subject, url: str) -> None:
    """Bug: a prompt's cached keys and values of the old weights."""
    engine, folders = server_of(subject), subject.folders
    prompt = np.arange(120, 200, dtype=np.int32)
    requests = [Request(prompt, 8, seed) for seed in range(2)]
    engine.generate(requests, Sampling())
    num_hits = cache_hits(url)
    engine.generate(requests, Sampling())
    assert cache_hits(url) > num_hits

    engine.update_weights(folders.second, 1)
    assert_logprobs(subject, folders.second, requests, engine.generate(requests, Sampling()))

    engine.update_weights(folders.first, 0)


def cache_hits(url: str) -> float:
    """Return the number of prompt tokens that were read from the cache."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))


def test_ids_are_tokens_at_the_highest_temperature(subject: Subject) -> None:
    completions = subject.engine.generate(make_requests(16), Sampling(temperature=2.0))

    sampled = np.concatenate([completion.ids for completion in completions])
    assert 0 <= sampled.min() <= sampled.max() < subject.folders.vocab_size


def test_a_teachers_log_probabilities(subject: Subject, url: str) -> None:
    """Bugs: rows shifted by one; log-probabilities of the sampling policy; a last row of another distribution; a
    sequence as long as the context, without room for the token that the server samples.
    """
    endpoint = Endpoint(urls=(url,), logprobs=8, retries=0)
    answers, longest = check_as_a_teacher(subject, endpoint)
    size = subject.folders.vocab_size

    with pytest.raises(EndpointError, match=r"refused prompt 0: status 400"):
        answers.segments([np.arange(5, 6 + longest, dtype=np.int32)])
    with pytest.raises(EndpointError, match=r"serves student and not teacher"):
        check_endpoint(endpoint, "teacher", key="teachers.0", vocab_size=size, token=5, texts=[])
    many = endpoint.model_copy(update={"logprobs": 30})
    with pytest.raises(EndpointError, match=r"teachers.0.logprobs.*--max-logprobs"):
        check_endpoint(many, "student", key="teachers.0", vocab_size=size, token=5, texts=[])


class TestVLLM(ServerContract):
    # The contract samples with a temperature above 2, which vLLM rejects.
    test_ids_are_tokens = None  # type: ignore[assignment]
