"""What every rollout engine does: a class of tests, of which each engine's own file makes a subclass with a fixture.

    @pytest.fixture(scope="module")
    def subject(tmp_path_factory) -> Iterator[Subject]: ...

    class TestHFEngine(EngineContract): ...

`ServerContract` adds what servers do. All tests of a class share one engine, since starting one may take long.
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
from nemo_opd.rollout.requests import Completion, Generator, Request, Sampling
from nemo_opd.rollout.server.engine import ServerEngine
from nemo_opd.served.answers import EndpointAnswers, check_endpoint
from tests.tiny import save_model, train_tokenizer

MAX_POSITIONS = 128
NUM_MORE_ENDS = 12
"""Ids that the generation config ends at beside EOS, so that sequences of random models do end."""


@dataclass(frozen=True)
class Folders:
    """Two random models in one shape with one tokenizer."""

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
    """Of a log-probability: float32 sums some hundred terms, whose rounding two layers of random weights enlarge."""


def save_folders(folder: Path, extra_rows: int = 0) -> Folders:
    """extra_rows: columns of the head beyond the tokenizer's vocabulary."""
    tokenizer = train_tokenizer(r"\p{N}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+", 300, "<|end|>")
    ends = [int(tokenizer.eos_token_id), *range(100, 100 + NUM_MORE_ENDS)]
    for seed, name in enumerate(("first", "second")):
        save_model(folder / name, tokenizer, width=16, seed=seed, extra_rows=extra_rows)
        (folder / name / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return Folders(folder / "first", folder / "second", len(tokenizer), frozenset(ends))


def requests(count: int, *, max_new_tokens: int = 16) -> list[Request]:
    """Prompts of different lengths; each its own seed."""
    random = np.random.default_rng(3)
    lengths = random.integers(1, 30, count)
    prompts = [random.integers(120, 250, length).astype(np.int32) for length in lengths]
    return [Request(prompt, max_new_tokens, i) for i, prompt in enumerate(prompts)]


@cache
def model_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def forward_logprobs(folder: Path, ids: NDArray[np.int32], vocab_size: int) -> NDArray[np.float64]:
    """[S, V]: row i is of what follows token i. One sequence, no cache, no padding."""
    with torch.no_grad():
        logits = model_of(folder)(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[
            0, :, :vocab_size
        ]
    return logits.log_softmax(-1).numpy()


def forward_of(folder: Path, request: Request, ids: NDArray[np.int32], vocab_size: int) -> NDArray[np.float64]:
    """[R, V]: the raw distribution that each of the sampled ids was drawn from."""
    whole = np.concatenate([request.prompt_ids, ids])
    return forward_logprobs(folder, whole, vocab_size)[len(request.prompt_ids) - 1 : -1]


def assert_logprobs(subject: Subject, folder: Path, asked: list[Request], made: list[Completion]) -> None:
    for request, completion in zip(asked, made, strict=True):
        rows = forward_of(folder, request, completion.ids, subject.folders.vocab_size)
        wanted = rows[np.arange(len(completion.ids)), completion.ids]
        assert completion.logprobs.dtype == np.float32
        np.testing.assert_allclose(completion.logprobs, wanted, rtol=0, atol=subject.tolerance)


def assert_behaviour(subject: Subject, asked: list[Request], made: list[Completion], sampling: Sampling) -> None:
    """Of the policy that samples: temperature, the k likeliest, then the fewest of those with top_p of the mass."""
    for request, completion in zip(asked, made, strict=True):
        rows = forward_of(subject.folders.first, request, completion.ids, subject.folders.vocab_size)
        wanted = [behaviour_of(row, int(token), sampling) for row, token in zip(rows, completion.ids, strict=True)]
        assert completion.behaviour_logprobs.dtype == np.float32
        np.testing.assert_allclose(
            completion.behaviour_logprobs, wanted, rtol=0, atol=subject.tolerance / sampling.temperature
        )


def behaviour_of(logprobs: NDArray[np.float64], token: int, sampling: Sampling) -> float:
    order = np.argsort(-logprobs, kind="stable")[: sampling.top_k]
    powers = np.exp(logprobs[order] / sampling.temperature)
    mass = powers.cumsum() / powers.sum()
    kept = 1 + int((mass < sampling.top_p).sum())
    return float(np.log(powers[order == token].sum() / powers[:kept].sum()))


def same(left: list[Completion], right: list[Completion]) -> bool:
    return [each.ids.tolist() for each in left] == [each.ids.tolist() for each in right]


def server_of(subject: Subject) -> ServerEngine:
    assert isinstance(subject.engine, ServerEngine)
    return subject.engine


class EngineContract:
    """Needs a fixture `subject`, of the module's scope, that gives a `Subject`."""

    def test_nothing_is_asked(self, subject: Subject) -> None:
        assert subject.engine.generate([], Sampling()) == []

    @pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, top_p=0.8, top_k=20)], ids=["raw", "warped"])
    def test_log_probabilities_are_raw_and_those_of_the_request_in_its_place(
        self, subject: Subject, sampling: Sampling
    ) -> None:
        """Also where another distribution was drawn from, and with prompts that had to be padded or sorted."""
        asked = requests(8)

        made = subject.engine.generate(asked, sampling)

        assert len(made) == len(asked)
        assert_logprobs(subject, subject.folders.first, asked, made)
        if not sampling.is_warped:
            assert all((each.behaviour_logprobs == each.logprobs).all() for each in made)

    @pytest.mark.parametrize(
        "sampling",
        [Sampling(), Sampling(0.6), Sampling(1.4), Sampling(top_p=0.8), Sampling(top_k=5), Sampling(0.7, 0.8, 20)],
        ids=str,
    )
    def test_the_behaviour_is_what_sampled(self, subject: Subject, sampling: Sampling) -> None:
        """Bugs: a log-probability before top-k or top-p, after them without renormalising, or cuts in another order."""
        asked = requests(6)

        assert_behaviour(subject, asked, subject.engine.generate(asked, sampling), sampling)

    def test_sequences_as_long_as_the_model_reads_have_both(self, subject: Subject) -> None:
        """Bugs: a server that is asked to read more than it can, where raw log-probabilities take another request."""
        sampling = Sampling(0.9)
        asked = [Request(np.full(MAX_POSITIONS - 4, 130, np.int32), 4, seed) for seed in range(4)]

        made = subject.engine.generate(asked, sampling)

        assert any(len(each.ids) == 4 for each in made)
        assert_logprobs(subject, subject.folders.first, asked, made)
        assert_behaviour(subject, asked, made, sampling)

    def test_a_sequence_ends_with_its_first_end_or_at_its_own_length(self, subject: Subject) -> None:
        asked = [
            Request(each.prompt_ids, limit, each.seed)
            for each, limit in zip(requests(16), [1, 2, 5, 20] * 4, strict=True)
        ]

        made = subject.engine.generate(asked, Sampling())

        assert {each.finish_reason for each in made} == {"stop", "length"}
        for request, completion in zip(asked, made, strict=True):
            ends = [int(each) in subject.folders.end_ids for each in completion.ids]
            assert completion.ids.dtype == np.int32
            assert len(completion.logprobs) == len(completion.ids)
            assert not any(ends[:-1])
            assert ends[-1] == (completion.finish_reason == "stop")
            assert ends[-1] or len(completion.ids) == request.max_new_tokens

    def test_a_stop_text_ends_its_own_sequence(self, subject: Subject) -> None:
        """Bug: a text over several tokens is missed, or one of the prompt or of another sequence counts."""
        free = subject.engine.generate(requests(16), Sampling())
        read = AutoTokenizer.from_pretrained(subject.folders.first).decode
        texts = [read(each.ids, skip_special_tokens=True) for each in free]
        stops = [tuple(re.findall("[^\ufffd]{2,3}", text)[1:2]) * (i % 4 > 0) for i, text in enumerate(texts)]
        asked = [replace(each, stop=stop) for each, stop in zip(requests(16), stops, strict=True)]

        made = subject.engine.generate(asked, Sampling())

        cut = [len(own.ids) - len(whole.ids) for own, whole in zip(made, free, strict=True)]
        assert sum(each < 0 for each in cut) >= 6
        for own, whole, stop in zip(made, free, stops, strict=True):
            lengths = range(1, len(whole.ids) + 1)
            found = [n for n in lengths if stop and stop[0] in read(whole.ids[:n], skip_special_tokens=True)]
            np.testing.assert_array_equal(own.ids, whole.ids[: min(found, default=len(whole.ids))])
            assert own.finish_reason == ("stop" if found else whole.finish_reason)
            assert len(own.logprobs) == len(own.behaviour_logprobs) == len(own.ids)

    def test_ids_are_tokens(self, subject: Subject) -> None:
        made = subject.engine.generate(requests(16), Sampling(temperature=3.0))

        sampled = np.concatenate([each.ids for each in made])
        assert 0 <= sampled.min() <= sampled.max() < subject.folders.vocab_size

    def test_a_seed_decides_whatever_it_is_asked_with(self, subject: Subject) -> None:
        asked = requests(8)
        made = subject.engine.generate(asked, Sampling())

        assert same(subject.engine.generate(asked, Sampling()), made)
        assert same(subject.engine.generate(asked[::-1], Sampling()), made[::-1])
        assert same(subject.engine.generate(asked[2:3], Sampling()), made[2:3])

    def test_other_seeds_give_other_samples(self, subject: Subject) -> None:
        prompt = requests(1)[0].prompt_ids
        seeds = [0, 1, 2, 2**32, 2**63 - 1]

        made = subject.engine.generate([Request(prompt, 12, seed) for seed in seeds], Sampling())

        assert len({tuple(each.ids.tolist()) for each in made}) == len(seeds)

    @pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(top_k=1)], ids=["zero", "top 1"])
    def test_greedy_takes_the_likeliest(self, subject: Subject, sampling: Sampling) -> None:
        asked = requests(4)

        made = subject.engine.generate(asked, sampling)

        for request, completion in zip(asked, made, strict=True):
            rows = forward_of(subject.folders.first, request, completion.ids, subject.folders.vocab_size)
            assert completion.ids.tolist() == rows.argmax(-1).tolist()

    def test_a_request_beyond_the_models_positions_is_refused(self, subject: Subject) -> None:
        long = Request(np.full(MAX_POSITIONS - 3, 130, np.int32), 4, 0)

        with pytest.raises(RolloutError, match=str(MAX_POSITIONS)):
            subject.engine.generate([*requests(2), long], Sampling())


