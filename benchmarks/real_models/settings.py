"""What the real-model benchmark compares: each setting is what a run's configuration has beside the common part."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.real_models.place import Place
from benchmarks.real_models.questions import TASK

Experiment = Literal["prune", "tokenizer", "languages", "gold", "on_policy"]
LOSSES = ("p_kl", "alm", "gold", "uld", "h_kl", "strict", "byte_prefix", "shared_prefix")
"""Across tokenizers, in the order in which they are run."""
TOP_K = 64
"""Tokens of a position in the cache."""


@dataclass(frozen=True)
class Setting:
    experiment: Experiment
    name: str
    about: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of the experiment's configuration; `{root}` in a string is the benchmark's folder."""
    control: str | None = None
    """Setting that this one is compared with; None where it is one itself."""
    as_long_as: tuple[str, str] | None = None
    """A setting with this configuration, and the one whose CPU time it is to take, by the number of its steps."""
    trainer: Literal["nemo_opd", "trl"] = "nemo_opd"


@dataclass(frozen=True)
class Size:
    """How long the runs are; tests have shorter ones."""

    steps: int = 40
    rows: int = 2
    max_length: int = 256
    on_policy_steps: int = 24
    on_policy_rows: int = 32
    dtype: str = "bfloat16"
    device: Literal["cpu", "cuda"] = "cpu"


ON_GPU = Size(steps=450, rows=32, max_length=2048, device="cuda")
"""Size of off-policy runs on a GPU: about 10⁷ tokens, as most texts are shorter than a row."""
_ROWS_AT_A_TIME = 8
"""Largest microbatch off-policy."""
_GRADIENTS_EVERY = 10
"""Steps between two comparisons of KD's gradient with cross-entropy's in `languages`; the median step has none."""
_DATA_WORKERS = 8
"""Processes that tokenize and align for a GPU."""


def student(name: str) -> dict[str, Any]:
    return {"student": {"model": f"{{root}}/models/{name}"}}


def teacher(kind: str, **more: Any) -> dict[str, Any]:
    return {"name": "original", "type": f"{kind}_tokenizer", "model": "{root}/models/original", **more}


CE_ONLY = {"loss": {"type": "same_vocab", "kd_weight": 0.0}, "teachers": [teacher("same")]}
KD = {"loss": {"type": "same_vocab"}, "teachers": [teacher("same")]}
CACHED = {"loss": {"type": "same_vocab"}, "teachers": [{"name": "original", "type": "cached", "cache": "{root}/cache"}]}
UNITS = {"normalizer": "units"}
"""The divisor of losses across tokenizers, unless a description says otherwise."""


def cross(loss: str, **more: Any) -> dict[str, Any]:
    return {"loss": {"type": loss} | UNITS | more, "teachers": [teacher("cross")]}


def pruned(model: str, short: str) -> list[Setting]:
    kept, ce = student(model), f"{model}_ce"
    return [
        Setting("prune", ce, f"{short}, cross-entropy alone", kept | CE_ONLY),
        Setting("prune", f"{model}_kd", f"{short}, cross-entropy and KD from the original", kept | KD, ce),
        Setting("prune", f"{model}_cached", f"{short}, the same from a cache, k = {TOP_K}", kept | CACHED, ce),
        Setting(
            "prune",
            f"{model}_ce_as_long",
            f"{short}, cross-entropy alone, for the CPU time of {model}_kd",
            kept | CE_ONLY,
            ce,
            (ce, f"{model}_kd"),
        ),
    ]


ENDS = {
    "drop": "given whether a token has ended (A)",
    "cover": "with tokens that reach beyond (B)",
    "rest": "ended tokens in the rest cell (BPM)",
}
"""Of `byte_prefix` at every student position, with how a table describes them."""


