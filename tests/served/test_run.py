"""Runs with served teachers against the same runs with loaded teachers and with cached teachers."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_opd.cli.main import main
from nemo_opd.config.run import RunConfig, from_dict
from nemo_opd.errors import ConfigError, EndpointError, ModelError, OPDError
from nemo_opd.logging.loggers import read
from nemo_opd.logging.metrics import values
from nemo_opd.models.stored_output import sparse_layout
from nemo_opd.preflight.inputs import check_inputs
from nemo_opd.preflight.plan import Plan, preflight
from nemo_opd.served.answers import TEXTS
from nemo_opd.teacher_cache.reader import CacheReader
from nemo_opd.training.cache_build import CacheForm, build_cache
from nemo_opd.training.off_policy import distil
from nemo_opd.types import Batch
from tests.composition import compose
from tests.rollout.fake_server import Json, Responder
from tests.served.endpoint import answering, endpoint, scores_of
from tests.tiny import Tiny
from tests.workers import on_policy
from tests.workers.local import evaluate, first_batches, opened, train_step

pytestmark = pytest.mark.world
ALL = 99_999


@dataclass(frozen=True)
class Servers:
    """Servers of a run's teachers, and their requests, keyed by the teacher's name."""

    live: RunConfig
    urls: dict[str, str]
    requests: dict[str, list[Json]]

    def served(self, logprobs: int, *, config: RunConfig | None = None, **changes: Any) -> RunConfig:
        """Return the same run with served teachers. config: replaces `live`."""
        settings = (config or self.live).model_dump(mode="json") | changes
        shared = {"name", "weight", "context", "loss"}
        for i, teacher in enumerate(settings["teachers"]):
            name = teacher["name"]
            endpoint_settings = {"type": "served", "urls": [self.urls[name]], "model": f"the {name}"}
            endpoint_settings |= {"tokenizer": teacher["model"], "logprobs": logprobs}
            settings["teachers"][i] = {key: teacher[key] for key in shared} | endpoint_settings
        return from_dict(settings)


def serve(stack: ExitStack, live: RunConfig) -> Servers:
    urls, requests = {}, {}
    for teacher in live.teachers:
        name = f"the {teacher.name}"
        respond = answering(scores_of(teacher.reference), name)
        urls[teacher.name], requests[teacher.name] = stack.enter_context(endpoint(respond, name))
    return Servers(live, urls, requests)


@pytest.fixture(scope="module")
def servers(tiny: Tiny) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield serve(stack, compose(*tiny.overrides(), "teachers=demo_multi", "loss=gold"))


def curve(plan: Plan, batches: Sequence[Batch]) -> list[dict[str, float]]:
    """Return the metrics of steps, of a validation, and of the teachers' bits per byte."""
    with opened(plan) as models:
        steps = [train_step(models, batch) for batch in batches]
        return [*steps, evaluate(models, batches[0]), values(models.evaluate_teachers(batches[0]))]


def off_policy(config: RunConfig) -> list[dict[str, float]]:
    plan = preflight(config)
    return curve(plan, first_batches(plan, 1))


