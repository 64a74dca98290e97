"""Draws made ready: the plan, the batches, and what the package and the reference make of them."""

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
from tests.campaign.plain import Rows, plain_rows, plain_run
from tests.reference.trainer import train as plain_training
from tests.tiny import SENTENCES
from tests.workers.local import Trained, Training

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
    rows: list[Rows]
    """The same as the reference takes it."""

    @property
    def training(self) -> Training:
        return Training(self.plan, self.batches)

    def expected(self, nudge: float = 0.0) -> Expected:
        pieces = [pieces_of(tokenizer(teacher.tokenizer)).as_list() for teacher in self.drawn.teachers]
        return Expected(*plain_training(plain_run(self.plan, self.rows, pieces), nudge))


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
    both = [(rollout_batch if drawn.on_policy else document_batch)(plan, drawn, step) for step in range(STEPS)]
    return Case(drawn, plan, *map(list, zip(*both, strict=True)))


def document_batch(plan: Plan, drawn: Draw, step: int) -> tuple[Batch, Rows]:
    """The documents in their order; the last batch of an epoch is short."""
    number = len(plan.data.train)
    begin = step % math.ceil(number / BATCH) * BATCH
    indices = list(range(number))[begin : begin + BATCH]
    samples = list(SampleSource.of(plan.data.train, plan.data.make_sample).each(indices))
    return collate(samples), plain_rows(samples, None, [route(plan, drawn, i) for i in indices])


def route(plan: Plan, drawn: Draw, index: int) -> dict[str, Any]:
    is_routed = plan.config.aggregation.type == "routed"
    return {"prompt": index, "route": routes(drawn)[index] if is_routed else None}


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


def rollout_batch(plan: Plan, drawn: Draw, step: int) -> tuple[Batch, Rows]:
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
    facts = [route(plan, drawn, i) | {"reward": reward} for i, reward in zip(indices, paid, strict=True)]
    return batch, plain_rows(samples, batch.sampled, facts)


def rollout(prompt: Prompt, sample: int, data: Prompts, plan: Plan, random: np.random.Generator) -> Rollout:
    """Some words and some random tokens as if sampled, by a policy that is not far from what the student is."""
    asked = data.student.renderer.prompt_ids(prompt)
    ordinary = np.flatnonzero(data.sample_maker.lengths)
    words = data.student.renderer.prompt_ids(replace(prompt, content=SENTENCES[int(random.integers(4))][:12]))
    said = np.concatenate([words, random.choice(ordinary, 4)])[random.permutation(len(words) + 4)]
    said = said[: int(random.integers(1, 10))].astype(np.int32)
    stops = random.random() < 0.7
    response = data.student.renderer.text(said)
    if stops:
        said = np.append(said, np.int32(min(data.student.end_ids)))
    ids = np.concatenate([asked, said]).astype(np.int32)
    mask = np.arange(len(ids)) >= len(asked)
    logprobs = np.where(mask, random.normal(-6, 0.5, len(ids)), 0).astype(np.float32)
    warp = random.normal(0.5, 1, len(ids)) * (random.random() < 0.8)
    behaviour = np.where(mask, np.minimum(logprobs + warp, -0.1), 0).astype(np.float32)
    turns = np.array([[len(asked), len(ids)]], np.int32)
    finish = "stop" if stops else "length"
    return Rollout(prompt, sample, ids, mask, logprobs, behaviour, turns, (response,), (), finish, 0)


def differences(case: Case, trained: Trained) -> tuple[list[str], float]:
    """What does not agree with the reference, nothing where all does; and how far off a value may be, relatively.

    A result may be off by SAFETY times what a change of all weights by their rounding, or the opposite change, does to
    the reference itself: the gradient of uld and of tvd jumps where two probabilities cross, on one side of a weight.
    """
    expected, rounding = case.expected(), ROUNDING[case.drawn.dtype]
    wrong, width = compared(case, expected, [expected], trained, rounding)
    if not wrong:
        return [], width
    return compared(case, expected, [case.expected(rounding), case.expected(-rounding)], trained, rounding)


def compared(
    case: Case, expected: Expected, nudged: Sequence[Expected], trained: Trained, rounding: float
) -> tuple[list[str], float]:
    found, width = [], 0.0
    for step, (wanted, raw) in enumerate(zip(expected.curve, trained.curve, strict=True)):
        metrics = {name: Last(value) for name, value in raw.items()}
        made = objective_values(case.plan.config, metrics, raw["kd_scale"], "train")
        for name, value in wanted.items():
            moved = max(abs(other.curve[step][name] - value) for other in nudged)
            # CE without a unit is left out.
            own, size = made.get(f"train/{name}", 0.0), max(FLOOR, abs(value))
            allowed = SAFETY * (moved + rounding * size)
            width = max(width, allowed / size)
            if not abs(own - value) <= allowed:
                found.append(f"step {step}: {name} is {own}, not {value} ± {allowed:.1g}")
    lr = case.plan.config.student.optimizer.lr
    for name, weight in expected.weights.items():
        error, *changes = (
            float((other - weight).abs().max())
            for other in (trained.weights[name], *(each.weights[name] for each in nudged))
        )
        allowed = SAFETY * (max(changes) + rounding * STEPS * lr)
        if not error <= allowed:
            found.append(f"weights: {name} is off by {error:g}, not {allowed:.1g} at most")
    return found, width