def transplanted(tokenizer: str, losses: tuple[str, ...]) -> list[Setting]:
    mapped, drawn = student(f"{tokenizer}_tokenizer"), student(f"{tokenizer}_tokenizer_random")
    of_ce = cross("p_kl", kd_weight=0.0)
    ce, p_kl = f"{tokenizer}_ce", f"{tokenizer}_p_kl"

    def own(name: str, about: str, changes: dict[str, Any], **more: Any) -> Setting:
        return Setting("tokenizer", f"{tokenizer}_{name}", f"{tokenizer}: {about}", changes, ce, **more)

    return [
        Setting("tokenizer", ce, f"{tokenizer}: mapped rows, cross-entropy alone", mapped | of_ce),
        *(own(loss, f"mapped rows, cross-entropy and {loss}", mapped | cross(loss)) for loss in losses[:2]),
        own("random_ce", "random rows, cross-entropy alone", drawn | of_ce),
        *(own(loss, f"mapped rows, cross-entropy and {loss}", mapped | cross(loss)) for loss in losses[2:]),
        *(
            own(
                f"positions_{ends}",
                f"mapped rows, cross-entropy and byte_prefix everywhere, {about}",
                mapped | cross("byte_prefix", positions="all", ends=ends, pieces="spelling"),
            )
            for ends, about in ENDS.items()
        ),
        own("random_p_kl", "random rows, cross-entropy and p_kl", drawn | cross("p_kl")),
        own(
            "ce_as_long",
            f"mapped rows, cross-entropy alone, for the CPU time of {p_kl}",
            mapped | of_ce,
            as_long_as=(ce, p_kl),
        ),
    ]


GEMMA = {"name": "gemma", "type": "cross_tokenizer", "model": "{root}/models/gemma3"}
GEMMA_CACHED = {"name": "gemma", "type": "cached", "cache": "{root}/cache_gemma"}
EVERYWHERE = {"positions": "all", "pieces": "spelling"}


def _with_gemma(
    name: str,
    about: str,
    loss: str,
    *,
    gemma: Mapping[str, Any] = GEMMA,
    as_long_as: str | None = None,
    **more: Any,
) -> Setting:
    changes = student("original") | {"loss": {"type": loss} | UNITS | more, "teachers": [gemma]}
    is_timed = None if as_long_as is None else ("gemma_ce", as_long_as)
    return Setting("languages", f"gemma_{name}", about, changes, None if name == "ce" else "gemma_ce", is_timed)


def _byte_prefix_arms(suffix: str, source: str, gemma: Mapping[str, Any]) -> list[Setting]:
    """Return `byte_prefix` at starts of chunks and everywhere. source: of the teacher's output, for descriptions."""
    return [
        _with_gemma(f"starts{suffix}", f"cross-entropy and byte_prefix{source}", "byte_prefix", gemma=gemma),
        *(
            _with_gemma(
                f"{ends}{suffix}",
                f"cross-entropy and byte_prefix everywhere, {about}{source}",
                "byte_prefix",
                gemma=gemma,
                ends=ends,
                **EVERYWHERE,
            )
            for ends, about in ENDS.items()
        ),
    ]


