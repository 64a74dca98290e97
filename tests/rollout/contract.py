"""Tests that every rollout engine must pass, as a class; each engine's test file derives from it and has a fixture.

    @pytest.fixture(scope="module")
    def subject(tmp_path_factory) -> Iterator[Subject]: ...

    class TestHFEngine(EngineContract): ...

`ServerContract` adds tests of servers. All tests of a class share one engine, since starting one may take long.
"""

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_opd.config.teacher import Endpoint
from nemo_opd.errors import RolloutError
from nemo_opd.models.stored_output import served_layout
from nemo_opd.rollout.engine_interface import Completion, Generator, Request, Sampling
from nemo_opd.rollout.server.engine import ServerEngine
from nemo_opd.served.answers import EndpointAnswers, check_endpoint
from tests.tiny import save_model, train_tokenizer

MAX_POSITIONS = 128
NUM_MORE_ENDS = 12
"""End tokens in the generation config besides EOS, so that sequences of random models end."""


@dataclass(frozen=True)
class Folders:
    """Two random models with the same shape and tokenizer."""

    first: Path
    second: Path
    vocab_size: int
    end_ids: frozenset[int]


@dataclass(frozen=True)
class Subject:
    engine: Generator
    """Loaded with `folders.first`, as version 0."""
    folders: Folders
    tolerance: float = 1e-4
    """Tolerance of a log-probability: float32 rounding of sums of some hundred terms, enlarged by two random layers."""