class ServerContract(EngineContract):
    """The last of its tests closes the engine."""

    def test_weights_are_those_of_the_version(self, subject: Subject) -> None:
        engine, folders, asked = server_of(subject), subject.folders, requests(4)
        assert engine.version == 0

        engine.update_weights(folders.second, 7)
        made = engine.generate(asked, Sampling())
        assert engine.version == 7
        assert {each.version for each in made} == {7}
        assert_logprobs(subject, folders.second, asked, made)

        engine.update_weights(folders.first, 0)
        assert_logprobs(subject, folders.first, asked, engine.generate(asked, Sampling()))

    def test_a_broken_folder_is_refused_and_the_weights_stay(self, subject: Subject, tmp_path: Path) -> None:
        engine, asked = server_of(subject), requests(4)
        broken = tmp_path / "broken"
        broken.mkdir()
        for file in subject.folders.second.iterdir():
            whole = file.read_bytes()
            (broken / file.name).write_bytes(whole[: len(whole) // 2] if file.suffix == ".safetensors" else whole)

        for folder in (broken, tmp_path / "none"):
            with pytest.raises(RolloutError, match=folder.name):
                engine.update_weights(folder, 9)

        assert engine.version == 0
        assert_logprobs(subject, subject.folders.first, asked, engine.generate(asked, Sampling()))

    def test_zz_closed_it_samples_no_more(self, subject: Subject) -> None:
        """The last: the engine is of no use to other tests afterwards."""
        server_of(subject).close()
        server_of(subject).close()

        with pytest.raises(RolloutError, match="closed"):
            subject.engine.generate(requests(1), Sampling())


def asked_as_a_teacher(subject: Subject, given: Endpoint, last: int | None = None) -> tuple[EndpointAnswers, int]:
    """Compare what a server says of sequences with transformers; return it, and the longest sequence that it reads.

    last: id of each sequence's end; by default they begin with 5.
    """
    size = subject.folders.vocab_size
    longest = check_endpoint(given, "student", key="teachers.0", vocab_size=size, token=size - 1, texts=[range(3, 30)])
    assert longest == MAX_POSITIONS - 1
    layout = served_layout(given, size)
    answers = EndpointAnswers(given, "student", layout, key="teachers.0")
    model = AutoModelForCausalLM.from_pretrained(subject.folders.first, dtype=torch.float32)
    lengths = (2, 17, longest)
    begins = [5 if last is None else last + 1 - length for length in lengths]
    ids = [np.arange(begin, begin + length, dtype=np.int32) for begin, length in zip(begins, lengths, strict=True)]

    for sequence, segment in zip(ids, answers.segments(ids), strict=True):
        with torch.no_grad():
            log_p = model(torch.from_numpy(sequence.astype(np.int64))[None]).logits[0].log_softmax(-1)
        following = torch.from_numpy(np.append(sequence[1:], -1).astype(np.int64))
        expected = layout.decode(layout.encode(log_p[:, :size], following))
        found = layout.decode(torch.from_numpy(segment.rows))
        for name in ("log_p", "log_p_next", "log_rest"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-3, atol=1e-4)
        assert (found.ids == expected.ids).float().mean() > 0.9  # but for ties
    return answers, longest