WITH_GEMMA = [
    _with_gemma("ce", "cross-entropy alone", "byte_prefix", kd_weight=0.0),
    *_byte_prefix_arms("", "", GEMMA),
    *_byte_prefix_arms("_cached", f", from a cache, k = {TOP_K}", GEMMA_CACHED),
    *(
        _with_gemma(
            f"drop_cached_{name}",
            f"the same as `drop_cached`, {about}",
            "byte_prefix",
            gemma=GEMMA_CACHED,
            kd_weight=kd_weight,
            ce_weight=ce_weight,
            **EVERYWHERE,
        )
        for name, about, kd_weight, ce_weight in (
            ("mostly", "with three times the weight of cross-entropy", 3.0, 1.0),
            ("alone", "without cross-entropy", 1.0, 0.0),
            ("half", "with half the weight of cross-entropy", 0.5, 1.0),
        )
    ),
    _with_gemma(
        "starts_cached_by_token",
        "the same as `starts_cached`, divided by tokens",
        "byte_prefix",
        gemma=GEMMA_CACHED,
        normalizer="student_tokens",
    ),
    *(
        _with_gemma(
            f"alm_cached_{temperature}",
            f"cross-entropy and alm at temperature {temperature}, from a cache, k = {TOP_K}",
            "alm",
            gemma=GEMMA_CACHED,
            temperature=float(temperature),
        )
        for temperature in (1, 10, 100)
    ),
    _with_gemma(
        "starts_by_token",
        "cross-entropy and byte_prefix, divided by tokens",
        "byte_prefix",
        normalizer="student_tokens",
    ),
    _with_gemma(
        "ce_as_long",
        "cross-entropy alone, for the CPU time of `drop`",
        "byte_prefix",
        kd_weight=0.0,
        as_long_as="gemma_drop",
    ),
    _with_gemma(
        "ce_as_long_cached",
        "cross-entropy alone, for the CPU time of `drop_cached` and its cache",
        "byte_prefix",
        kd_weight=0.0,
        as_long_as="gemma_drop_cached",
    ),
    _with_gemma("p_kl", "cross-entropy and p_kl", "p_kl"),
    _with_gemma("gold", "cross-entropy and gold", "gold"),
    _with_gemma("alm", "cross-entropy and alm at temperature 100", "alm"),
    _with_gemma("alm_1", "cross-entropy and alm at temperature 1", "alm", temperature=1.0),
]
"""Gemma-3-270M teaches SmolLM2-135M other languages."""
PAIR = student("demo_tokenizer")
GOLD = [
    Setting("gold", "trl_ours", "TRL GOLD, our optimizer and weights", PAIR | cross("gold"), trainer="trl"),
    Setting("gold", "trl_own", "TRL GOLD, its own defaults", PAIR | cross("gold"), "trl_ours", trainer="trl"),
    Setting(
        "gold",
        "gold_trl",
        "nemo_opd gold with TRL's weights and merge",
        PAIR | cross("gold", compat="trl"),
        "trl_ours",
    ),
    Setting(
        "gold",
        "p_kl_as_long",
        "nemo_opd p_kl, for the CPU time of trl_ours",
        PAIR | cross("p_kl"),
        "trl_ours",
        ("demo_p_kl", "trl_ours"),
    ),
]
BESIDE_GOLD = ("demo_ce", "demo_gold", "demo_p_kl")
"""Settings of the other tokenizer that have the same pair, texts and steps as those of GOLD."""
CONTEXT = {"template": "{prompt}\n\nThe solution is: {solution}", "gap_every": 8}
SELF = {"name": "told", "type": "same_tokenizer", "context": CONTEXT}
FROZEN = {**SELF, "model": "{root}/models/original"}
ON_POLICY = [
    Setting(
        "on_policy",
        "frozen",
        "a frozen copy that reads the solution",
        student("original") | {"teachers": [FROZEN]},
    ),
    Setting(
        "on_policy",
        "ema",
        "an average of its own weights that reads the solution",
        student("original") | {"teachers": [{**SELF, "weights": "ema", "ema_decay": 0.95}]},
    ),
    Setting(
        "on_policy",
        "grpo",
        "no teacher: GRPO, four samples a question",
        student("original") | {"teachers": [FROZEN], "loss": {"type": "grpo"}, "rollout": {"n": 4}},
    ),
]
SETTINGS: tuple[Setting, ...] = (
    *pruned("half", "every second layer"),
    *WITH_GEMMA,
    *transplanted("demo", LOSSES),
    *ON_POLICY,
    *GOLD,
    *transplanted("trained", ("p_kl", "alm")),
    *pruned("third", "every third layer"),
)
"""In the order of the first seed."""
LATER_SEEDS = {
    "prune": ("half_ce", "half_kd", "half_cached", "half_ce_as_long"),
    "languages": ("gemma_ce", "gemma_drop", "gemma_ce_as_long"),
    "tokenizer": ("demo_ce", "demo_p_kl", "demo_alm", "demo_gold", "demo_random_ce"),
    "gold": ("trl_ours", "gold_trl", "p_kl_as_long"),
    "on_policy": ("frozen", "ema", "grpo"),
}
"""Settings that further seeds repeat."""