def save_folders(folder: Path, extra_rows: int = 0) -> Folders:
    """Save two random models. extra_rows: head rows beyond the tokenizer's vocabulary."""
    tokenizer = train_tokenizer(r"\p{N}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+", 300, "<|end|>")
    ends = [int(tokenizer.eos_token_id), *range(100, 100 + NUM_MORE_ENDS)]
    for seed, name in enumerate(("first", "second")):
        save_model(folder / name, tokenizer, width=16, seed=seed, extra_rows=extra_rows)
        (folder / name / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return Folders(folder / "first", folder / "second", len(tokenizer), frozenset(ends))


def make_requests(count: int, *, max_new_tokens: int = 16) -> list[Request]:
    """Return requests with prompts of different lengths and seeds 0, 1, …"""
    random = np.random.default_rng(3)
    lengths = random.integers(1, 30, count)
    prompts = [random.integers(120, 250, length).astype(np.int32) for length in lengths]
    return [Request(prompt, max_new_tokens, i) for i, prompt in enumerate(prompts)]


@cache
def model_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def forward_logprobs(folder: Path, ids: NDArray[np.int32], vocab_size: int) -> NDArray[np.float64]:
    """Return log-probabilities [S, V] of a single sequence; row i predicts the token after token i."""
    with torch.no_grad():
        logits = model_of(folder)(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[
            0, :, :vocab_size
        ]
    return logits.log_softmax(-1).numpy()


def forward_of(folder: Path, request: Request, ids: NDArray[np.int32], vocab_size: int) -> NDArray[np.float64]:
    """Return the raw log-probabilities [R, V] before each sampled token."""
    sequence = np.concatenate([request.prompt_ids, ids])
    return forward_logprobs(folder, sequence, vocab_size)[len(request.prompt_ids) - 1 : -1]


def assert_logprobs(subject: Subject, folder: Path, requests: list[Request], completions: list[Completion]) -> None:
    for request, completion in zip(requests, completions, strict=True):
        rows = forward_of(folder, request, completion.ids, subject.folders.vocab_size)
        expected = rows[np.arange(len(completion.ids)), completion.ids]
        assert completion.logprobs.dtype == np.float32
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=subject.tolerance)


def assert_behaviour(
    subject: Subject, requests: list[Request], completions: list[Completion], sampling: Sampling
) -> None:
    """Compare with the sampling policy: temperature, then top-k, then the fewest tokens with a mass of top_p."""
    for request, completion in zip(requests, completions, strict=True):
        rows = forward_of(subject.folders.first, request, completion.ids, subject.folders.vocab_size)
        expected = [behaviour_of(row, int(token), sampling) for row, token in zip(rows, completion.ids, strict=True)]
        assert completion.behaviour_logprobs.dtype == np.float32
        np.testing.assert_allclose(
            completion.behaviour_logprobs, expected, rtol=0, atol=subject.tolerance / sampling.temperature
        )


def behaviour_of(logprobs: NDArray[np.float64], token: int, sampling: Sampling) -> float:
    order = np.argsort(-logprobs, kind="stable")[: sampling.top_k]
    powers = np.exp(logprobs[order] / sampling.temperature)
    mass = powers.cumsum() / powers.sum()
    count = 1 + int((mass < sampling.top_p).sum())
    return float(np.log(powers[order == token].sum() / powers[:count].sum()))


def same(first: list[Completion], second: list[Completion]) -> bool:
    return [completion.ids.tolist() for completion in first] == [completion.ids.tolist() for completion in second]


def server_of(subject: Subject) -> ServerEngine:
    assert isinstance(subject.engine, ServerEngine)
    return subject.engine


class EngineContract:
    """Needs a module-scoped fixture `subject` that yields a `Subject`."""

    def test_no_requests_have_no_completions(self, subject: Subject) -> None:
        assert subject.engine.generate([], Sampling()) == []

    @pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, top_p=0.8, top_k=20)], ids=["raw", "warped"])
    def test_log_probabilities_are_raw_and_in_the_order_of_requests(self, subject: Subject, sampling: Sampling) -> None:
        """Bugs: log-probabilities of the warped distribution; prompts that were padded or sorted change places."""
        requests = make_requests(8)

        completions = subject.engine.generate(requests, sampling)

        assert len(completions) == len(requests)
        assert_logprobs(subject, subject.folders.first, requests, completions)
        if not sampling.is_warped:
            assert all((completion.behaviour_logprobs == completion.logprobs).all() for completion in completions)

    @pytest.mark.parametrize(
        "sampling",
        [Sampling(), Sampling(0.6), Sampling(1.4), Sampling(top_p=0.8), Sampling(top_k=5), Sampling(0.7, 0.8, 20)],
        ids=str,
    )
    def test_behaviour_log_probabilities_are_of_the_sampling_policy(self, subject: Subject, sampling: Sampling) -> None:
        """Bugs: a log-probability before top-k or top-p, or without renormalising, or cuts in another order."""
        requests = make_requests(6)

        assert_behaviour(subject, requests, subject.engine.generate(requests, sampling), sampling)

    def test_sequences_of_maximum_length_have_both_log_probabilities(self, subject: Subject) -> None:
        """Bug: the request for raw log-probabilities is longer than the server accepts."""
        sampling = Sampling(0.9)
        requests = [Request(np.full(MAX_POSITIONS - 4, 130, np.int32), 4, seed) for seed in range(4)]

        completions = subject.engine.generate(requests, sampling)

        assert any(len(completion.ids) == 4 for completion in completions)
        assert_logprobs(subject, subject.folders.first, requests, completions)
        assert_behaviour(subject, requests, completions, sampling)

    def test_a_sequence_ends_with_its_first_end_or_at_its_own_length(self, subject: Subject) -> None:
        limits = [1, 2, 5, 20] * 4
        requests = [
            replace(request, max_new_tokens=limit)
            for request, limit in zip(make_requests(len(limits)), limits, strict=True)
        ]

        completions = subject.engine.generate(requests, Sampling())

        assert {completion.finish_reason for completion in completions} == {"stop", "length"}
        for request, completion in zip(requests, completions, strict=True):
            ends = [int(token) in subject.folders.end_ids for token in completion.ids]
            assert completion.ids.dtype == np.int32
            assert len(completion.logprobs) == len(completion.ids)
            assert not any(ends[:-1])
            assert ends[-1] == (completion.finish_reason == "stop")
            assert ends[-1] or len(completion.ids) == request.max_new_tokens

    def test_a_stop_text_ends_its_own_sequence(self, subject: Subject) -> None:
        """Bug: a stop text over several tokens is missed, or one in the prompt or in another sequence counts."""
        free = subject.engine.generate(make_requests(16), Sampling())
        read = AutoTokenizer.from_pretrained(subject.folders.first).decode
        texts = [read(completion.ids, skip_special_tokens=True) for completion in free]
        stops = [tuple(re.findall("[^\ufffd]{2,3}", text)[1:2]) * (i % 4 > 0) for i, text in enumerate(texts)]
        requests = [replace(request, stop=stop) for request, stop in zip(make_requests(16), stops, strict=True)]

        completions = subject.engine.generate(requests, Sampling())

        assert sum(len(cut.ids) < len(full.ids) for cut, full in zip(completions, free, strict=True)) >= 6
        for cut, full, stop in zip(completions, free, stops, strict=True):
            lengths = range(1, len(full.ids) + 1)
            with_stop = [n for n in lengths if stop and stop[0] in read(full.ids[:n], skip_special_tokens=True)]
            np.testing.assert_array_equal(cut.ids, full.ids[: min(with_stop, default=len(full.ids))])
            assert cut.finish_reason == ("stop" if with_stop else full.finish_reason)
            assert len(cut.logprobs) == len(cut.behaviour_logprobs) == len(cut.ids)

    def test_ids_are_tokens(self, subject: Subject) -> None:
        completions = subject.engine.generate(make_requests(16), Sampling(temperature=3.0))

        sampled = np.concatenate([completion.ids for completion in completions])
        assert 0 <= sampled.min() <= sampled.max() < subject.folders.vocab_size

    def test_a_seed_determines_its_sample_in_any_batch(self, subject: Subject) -> None:
        requests = make_requests(8)
        completions = subject.engine.generate(requests, Sampling())

        assert same(subject.engine.generate(requests, Sampling()), completions)
        assert same(subject.engine.generate(requests[::-1], Sampling()), completions[::-1])
        assert same(subject.engine.generate(requests[2:3], Sampling()), completions[2:3])

    def test_other_seeds_give_other_samples(self, subject: Subject) -> None:
        prompt = make_requests(1)[0].prompt_ids
        seeds = [0, 1, 2, 2**32, 2**63 - 1]

        completions = subject.engine.generate([Request(prompt, 12, seed) for seed in seeds], Sampling())

        assert len({tuple(completion.ids.tolist()) for completion in completions}) == len(seeds)

    @pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(top_k=1)], ids=["zero", "top 1"])
    def test_greedy_takes_the_likeliest(self, subject: Subject, sampling: Sampling) -> None:
        requests = make_requests(4)

        completions = subject.engine.generate(requests, sampling)

        for request, completion in zip(requests, completions, strict=True):
            rows = forward_of(subject.folders.first, request, completion.ids, subject.folders.vocab_size)
            assert completion.ids.tolist() == rows.argmax(-1).tolist()

    def test_a_request_beyond_the_models_positions_is_refused(self, subject: Subject) -> None:
        long = Request(np.full(MAX_POSITIONS - 3, 130, np.int32), 4, 0)

        with pytest.raises(RolloutError, match=str(MAX_POSITIONS)):
            subject.engine.generate([*make_requests(2), long], Sampling())


