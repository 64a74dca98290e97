"""A whole training step with random weights: tokens/s, MFU, memory and where the time goes, beside TRL's GOLD trainer.

uv run benchmarks/step.py                                          # tiny models; writes benchmarks/results/step.*
uv run --with trl benchmarks/step.py                               # the same beside GOLD, step by step in turns
uv run --with trl benchmarks/step.py --length 64 256 1024 --set cluster.launcher=local   # ours in one process, as GOLD
uv run --with trl benchmarks/step.py --student llama_1b --teacher qwen_4b --length 2048 --rows 16 --micro 4   # a GPU
uv run benchmarks/step.py --student llama_1b --same-teacher llama_3b --teacher qwen_4b --length 2048 --rows 16 --micro 4
uv run benchmarks/step.py --student a/config.json --set student.parallelism.tp=2 cluster.gpus_per_node=8

Models are presets or config.json files; several of each make as many pairs. `--set` takes any settings of a run, such
as layouts, placement, `student.offload=true` and `student.compile=true`. Real tokenizers come from
NEMO_OPD_TOKENIZERS (a folder of folders) and text from NEMO_OPD_CORPUS (the folder of multidomain.jsonl), else both are
the demo's.
"""

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from demo import ROOT, commit, hardware
from losses_texts import DEMO_PAIR
from rich.console import Console
from step_gold import Gold, GoldError, Job
from step_models import PRESETS, Written, corpus_text, write_apart, write_texts
from step_ours import GIB, Ours, configured
from step_report import GOLD, OURS, Case, Found, Way, gold_is_missing, too_slow_or_misjudged, write

from nemo_opd.config import RunConfig
from nemo_opd.models.load import load_tokenizer
from nemo_opd.preflight import flops
from nemo_opd.preflight.summary import device_name

FORMULA = "\n".join((flops.__doc__ or "").splitlines()[2:])


@dataclass(frozen=True)
class Inputs:
    """What both trainers read."""

    student: Written
    teachers: tuple[Written, ...]
    """The one with another tokenizer last."""
    length: int
    """Tokens of a text."""
    texts: Path
    scratch: Path


def tokenizers_of(options: argparse.Namespace) -> tuple[str, str]:
    if options.tokenizers is None:
        return DEMO_PAIR
    student, _, teacher = options.pair.partition(":")
    return str(options.tokenizers / student), str(options.tokenizers / teacher)


def make_inputs(options: argparse.Namespace, student: str, teacher: str, length: int, scratch: Path) -> Inputs:
    """Raises SystemExit for models that cannot be made."""
    names, folder = tokenizers_of(options), options.models or scratch
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [(student, names[0], "student"), (teacher, names[1], "teacher")]
    if options.same_teacher is not None:
        wanted.insert(1, (options.same_teacher, names[0], "same"))
    models = [Written(name, tokenizer, folder / f"{side}_{name.replace('/', '_')}") for name, tokenizer, side in wanted]
    write_apart(models, torch.bfloat16 if options.device == "cuda" else torch.float32, options.device)
    tokenizers = tuple(load_tokenizer(name, key="--pair") for name in names)
    texts = write_texts(
        folder / f"texts_{length}.jsonl",
        corpus_text(options.corpus),
        tokenizers,
        count=options.texts,
        length=length,
    )
    return Inputs(models[0], tuple(models[1:]), length, texts, scratch)


def run_config(options: argparse.Namespace, inputs: Inputs, loss: str) -> RunConfig:
    on_gpu = options.device == "cuda"
    base: dict[str, Any] = {
        "run": {"name": "step", "output_dir": str(inputs.scratch / f"run_{loss}")},
        "train": {
            "max_steps": options.warmup + options.rounds + (options.profile is not None),
            "global_batch_size": options.rows,
            "micro_batch_size": options.micro,
            "max_length": inputs.length,
        },
        "student": {
            "model": str(inputs.student.folder),
            "activation_checkpointing": options.checkpointing,
            "optimizer": {"lr": 1e-5},
        },
        "teachers": [
            {
                "name": name,
                "type": f"{name}_tokenizer",
                "model": str(model.folder),
                "dtype": "bfloat16" if on_gpu else "float32",
            }
            for model in inputs.teachers
            for name in ["same" if model.tokenizer == inputs.student.tokenizer else "cross"]
        ],
        "loss": {"type": loss},
        "data": {"train": {"jsonl_files": [str(inputs.texts)]}, "cache": False},
        "cluster": {"device": options.device} | ({"gpus_per_node": 1} if on_gpu else {}),
        "logging": {"console": {"enabled": False}},
    }
    return configured(base, options.overrides)