def configuration(setting: Setting, seed: int, steps: int, size: Size, place: Place) -> dict[str, Any]:
    """Return the settings of a run as a nested dict; `steps`: of the optimizer."""
    common = _on_policy(size) if setting.experiment == "on_policy" else _off_policy(setting, size)
    folder = place.run(setting.experiment, setting.name, seed)
    run = {
        "run": {"name": setting.name, "output_dir": str(folder), "seed": seed, "resume": "auto"},
        "train": {"max_steps": steps, "save_every": max(1, steps // 2), "keep_last": 1},
        "cluster": {"launcher": "local", "device": size.device},
        "logging": {"console": {"enabled": False}},
    }
    filled = merged(merged(common, dict(setting.changes)), run)
    return dict(_filled(filled, str(place.root)))


def _off_policy(setting: Setting, size: Size) -> dict[str, Any]:
    is_languages = setting.experiment == "languages"
    files, lr = ("languages_", 1e-4) if is_languages else ("", 3e-4)
    validation = {"validation": {"jsonl_files": ["{root}/data/validation.jsonl"]}, "domain_key": "domain"}
    loss = setting.changes["loss"]
    has_both = loss.get("kd_weight", 1.0) > 0 and loss.get("ce_weight", 1.0) > 0
    return {
        "student": {
            "dtype": size.dtype,
            "optimizer": {"lr": lr},
            "scheduler": {"warmup_steps": max(1, size.steps // 10)},
        },
        "data": {
            "num_workers": _DATA_WORKERS if size.device == "cuda" else 0,
            "train": {"jsonl_files": [f"{{root}}/data/{files}train.jsonl"]},
            **({} if is_languages else validation),
            "append_eos": False,
        },
        "train": {
            "global_batch_size": size.rows,
            "micro_batch_size": min(size.rows, _ROWS_AT_A_TIME),
            "max_length": size.max_length,
        },
        "logging": {"gradients_every": _GRADIENTS_EVERY if is_languages and has_both else None},
    }


def _on_policy(size: Size) -> dict[str, Any]:
    rows = size.on_policy_rows
    return {
        "student": {"dtype": size.dtype, "optimizer": {"lr": 1e-4}, "scheduler": {"warmup_steps": 2}},
        "data": {"train": {"jsonl_files": ["{root}/data/sums_train.jsonl"]}, "messages_key": "messages"},
        "train": {"global_batch_size": rows, "micro_batch_size": rows, "max_length": 96},
        "rollout": {"type": "hf", "n": 1, "max_new_tokens": 24, "temperature": 0.7},
        "reward": {"type": "numeric"},
        "loss": {"type": "same_vocab", "divergence": "reverse_kl", "ce_weight": 0.0},
        "evaluation": {
            "every": 8,
            "sets": {"sums": {"data": {"jsonl_files": ["{root}/data/sums_held_out.jsonl"]}}},
        },
    }


def evaluation(model: str, output: str, place: Place, dtype: str) -> dict[str, Any]:
    """Return the settings that ask a model which line follows."""
    return {
        "model": model,
        "dtype": dtype,
        "device": "cpu",
        "benchmarks": [{"task": TASK}],
        "task_folder": str(place.tasks),
        "confirm_task_code": True,
        "output_dir": output,
    }


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, of which the second wins where neither is a section."""
    result = dict(first)
    for key, value in second.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def _filled(value: Any, root: str) -> Any:
    if isinstance(value, str):
        return value.replace("{root}", root)
    if isinstance(value, Mapping):
        return {key: _filled(each, root) for key, each in value.items()}
    return [_filled(each, root) for each in value] if isinstance(value, list) else value