class ServerContract(EngineContract):
    """Its last test closes the engine."""

    def test_weights_belong_to_the_version(self, subject: Subject) -> None:
        engine, folders, requests = server_of(subject), subject.folders, make_requests(4)
        assert engine.version == 0

        engine.update_weights(folders.second, 7)
        completions = engine.generate(requests, Sampling())
        assert engine.version == 7
        assert {completion.version for completion in completions} == {7}
        assert_logprobs(subject, folders.second, requests, completions)

        engine.update_weights(folders.first, 0)
        assert_logprobs(subject, folders.first, requests, engine.generate(requests, Sampling()))

    def test_a_broken_folder_is_refused_and_the_weights_stay(self, subject: Subject, tmp_path: Path) -> None:
        engine, requests = server_of(subject), make_requests(4)
        broken = tmp_path / "broken"
        broken.mkdir()
        for file in subject.folders.second.iterdir():
            content = file.read_bytes()
            (broken / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)

        for folder in (broken, tmp_path / "none"):
            with pytest.raises(RolloutError, match=folder.name):
                engine.update_weights(folder, 9)

        assert engine.version == 0
        assert_logprobs(subject, subject.folders.first, requests, engine.generate(requests, Sampling()))

    def test_zz_a_closed_engine_does_not_sample(self, subject: Subject) -> None:
        """Runs last, since it closes the engine that all tests share."""
        server_of(subject).close()
        server_of(subject).close()

        with pytest.raises(RolloutError, match="closed"):
            subject.engine.generate(make_requests(1), Sampling())


def check_as_a_teacher(subject: Subject, endpoint: Endpoint, last: int | None = None) -> tuple[EndpointAnswers, int]:
    """Compare a server's log-probabilities of sequences with transformers'.

    Returns the client, and the length of the longest sequence that the server accepts. last: final id of each sequence;
    by default they begin with 5.
    """
    size = subject.folders.vocab_size
    longest = check_endpoint(
        endpoint, "student", key="teachers.0", vocab_size=size, token=size - 1, texts=[range(3, 30)]
    )
    assert longest == MAX_POSITIONS - 1
    layout = served_layout(endpoint, size)
    answers = EndpointAnswers(endpoint, "student", layout, key="teachers.0")
    model = AutoModelForCausalLM.from_pretrained(subject.folders.first, dtype=torch.float32)
    lengths = (2, 17, longest)
    begins = [5 if last is None else last + 1 - length for length in lengths]
    ids = [np.arange(begin, begin + length, dtype=np.int32) for begin, length in zip(begins, lengths, strict=True)]

    for sequence, segment in zip(ids, answers.segments(ids), strict=True):
        with torch.no_grad():
            log_p = model(torch.from_numpy(sequence.astype(np.int64))[None]).logits[0].log_softmax(-1)
        following = torch.from_numpy(np.append(sequence[1:], -1).astype(np.int64))
        expected = layout.decode(layout.encode(log_p[:, :size], following))
        rows = layout.decode(torch.from_numpy(segment.rows))
        for name in ("log_p", "log_p_next", "log_rest"):
            torch.testing.assert_close(getattr(rows, name), getattr(expected, name), rtol=1e-3, atol=1e-4)
        assert (rows.ids == expected.ids).float().mean() > 0.9  # except ties
    return answers, longest