def gold_job(options: argparse.Namespace, inputs: Inputs, loss: str, config: RunConfig, threads: int) -> Job:
    return Job(
        student=inputs.student.folder,
        teacher=inputs.teachers[0].folder,
        texts=inputs.texts,
        scratch=inputs.scratch / f"gold_{loss}",
        steps=options.warmup + options.rounds + 1,
        rows=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        length=config.train.max_length,
        device=options.device,
        threads=threads,
        checkpointing=config.student.activation_checkpointing,
        is_hybrid=loss != "uld",
        ce_weight=config.loss.ce_weight,
    )


def start_gold(stack: ExitStack, options: argparse.Namespace, ours: Ours, job: Job) -> tuple[Gold | None, str]:
    """The trainer, or why there is none."""
    if options.without_gold:
        return None, "not asked for"
    if len(ours.config.active_teachers) > 1:
        return None, "it has one teacher, and these are several"
    if ours.num_devices > 1:
        return None, f"it is compared on one device, and these are {ours.num_devices}"
    try:
        version("trl")
        return stack.enter_context(Gold(job, options.gold_limit)), ""
    except PackageNotFoundError:
        return None, "TRL is not installed; add it with `uv run --with trl`"
    except GoldError as error:
        return None, str(error)


def measure(options: argparse.Namespace, inputs: Inputs, loss: str) -> Case:
    config = run_config(options, inputs, loss)
    before = os.getloadavg()[0]
    with ExitStack() as stack:
        ours = stack.enter_context(Ours(config))
        job = gold_job(options, inputs, loss, config, ours.threads)
        gold, missing = start_gold(stack, options, ours, job)
        own: list[float] = []
        theirs: list[float] = []
        for _ in range(options.warmup + options.rounds):
            own.append(ours.step())
            # As soon as there is something: a later step may take the machine down.
            print(json.dumps(ours.records[-1]), flush=True)
            if gold is not None:
                try:
                    theirs.append(gold.step())
                    print(json.dumps({"trainer": GOLD, "step_s": theirs[-1]}), flush=True)
                except GoldError as error:
                    gold, missing = None, str(error)
        found = ours.memory()
        if options.profile is not None:
            ours.profile(options.profile)
        kept = slice(options.warmup, None)
        gold_way = None if gold is None else Way(GOLD, theirs[kept], gold.peak_bytes() / GIB)
        work = ours.work[options.warmup + options.rounds // 2]
        student_peak = max(record["perf/peak_memory_gb"] for record in ours.records)
        return Case(
            student=inputs.student.name,
            teacher=" + ".join(model.name for model in inputs.teachers),
            loss=loss,
            length=inputs.length,
            layout=" ".join(options.overrides) or "one rank each",
            threads=ours.threads,
            work=work,
            flops=ours.flops(work),
            devices=ours.num_devices,
            ours=Way(OURS, own[kept], student_peak),
            gold=gold_way,
            gold_is_missing=missing,
            records=ours.records[kept],
            memory=found,
            load=(before, os.getloadavg()[0]),
        )


def facts(options: argparse.Namespace, cases: list[Case]) -> dict[str, str]:
    on_gpu = options.device == "cuda"
    loads = sorted(load for case in cases for load in case.load)
    with_trl = ["--with trl"] if any(case.gold for case in cases) else []
    packages = ["torch", "transformers", *(["trl"] if with_trl else [])]
    return {
        "hardware": torch.cuda.get_device_name() if on_gpu else hardware(),
        "packages": ", ".join(f"{name} {version(name)}" for name in packages),
        "commit": commit(),
        "date": date.today().isoformat(),
        "command": " ".join(["uv run", *with_trl, "benchmarks/step.py", *sys.argv[1:]]),
        "batch": f"{options.rows} texts, {options.micro} at a time",
        "settings": " ".join(options.overrides) or "one rank of each model, colocated",
        "precision": "bf16, fp32 master weights" if on_gpu else "fp32",
        "threads": f"{cases[0].threads} of each process, GOLD's too",
        "rounds": f"{options.rounds}, after {options.warmup} that do not count",
        "load": f"{loads[0]:.1f} to {loads[-1]:.1f} processes wanted a core meanwhile, where 1 to 2 are ours",
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = f"a config.json, or of {', '.join(PRESETS)}"
    parser.add_argument("--student", nargs="+", default=["llama_tiny"], help=names)
    parser.add_argument("--teacher", nargs="+", default=["qwen_tiny"], help="likewise, one for each student")
    parser.add_argument("--same-teacher", metavar="MODEL", help="another teacher, which has the student's tokenizer")
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="in which models and texts stay for other runs")
    parser.add_argument("--write-only", action="store_true", help="write --models, and measure nothing")
    parser.add_argument("--loss", nargs="+", default=["gold"], help="of a run; GOLD has its own")
    parser.add_argument("--tokenizers", type=Path, default=os.environ.get("NEMO_OPD_TOKENIZERS"))
    corpus = os.environ.get("NEMO_OPD_CORPUS")
    parser.add_argument("--corpus", type=Path, default=Path(corpus) / "multidomain.jsonl" if corpus else None)
    parser.add_argument("--pair", default="llama3_1:qwen3", metavar="STUDENT:TEACHER", help="folders of --tokenizers")
    parser.add_argument(
        "--length", type=int, nargs="+", default=[64], help="tokens of a text; several are tried in turn"
    )
    parser.add_argument("--rows", type=int, default=4, help="texts of a step")
    parser.add_argument("--micro", type=int, default=2, help="texts at a time")
    parser.add_argument("--texts", type=int, default=64, help="different ones")
    parser.add_argument("--checkpointing", action="store_true", help="of activations, in both trainers")
    parser.add_argument("--warmup", type=int, default=2, help="steps that do not count")
    parser.add_argument("--rounds", type=int, default=5, help="steps that do")
    parser.add_argument("--peak", type=float, help="FLOP/s of a device, where its name does not tell")
    parser.add_argument(
        "--mfu-floor",
        type=float,
        metavar="SHARE",
        help="exit status 1 if the MFU is below it, or memory a fifth away from its estimate",
    )
    whether_gold = parser.add_mutually_exclusive_group()
    whether_gold.add_argument("--without-gold", action="store_true", help="also where TRL is installed")
    whether_gold.add_argument("--require-gold", action="store_true", help="exit status 1 if GOLD cannot be measured")
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="of one more step, for chrome://tracing; with cluster.launcher=local",
    )
    parser.add_argument("--gold-limit", type=float, default=120, metavar="SECONDS", help="for a step of GOLD")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--set", nargs="+", default=[], dest="overrides", metavar="KEY=VALUE", help="of the run")
    options = parser.parse_args()
    if len(options.student) != len(options.teacher):
        parser.error(f"{len(options.student)} students and {len(options.teacher)} teachers do not make pairs")
    if options.write_only and options.models is None:
        parser.error("--write-only without --models FOLDER: name the folder in which the models stay")
    return options


def main() -> int:
    options = arguments()
    peak = options.peak or flops.peak_flops(device_name(options.device))
    cases: list[Case] = []
    text = ""
    pairs = zip(options.student, options.teacher, strict=True)
    for (student, teacher), length in product(pairs, options.length):
        with tempfile.TemporaryDirectory() as scratch:
            inputs = make_inputs(options, student, teacher, length, Path(scratch))
            for loss in [] if options.write_only else options.loss:
                cases.append(measure(options, inputs, loss))
                print(json.dumps(cases[-1].summary(peak)), flush=True)
                # As soon as there is something: a run of large models is long.
                text = write(options.output, Found(cases, peak, facts(options, cases)), FORMULA)
    Console(soft_wrap=True).print(text, markup=False)
    problems = [] if options.mfu_floor is None else too_slow_or_misjudged(cases, options.mfu_floor)
    if options.require_gold:
        problems += gold_is_missing(cases)
    print("\n".join(problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
