"""Cases: a draw with its plan and batches, the reference's results, and the comparison with a run's results."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from torch import Tensor

from nemo_opd.alignment import pieces_of
from nemo_opd.config import RunConfig
from nemo_opd.data.collate import collate
from nemo_opd.data.loader import SampleSource
from nemo_opd.data.row_types import Prompt, Rollout
from nemo_opd.errors import OPDError
from nemo_opd.preflight.plan import Plan, preflight
from nemo_opd.preflight.prompts import Prompts
from nemo_opd.training.batches import with_rollouts
from nemo_opd.training.step_metrics import objective_values
from nemo_opd.types import Batch, Last
from tests.campaign.draws import BATCH, STEPS, Draw, with_models
from tests.campaign.models import tokenizer
from tests.reference.trainer import train as plain_training
from tests.tiny import SENTENCES
from tests.workers.local import Trained, Training
from tests.workers.plain_trainer import Rows, plain_rows, plain_run

ROUNDING = {"float64": 1.2e-7, "float32": 2e-6}
"""Relative rounding errors of a model. With float64, transformers' norms, master weights and the sums of gradients over
ranks are fp32 (2⁻²³); with float32, sums of about a hundred such numbers are as well.
"""
SAFETY = 10
FLOOR = 1e-2
"""Smaller values are compared with the absolute tolerance of this one."""


@dataclass(frozen=True)
class Expected:
    curve: list[dict[str, float]]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    drawn: Draw
    plan: Plan
    batches: list[Batch]
    rows: list[Rows]
    """The batches in the reference's form."""

    @property
    def training(self) -> Training:
        return Training(self.plan, self.batches)

    def expected(self, nudge: float = 0.0) -> Expected:
        pieces = [pieces_of(tokenizer(teacher.tokenizer)).as_list() for teacher in self.drawn.teachers]
        return Expected(*plain_training(plain_run(self.plan, self.rows, pieces), nudge))


class RefusedError(Exception):
    """The drawn settings do not go together."""


def case(drawn: Draw, folder: Path) -> Case:
    """Plan a draw and make its batches. Raises RefusedError with the message of the configuration or preflight."""
    documents = write_documents(folder, drawn)
    data: dict[str, Any] = {"train": {"jsonl_files": [str(documents)]}, "shuffle": False, "cache": False}
    if drawn.on_policy:
        data["response_key"] = "response"
    # With an address, the number of this machine's cores is not checked.
    cluster = {"device": "cpu", "cpu_ranks": drawn.world, "address": "auto"}
    output = {"output_dir": str(folder / "output")}
    try:
        settings = with_models(drawn, folder) | {"data": data, "cluster": cluster, "run": output}
        plan = preflight(RunConfig.model_validate(settings))
    except (ValidationError, OPDError) as error:
        raise RefusedError(str(error)) from error
    plan = replace(plan, config=in_dtype(plan.config, drawn.dtype))
    both = [(rollout_batch if drawn.on_policy else document_batch)(plan, drawn, step) for step in range(STEPS)]
    return Case(drawn, plan, *map(list, zip(*both, strict=True)))


def document_batch(plan: Plan, drawn: Draw, step: int) -> tuple[Batch, Rows]:
    """Return the next documents in their order; the last batch of an epoch is short."""
    number = len(plan.data.train)
    begin = step % math.ceil(number / BATCH) * BATCH
    indices = list(range(number))[begin : begin + BATCH]
    samples = list(SampleSource.of(plan.data.train, plan.data.make_sample).each(indices))
    return collate(samples), plain_rows(samples, None, [route(plan, drawn, i) for i in indices])


def route(plan: Plan, drawn: Draw, index: int) -> dict[str, Any]:
    is_routed = plan.config.aggregation.type == "routed"
    return {"prompt": index, "route": routes(drawn)[index] if is_routed else None}


def in_dtype(config: RunConfig, dtype: str) -> RunConfig:
    """Set the dtype of all models, also float64, which settings do not allow."""
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


