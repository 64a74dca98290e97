"""Draws made ready: the plan, the batches, and what the package and the reference make of them."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from torch import Tensor

from nemo_opd.config import RunConfig
from nemo_opd.data.collate import collate
from nemo_opd.errors import OPDError
from nemo_opd.rollout.record import Prompt, Rollout
from nemo_opd.training.objective import objective_values
from nemo_opd.training.plan import Plan
from nemo_opd.training.preflight import preflight
from nemo_opd.training.prompts import Prompts
from nemo_opd.training.rollout_source import with_rollouts
from nemo_opd.types import Batch, Last
from tests.campaign.draws import BATCH, STEPS, Draw, with_models
from tests.campaign.plain import Facts, plain_run
from tests.reference.trainer import train as plain_training
from tests.tiny import SENTENCES
from tests.workers.local import Trained, Training, first_batches

ROUNDING = {"float64": 1.2e-7, "float32": 2e-6}
"""Relative, of what a model computes: float64 models of transformers have norms in fp32, and master weights and the
sums of gradients over ranks are fp32 (2⁻²³); in float32 sums of some hundred such numbers besides.
"""
SAFETY = 10
FLOOR = 1e-2
"""Values that are smaller are as fine as this one."""


@dataclass(frozen=True)
class Expected:
    curve: list[dict[str, float]]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    drawn: Draw
    plan: Plan
    batches: list[Batch]
    facts: list[Facts]

    @property
    def training(self) -> Training:
        return Training(self.plan, self.batches)

    def expected(self, nudge: float = 0.0) -> Expected:
        names = [own.tokenizer for own in self.drawn.teachers]
        return Expected(*plain_training(plain_run(self.plan, self.batches, self.facts, names), nudge))


class RefusedError(Exception):
    """The settings drawn do not go together."""


def case(drawn: Draw, folder: Path) -> Case:
    """Raises RefusedError with what the configuration or preflight says."""
    documents = write_documents(folder, drawn)
    data: dict[str, Any] = {"train": {"jsonl_files": [str(documents)]}, "shuffle": False, "cache": False}
    if drawn.on_policy:
        data["response_key"] = "response"
    # With an address nobody asks whether this machine has a core for each rank.
    cluster = {"device": "cpu", "cpu_ranks": drawn.world, "address": "auto"}
    output = {"output_dir": str(folder / "output")}
    try:
        settings = with_models(drawn, folder) | {"data": data, "cluster": cluster, "run": output}
        plan = preflight(RunConfig.model_validate(settings))
    except (ValidationError, OPDError) as error:
        raise RefusedError(str(error)) from error
    plan = replace(plan, config=in_dtype(plan.config, drawn.dtype))
    if drawn.on_policy:
        batches, facts = zip(*(rollout_batch(plan, drawn, step) for step in range(STEPS)), strict=True)
        return Case(drawn, plan, list(batches), list(facts))
    batches = first_batches(plan, STEPS)
    number = len(plan.data.train)
    facts = []
    begin = 0
    for batch in batches:
        facts.append([{"prompt": b, "route": routes(drawn)[(begin + b) % number]} for b in range(len(batch))])
        begin += len(batch)
    return Case(drawn, plan, batches, facts)


def in_dtype(config: RunConfig, dtype: str) -> RunConfig:
    """What is computed in, on both sides; float64 is no setting, as only tests need it."""
    teachers = tuple(teacher.model_copy(update={"dtype": dtype}) for teacher in config.teachers)
    student = config.student.model_copy(update={"dtype": dtype})
    return config.model_copy(update={"teachers": teachers, "student": student})


def write_documents(folder: Path, drawn: Draw) -> Path:
    random = np.random.default_rng(drawn.seed)
    file = folder / f"documents_{drawn.seed}.jsonl"
    rows = []
    for i, route in enumerate(routes(drawn)):
        order = random.permutation(len(SENTENCES))
        text = "".join(SENTENCES[k][int(random.integers(6)) :] for k in order[: 1 + i % 3])
        text = text[: int(random.integers(2, 12))] if drawn.on_policy else text
        row = {"text": "x" if i == 4 and not drawn.on_policy else text, "from": f"t{route}"}
        rows.append(row | {"response": SENTENCES[order[0]][:10], "answer": "1"})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def routes(drawn: Draw) -> list[int]:
    random = np.random.default_rng(drawn.seed + 1)
    return random.integers(len(drawn.teachers), size=BATCH * STEPS - 3).tolist()


def rollout_batch(plan: Plan, drawn: Draw, step: int) -> tuple[Batch, Facts]:
    """Two rollouts of each of two prompts, and the responses that the dataset has to two others."""
    data = plan.data
    assert isinstance(data, Prompts)
    random = np.random.default_rng([drawn.seed, step])
    prompts = [data.train.all()[i] for i in random.permutation(len(data.train))[:4]]
    own, others = prompts[:2], prompts[2:]
    rollouts = [rollout(prompt, sample, data, plan, random) for prompt in own for sample in range(2)]
    rewards = random.integers(0, 2, len(rollouts)).astype(float).tolist()
    samples = [data.make_sample(each) for each in (*rollouts, *map(data.from_dataset, others))]
    batch = with_rollouts(collate(samples), rollouts, others, rewards, plan.config)
    indices = [each.prompt.index for each in rollouts] + [prompt.index for prompt in others]
    paid = [*rewards, *[0.0] * len(others)]
    return batch, [
        {"prompt": index, "route": routes(drawn)[index], "reward": reward}
        for index, reward in zip(indices, paid, strict=True)
    ]


def rollout(prompt: Prompt, sample: int, data: Prompts, plan: Plan, random: np.random.Generator) -> Rollout:
    """Some words and some random tokens as if sampled, by a policy that is not far from what the student is."""
    asked = data.renderer.prompt_ids(prompt)
    ordinary = np.flatnonzero(data.sample_maker.lengths)
    words = data.renderer.prompt_ids(replace(prompt, content=SENTENCES[int(random.integers(4))][:12]))
    said = np.concatenate([words, random.choice(ordinary, 4)])[random.permutation(len(words) + 4)]
    said = said[: int(random.integers(1, 10))].astype(np.int32)
    stops = random.random() < 0.7
    response = data.renderer.text(said)
    if stops:
        said = np.append(said, np.int32(min(data.end_ids)))
    ids = np.concatenate([asked, said]).astype(np.int32)
    mask = np.arange(len(ids)) >= len(asked)
    logprobs = np.where(mask, random.normal(-6, 0.5, len(ids)), 0).astype(np.float32)
    turns = np.array([[len(asked), len(ids)]], np.int32)
    return Rollout(prompt, sample, ids, mask, logprobs, turns, (response,), (), "stop" if stops else "length", 0)


def differences(case: Case, trained: Trained) -> list[str]:
    """What does not agree with the reference; empty where all does.

    A result may be off by SAFETY times what a change of all weights by their rounding does to the reference itself.
    """
    expected, rounding = case.expected(), ROUNDING[case.drawn.dtype]
    if not compared(case, expected, expected, trained, rounding):
        return []
    return compared(case, expected, case.expected(rounding), trained, rounding)


def compared(case: Case, expected: Expected, nudged: Expected, trained: Trained, rounding: float) -> list[str]:
    found = []
    for step, (wanted, moved, raw) in enumerate(zip(expected.curve, nudged.curve, trained.curve, strict=True)):
        made = objective_values(case.plan.config, {name: Last(value) for name, value in raw.items()}, 1.0, "train")
        for name, value in wanted.items():
            own, allowed = (
                made[f"train/{name}"],
                SAFETY * (abs(moved[name] - value) + rounding * max(FLOOR, abs(value))),
            )
            if not abs(own - value) <= allowed:
                found.append(f"step {step}: {name} is {own}, not {value} ± {allowed:.1g}")
    lr = case.plan.config.student.optimizer.lr
    for name, weight in expected.weights.items():
        error, change = (float((other[name] - weight).abs().max()) for other in (trained.weights, nudged.weights))
        allowed = SAFETY * (change + rounding * STEPS * lr)
        if not error <= allowed:
            found.append(f"weights: {name} is off by {error:g}, not {allowed:.1g} at most")
    return found