def assert_close(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    for metrics, expected in zip(ours, theirs, strict=True):
        assert metrics == pytest.approx(expected, rel=2e-4, abs=2e-5)


def test_all_tokens_equal_the_loaded_teacher(servers: Servers) -> None:
    """Catches rows of another sequence or shifted by one, and scores over a part of the distribution."""
    aggregation = {"type": "weighted_sum", "weights": "max_probability"}
    live = from_dict(servers.live.model_dump(mode="json") | {"aggregation": aggregation})
    assert_close(off_policy(servers.served(ALL, config=live)), off_policy(live))


def test_some_tokens_equal_a_cache(servers: Servers, tmp_path: Path) -> None:
    """Catches a tail unlike the cache's, and a cache filled by servers with other answers or texts."""
    served = servers.served(8)
    caches = []
    for i, name in enumerate(servers.live.active_names):
        for kind, config in (("loaded", servers.live), ("served", served)):
            build_cache(config, i, tmp_path / f"{name}_{kind}", CacheForm(8, 4))
        caches.append({"name": name, "type": "cached", "cache": str(tmp_path / f"{name}_served"), "weight": 0.5})
        assert_same_cache(tmp_path / f"{name}_loaded", tmp_path / f"{name}_served")
    cached = from_dict(servers.live.model_dump(mode="json") | {"teachers": caches})
    assert_close(off_policy(served), off_policy(cached))
    with pytest.raises(ConfigError, match=r"aggregation.weights=entropy: the answers in teachers.0.cache=.*servers"):
        preflight(with_entropy(cached))


def assert_same_cache(loaded: Path, served: Path) -> None:
    ours, theirs = CacheReader(served), CacheReader(loaded)
    layout = sparse_layout(theirs.manifest)
    assert ours.manifest.is_served
    assert not theirs.manifest.is_served
    assert len(ours) == len(theirs)
    for shard in theirs.shards:
        for number in range(len(shard)):
            segment = shard.segment(number)
            answer = ours._segment(next(ours._places(shard.keys[number].tobytes())))
            assert np.array_equal(answer.tokens, segment.tokens)
            rows, expected = (layout.decode(_tensor(entry.rows)) for entry in (answer, segment))
            for name in ("log_p", "log_p_next", "log_rest"):
                np.testing.assert_allclose(getattr(rows, name), getattr(expected, name), rtol=1e-3, atol=1e-4)


def _tensor(rows: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(np.array(rows))


def with_entropy(config: RunConfig) -> RunConfig:
    aggregation = {"type": "weighted_sum", "weights": "entropy"}
    return from_dict(config.model_dump(mode="json") | {"aggregation": aggregation})


@pytest.mark.parametrize(("loss", "logprobs"), [("context", ALL), ("tcad", ALL), ("sampled_kl", 4), ("grpo", ALL)])
def test_on_policy_runs_equal_loaded_teachers(tiny: Tiny, tmp_path: Path, loss: str, logprobs: int) -> None:
    """Catches a teacher that reads another prompt than its context, scores or gaps that servers cannot give, and more
    log-probabilities than a loss of the sampled tokens needs.
    """
    prompts = on_policy.write_prompts(tmp_path)
    live = on_policy.plan(tiny, prompts, *on_policy.LOSSES[loss])
    batches = [on_policy.batch_of(live, 0)]
    with ExitStack() as stack:
        plan = preflight(serve(stack, live.config).served(logprobs))
        assert [teacher.type for teacher in plan.config.teachers] == ["cross_tokenizer", "same_tokenizer"]
        actual, expected = curve(plan, batches), curve(live, batches)
        if logprobs != ALL:  # the overlap of the likeliest tokens is then unknown
            expected = [{name: metrics[name] for name in metrics if "overlap" not in name} for metrics in expected]
        assert_close(actual, expected)


def test_no_model_is_loaded(servers: Servers) -> None:
    """Catches a run that counts a teacher's weights or FLOPs, and a config.yaml that describes another run."""
    plan = preflight(servers.served(4))
    assert [teacher.type for teacher in plan.config.teachers] == ["cross_tokenizer", "same_tokenizer"]
    assert plan.utilization.teachers == (None, None)
    parts = [str(part) for memory in plan.memory.memories for part in memory.parts]
    assert not any("parameters" in part for part in parts if not part.startswith("student"))
    assert preflight(from_dict(plan.config.model_dump(mode="json"))).config == plan.config
    assert plan.lookahead == 1


def test_a_run_goes_on_with_other_servers(servers: Servers, tmp_path: Path) -> None:
    """Catches a checkpoint that binds a run to an address, and repeated requests for the same text."""
    for steps, extra_urls in ((1, []), (2, ["http://127.0.0.1:1"])):
        train = servers.live.train.model_dump() | {"max_steps": steps, "save_every": 1, "validate_every": None}
        run = {"output_dir": str(tmp_path / "run"), "resume": "auto"}
        config = servers.served(4, train=train, run=run, cluster={"launcher": "local"})
        settings = config.model_dump(mode="json")
        settings["data"]["validation"]["arrow_files"] = None
        settings["teachers"][0]["urls"] += extra_urls
        config = from_dict(settings)
        check_inputs(config, on_policy=False)
        if extra_urls:
            with pytest.raises(EndpointError, match=r"teachers.0.urls.1=.* does not answer"):
                distil(config)
            settings["teachers"][0] |= {"urls": settings["teachers"][0]["urls"][:1], "concurrency": 1}
            config = from_dict(settings)
        num_before = len(servers.requests["cross"])
        distil(config)
        requests = [tuple(body["prompt"]) for body in servers.requests["cross"][num_before:]]
        num_compared = len(TEXTS)  # before the run: each text alone and all in a batch
        assert sorted(Counter(requests).values(), reverse=True)[num_compared - 1 : num_compared + 1] == [2, 1]
        assert len(requests) > 2 * num_compared + 4
    records = read(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2]
    assert {record["perf/retried/cross"] for record in records} == {0}


def test_a_server_with_wrong_answers_ends_the_run(servers: Servers, tmp_path: Path) -> None:
    """Catches a step that learns from log-probabilities of other ids."""
    name = "the cross"
    right, calls = answering(scores_of(servers.live.teachers[0].reference), name), []

    def turns_wrong(body: Json) -> tuple[int, Json]:
        calls.append(body)
        if len(calls) > 2 + 2 * len(TEXTS):
            body = {**body, "prompt": [*body["prompt"][:-1], (body["prompt"][-1] + 1) % 300]}
        return right(body)

    with endpoint(turns_wrong, name) as (url, _):
        settings = servers.served(4).model_dump(mode="json")
        settings["teachers"][0] |= {"urls": [url], "retries": 1}
        with pytest.raises(OPDError, match=r"teachers.0: .*other token ids.*") as caught:
            off_policy(from_dict(settings))
    assert "teachers.0.retries=1" in str(caught.value)
    assert "change teachers.0.urls" in str(caught.value)


def test_a_servers_nan_costs_a_token_and_not_the_run(servers: Servers, tmp_path: Path) -> None:
    """Catches a NaN that reaches a loss or a score, or is not counted."""
    names = {teacher.name: f"the {teacher.name}" for teacher in servers.live.teachers}

    def with_nan(right: Responder) -> Responder:
        def respond(body: Json) -> tuple[int, Json]:
            status, reply = right(body)
            if len(body["prompt"]) > 10:
                next(iter(reply["choices"][0]["prompt_logprobs"][5].values()))["logprob"] = math.nan
            return status, reply

        return respond

    with ExitStack() as stack:
        urls = {}
        for teacher in servers.live.teachers:
            right = answering(scores_of(teacher.reference), names[teacher.name])
            urls[teacher.name], _ = stack.enter_context(endpoint(with_nan(right), names[teacher.name]))
        train = servers.live.train.model_dump() | {"max_steps": 1, "validate_every": 1}
        aggregation = {"type": "weighted_sum", "weights": "bits_per_byte"}
        run = {"output_dir": str(tmp_path / "run")}
        changes = {"train": train, "run": run, "aggregation": aggregation, "cluster": {"launcher": "local"}}
        distil(replace(servers, urls=urls).served(8, **changes))
    records = read(tmp_path / "run" / "metrics.jsonl")
    for name in names:
        assert records[-1][f"perf/unanswered/{name}"] > 0
    assert all(math.isfinite(value) for record in records for value in record.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": {"type": "gold", "temperature": 2.0}}, "teachers.0.logprobs=4: .*temperature=2"),
        ({"loss": {"type": "p_kl", "vocab_topk": 9}}, "teachers.0.logprobs=4: .*vocab_topk=9"),
        ({"aggregation": {"type": "weighted_sum", "weights": "entropy"}}, "weights=entropy: teachers.0 .* is served"),
    ],
)
def test_settings_that_servers_cannot_answer_are_refused_before_the_run(
    servers: Servers, changes: dict, message: str
) -> None:
    """Catches a loss that fails at the first step."""
    with pytest.raises(ConfigError, match=message):
        preflight(servers.served(4, **changes))


def test_bad_settings_are_refused(servers: Servers, tmp_path: Path) -> None:
    """Catches ignored settings of a model, a name without a tokenizer, and texts longer than the servers' limit."""
    served = servers.served(4).model_dump(mode="json")
    teacher = served["teachers"][1]
    with pytest.raises(ConfigError, match="dtype has no effect: the same is computed by the servers"):
        from_dict(served | {"teachers": [teacher | {"dtype": "float16"}]})
    with pytest.raises(ConfigError, match=r"urls\.0='localhost': it is not an address of a server"):
        from_dict(served | {"teachers": [teacher | {"urls": ["localhost"]}]})
    with pytest.raises(ConfigError, match=r"'http://localhost:8000/v1/': .*leave /v1 out"):
        from_dict(served | {"teachers": [teacher | {"urls": ["http://localhost:8000/v1/"]}]})
    with pytest.raises(ModelError, match=r"the same.*set teachers\.0\.tokenizer to the folder or hub name"):
        preflight(from_dict(served | {"teachers": [teacher | {"tokenizer": None}]}))
    respond = answering(scores_of(servers.live.teachers[1].reference), "the same")
    with endpoint(respond, "the same", limit=40) as (url, _):
        short = from_dict(served | {"teachers": [teacher | {"urls": [url]}]})
        with pytest.raises(ConfigError, match=r"train.max_length=48: the servers of same accept 39 tokens"):
            preflight(short)
    with pytest.raises(ConfigError, match=r"--hidden-states: the servers of teachers.1 .*--top-k"):
        build_cache(servers.served(4), 1, tmp_path / "c", CacheForm(None))
    assert not (tmp_path / "c").exists()


def test_the_command_fills_a_cache_from_servers(
    servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches texts that are cut differently than without servers, and a model that is loaded."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"A text, the {i}th."}) + "\n" for i in range(5)))
    model = servers.live.teachers[1].reference
    common = ["--data", str(texts), "--top-k", "4", "--max-length", "48"]
    served = ["--urls", servers.urls["same"], "--model", "the same", "--tokenizer", model]
    assert main(["cache", "build", *served, *common, "--output", str(tmp_path / "served")]) == 0
    assert (
        main(["cache", "build", "--model", model, *common, "--output", str(tmp_path / "loaded"), "--dtype", "float32"])
        == 0
    )
    ours, theirs = (CacheReader(tmp_path / name) for name in ("served", "loaded"))
    assert {key.tobytes() for key in ours.shards[0].keys} == {key.tobytes() for key in theirs.shards[0].keys}
    capsys.readouterr()
    with pytest.raises(SystemExit) as refused:
        main(["cache", "build", "--tokenizer", model, "--model", model, *common, "--output", str(tmp_path / "none")])
    assert refused.value.code == 1
    assert "it is only for --urls" in capsys.readouterr().err