def rollout_batch(plan: Plan, drawn: Draw, step: int) -> tuple[Batch, Rows]:
    """Return two rollouts of each of two prompts, and the dataset's responses to two more prompts."""
    data = plan.data
    assert isinstance(data, Prompts)
    random = np.random.default_rng([drawn.seed, step])
    prompts = [data.train.all()[i] for i in random.permutation(len(data.train))[:4]]
    sampled_prompts, dataset_prompts = prompts[:2], prompts[2:]
    rollouts = [rollout(prompt, sample, data, plan, random) for prompt in sampled_prompts for sample in range(2)]
    rewards = random.integers(0, 2, len(rollouts)).astype(float).tolist()
    samples = [data.make_sample(example) for example in (*rollouts, *map(data.from_dataset, dataset_prompts))]
    batch = with_rollouts(collate(samples), rollouts, dataset_prompts, rewards, plan.config)
    indices = [rollout.prompt.index for rollout in rollouts] + [prompt.index for prompt in dataset_prompts]
    all_rewards = [*rewards, *[0.0] * len(dataset_prompts)]
    facts = [route(plan, drawn, i) | {"reward": reward} for i, reward in zip(indices, all_rewards, strict=True)]
    return batch, plain_rows(samples, batch.sampled, facts)


def rollout(prompt: Prompt, sample: int, data: Prompts, plan: Plan, random: np.random.Generator) -> Rollout:
    """Return some words and random tokens as a rollout, with log-probabilities that are near the student's."""
    prompt_ids = data.student.renderer.prompt_ids(prompt)
    ordinary = np.flatnonzero(data.sample_maker.lengths)
    words = data.student.renderer.prompt_ids(replace(prompt, content=SENTENCES[int(random.integers(4))][:12]))
    response_ids = np.concatenate([words, random.choice(ordinary, 4)])[random.permutation(len(words) + 4)]
    response_ids = response_ids[: int(random.integers(1, 10))].astype(np.int32)
    stops = random.random() < 0.7
    response = data.student.renderer.text(response_ids)
    if stops:
        response_ids = np.append(response_ids, np.int32(min(data.student.end_ids)))
    ids = np.concatenate([prompt_ids, response_ids]).astype(np.int32)
    mask = np.arange(len(ids)) >= len(prompt_ids)
    logprobs = np.where(mask, random.normal(-6, 0.5, len(ids)), 0).astype(np.float32)
    warp = random.normal(0.5, 1, len(ids)) * (random.random() < 0.8)
    behaviour = np.where(mask, np.minimum(logprobs + warp, -0.1), 0).astype(np.float32)
    turns = np.array([[len(prompt_ids), len(ids)]], np.int32)
    finish = "stop" if stops else "length"
    return Rollout(prompt, sample, ids, mask, logprobs, behaviour, turns, (response,), (), finish, 0)


def differences(case: Case, trained: Trained) -> tuple[list[str], float]:
    """Return the differences from the reference, and the largest relative tolerance.

    The tolerance is SAFETY times the change of the reference if all its weights change by their rounding, up or down:
    the gradients of uld and tvd jump at weights for which two probabilities are equal.
    """
    expected, rounding = case.expected(), ROUNDING[case.drawn.dtype]
    wrong, width = compared(case, expected, [expected], trained, rounding)
    if not wrong:
        return [], width
    return compared(case, expected, [case.expected(rounding), case.expected(-rounding)], trained, rounding)


def compared(
    case: Case, expected: Expected, nudged: Sequence[Expected], trained: Trained, rounding: float
) -> tuple[list[str], float]:
    wrong, width = [], 0.0
    for step, (point, raw) in enumerate(zip(expected.curve, trained.curve, strict=True)):
        metrics = {name: Last(value) for name, value in raw.items()}
        reported = objective_values(case.plan.config, metrics, raw["kd_scale"], "train")
        for name, value in point.items():
            change = max(abs(run.curve[step][name] - value) for run in nudged)
            # CE is missing if it has no units.
            actual, size = reported.get(f"train/{name}", 0.0), max(FLOOR, abs(value))
            allowed = SAFETY * (change + rounding * size)
            width = max(width, allowed / size)
            if not abs(actual - value) <= allowed:
                wrong.append(f"step {step}: {name} is {actual}, not {value} ± {allowed:.1g}")
    lr = case.plan.config.student.optimizer.lr
    for name, weight in expected.weights.items():
        error, *changes = (float((run.weights[name] - weight).abs().max()) for run in (trained, *nudged))
        allowed = SAFETY * (max(changes) + rounding * STEPS * lr)
        if not error <= allowed:
            wrong.append(f"weights: {name} is off by {error:g}, not {allowed:.1g} at most")
    return wrong, width
