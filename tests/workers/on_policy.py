"""On-policy runs of tiny models, and batches of random rollouts."""

import json
from pathlib import Path

import numpy as np

from nemo_opd.config.rollout import HFRollout
from nemo_opd.data.collate import collate
from nemo_opd.data.row_types import Prompt, Rollout
from nemo_opd.preflight.plan import Plan
from nemo_opd.preflight.prompts import Prompts
from nemo_opd.rollout import transformers_engine
from nemo_opd.rollout.collect import Collector
from nemo_opd.rollout.engine_interface import EngineSpec, Sampling
from nemo_opd.training.batches import with_rollouts
from nemo_opd.types import Batch
from tests.tiny import Tiny
from tests.workers.local import plan_of

QUESTIONS = ["12+34=", "for i in", "Größe", "привет"]
N = 2
BOTH = ["teachers=demo_multi", "loss=p_kl", "loss.ce_weight=0.5"]
CONTEXTS = [
    *BOTH,
    "teachers.0.context.template='{hint}: {prompt}'",
    "teachers.0.context.gap_every=1",
    "teachers.0.context.contrast=true",
    "teachers.1.context.template='It is {answer}, as {hint} is {response}. {prompt}'",
    "teachers.1.context.gap_every=1",
]
LOSSES = {
    "context": CONTEXTS,
    "tcad": [*BOTH, "teachers.1.loss.type=tcad", "teachers.1.loss.support_size=8", "teachers.1.loss.power_alpha=0.3"],
    "reward": [*BOTH, "reward.weighting_beta=0.7"],
    "sampled_kl": ["teachers=demo_multi", "loss=policy_gradient", "loss.ce_weight=0.5"],
    "sampled_kl, warped": [
        "teachers=demo_multi",
        "loss=policy_gradient",
        "loss.ce_weight=0.5",
        "rollout.temperature=0.6",
        "rollout.top_p=0.9",
    ],
    "sampled_kl, sequences": [
        "teachers=demo_multi",
        "loss=policy_gradient",
        "loss.ce_weight=0.5",
        "loss.importance_level=sequence",
        "loss.importance_cap=1.5",
        "loss.importance_veto=0.1",
    ],
    "grpo": [
        "teachers=demo_multi",
        "loss=grpo",
        "loss.kd_weight=0.3",
        "teachers.0.loss.type=strict",
        "loss.clip_low=0.02",
        "loss.importance_cap=1.05",
        "loss.importance_veto=0.05",
    ],
}


def write_prompts(folder: Path) -> Path:
    file = folder / "prompts.jsonl"
    rows = [
        {"text": text, "response": f" {i} done", "answer": str(i), "hint": f"hint {i * i * i}"}
        for i, text in enumerate(QUESTIONS)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def plan(tiny: Tiny, prompts: Path, *overrides: str) -> Plan:
    models = [f"teachers.0.model={tiny.teacher_cross}", f"teachers.1.model={tiny.teacher_same}"]
    return plan_of(
        [
            "student=demo",
            *overrides,
            *(models if "teachers=demo_multi" in overrides else []),
            f"student.model={tiny.student}",
            "data.train.arrow_files=null",
            f"data.train.jsonl_files={prompts}",
            "data.shuffle=false",
            "evaluation=null",
            "train.global_batch_size=8",
            "train.micro_batch_size=4",
            "train.max_length=40",
            "train.max_steps=2",
            f"rollout.n={N}",
            "rollout.max_new_tokens=12",
            "student.optimizer.lr=1e-2",
            "student.optimizer.eps=1e-3",
            "student.scheduler.warmup_steps=0",
        ],
        config_name="on_policy_demo",
    )


def batch_of(plan: Plan, seed: int) -> Batch:
    """Return random responses of different lengths to three prompts, and the dataset's response to the fourth."""
    data, config = plan.data, plan.config
    assert isinstance(data, Prompts)
    *sampled_prompts, dataset_prompt = data.train.all()
    random = np.random.default_rng(seed)
    end = min(data.student.end_ids)
    if config.rollout is not None and config.rollout.top_p < 1:
        rollouts = sampled_rollouts(plan, sampled_prompts, seed)
    else:
        rollouts = [rollout_of(prompt, sample, data, random, end) for prompt in sampled_prompts for sample in range(N)]
    rewards = random.integers(0, 2, len(rollouts)).astype(float).tolist()
    samples = [data.make_sample(example) for example in (*rollouts, data.from_dataset(dataset_prompt))]
    return with_rollouts(collate(samples), rollouts, [dataset_prompt], rewards, config)


def sampled_rollouts(plan: Plan, prompts: list[Prompt], seed: int) -> list[Rollout]:
    """Sample with the initial student and the run's settings."""
    settings, data = plan.config.rollout, plan.data
    assert settings is not None
    assert isinstance(data, Prompts)
    spec = EngineSpec(plan.student_vocab_size, data.student.end_ids, "float32", Path())
    sampling = Sampling(settings.temperature, settings.top_p, settings.top_k)
    with transformers_engine.for_model(HFRollout(batch_size=8), spec, plan.config.student.model, "cpu") as engine:
        collector = Collector(
            engine, data.student.renderer, sampling=sampling, max_new_tokens=11, max_length=40, seed=seed
        )
        return collector.collect(prompts, N, 0)


def rollout_of(prompt: Prompt, sample: int, data: Prompts, random: np.random.Generator, end: int) -> Rollout:
    prompt_ids = data.student.renderer.prompt_ids(prompt)
    response_ids = random.integers(1, 300, random.integers(1, 11)).astype(np.int32)
    response_ids = np.append(response_ids[response_ids != end], np.int32(end))
    ids = np.concatenate([prompt_ids, response_ids])
    mask = np.arange(len(ids)) >= len(prompt_ids)
    logprobs = np.where(mask, random.normal(-6, 0.5, len(ids)), 0).astype(np.float32)
    behaviour = np.where(mask, logprobs + random.normal(0.5, 0.3, len(ids)), 0).astype(np.float32)
    turns = np.array([[len(prompt_ids), len(ids)]], np.int32)
    responses = (data.student.renderer.text(response_ids[:-1]),)
    return Rollout(prompt, sample, ids, mask, logprobs, behaviour, turns, responses, (), "stop", 0)
