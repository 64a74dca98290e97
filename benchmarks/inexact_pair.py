"""A pair of which most rows are inexact: a projection that is learned against the fixed one, and cached teachers.

uv run benchmarks/inexact_pair.py            # writes benchmarks/results/inexact_pair.md and inexact_pair.json

The demo's student learns, without CE, from a teacher that is trained here on the demo's texts. Its tokenizer has fewer
tokens, whose words never begin with their space: most tokens of the student are spelled with several of the teacher's.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import product
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import torch
from datasets import Dataset
from demo import ROOT, commit, hardware
from rich.console import Console
from teacher_cache import RESULTS, Row, measured, settings, table, trained

from nemo_opd.config.run import RunConfig, from_dict
from nemo_opd.demo.python_sources import arrow_file
from nemo_opd.losses.learned_projection import learnable_pairs, learnable_rows
from nemo_opd.losses.sparse_projection import TokenPairs
from nemo_opd.models.load import load_tokenizer
from nemo_opd.projection import ProjectionMatrix, build_projection

sys.path.insert(0, str(ROOT / "tools" / "demo"))
from byte_bpe import BPERecipe, train_bpe
from recipes import RECIPES, ModelRecipe
from training import Budget, save, train

WORDS_WITHOUT_SPACES = BPERecipe(
    size=768, pattern=r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s", eos="<|end|>", pad="<|padding|>"
)
RECIPE = replace(RECIPES["teacher_cross"], bpe=WORDS_WITHOUT_SPACES)
LOSSES = ("p_kl", "h_kl")
RATES = {"fixed": None, "learned, rate 0.03": 0.03, "learned, rate 0.3": 0.3}
"""Setting → `projection_lr`."""


@dataclass(frozen=True)
class Learned:
    loss: str
    setting: str
    bits_per_byte: list[float]
    """Of the student on the validation texts, after training, by seed."""
    accuracy: list[float]
    moved: list[float]
    """Mean share of a learned row's weight that has moved."""


def make_teacher(folder: Path, steps: int, recipe: ModelRecipe = RECIPE) -> Path:
    texts = list(Dataset.from_file(str(arrow_file("train")))["text"])
    tokenizer = train_bpe(recipe.bpe, iter(texts))
    save(train(recipe, tokenizer, texts, Budget(steps), lambda step, loss: None), tokenizer, recipe, folder)
    return folder


def of_pair(config: RunConfig, teacher: Path, max_length: int) -> RunConfig:
    data = config.model_dump(mode="json")
    data["teachers"][0] |= {"model": str(teacher)}
    data["train"] |= {"max_length": max_length}
    return from_dict(data)


def learned(config: RunConfig, seeds: int, folder: Path, console: Console) -> list[Learned]:
    found = []
    for loss, (setting, rate) in product(LOSSES, RATES.items()):
        runs = []
        for seed in range(seeds):
            data = config.model_dump(mode="json")
            data["run"]["seed"] = seed
            data["teachers"][0] |= {"projection_lr": rate, "loss": {"type": loss}}
            runs.append(trained(from_dict(data), setting, folder / f"{loss} {setting} {seed}", None))
        bits, accuracy, moved = zip(*((run.bits_per_byte, run.accuracy, run.moved) for run in runs), strict=True)
        found.append(Learned(loss, setting, list(bits), list(accuracy), list(moved)))
        console.print(found[-1])
    return found


def report(
    of_learned: list[Learned], cached: list[Row], matrix: ProjectionMatrix, config: RunConfig, about: str
) -> str:
    learnable, exact = len(learnable_rows(matrix)), int(matrix.exact.sum())
    sizes = matrix.student_vocab_size, matrix.teacher_vocab_size
    in_pairs = len(learnable_pairs(matrix, TokenPairs.relaxed(matrix, *sizes, torch.device("cpu"))))
    train = config.train
    lines = [
        "# A pair of which most rows are inexact",
        "",
        f"{hardware()}; commit {commit()}; {date.today()}. `uv run benchmarks/inexact_pair.py`: {about}, "
        f"without CE, {train.max_steps} steps of 8 rows of {train.max_length} tokens. {learnable:,} of "
        f"{matrix.student_vocab_size:,} rows of the projection have several entries, {exact:,} are exact; "
        f"{in_pairs} of those with several entries are in a pair of h_kl. The machine did other work meanwhile.",
        "",
        "| loss | projection | student, bits per byte, by seed | mean | accuracy | moved |",
        "|---|---|---|---|---|---|",
    ]
    for each in of_learned:
        by_seed = ", ".join(f"{bits:.4f}" for bits in each.bits_per_byte)
        figures = f"{mean(each.bits_per_byte):.4f} | {mean(each.accuracy):.4f} | {mean(each.moved):.3f}"
        lines.append(f"| {each.loss} | {each.setting} | {by_seed} | {figures} |")
    return "\n".join(
        [
            *lines,
            "",
            "The first seed of p_kl again, with the fixed projection and cached teachers:",
            "",
            *table(cached),
            "",
        ]
    )


def run_options(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--texts", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--teacher-steps", type=int, default=600)
    return parser


def main() -> None:
    arguments = run_options(__doc__).parse_args()
    console = Console()
    with TemporaryDirectory() as name:
        folder = Path(name)
        teacher = make_teacher(folder / "teacher", arguments.teacher_steps)
        config = of_pair(settings(folder, arguments.steps, arguments.texts), teacher, arguments.max_length)
        own, theirs = (load_tokenizer(model, key="model") for model in (config.student.model, str(teacher)))
        matrix = build_projection(own, theirs, top_k=4)
        of_learned = learned(config, arguments.seeds, folder, console)
        cached = measured(config, folder, console)
    about = (
        f"the demo's student and a teacher of {arguments.teacher_steps} steps with {WORDS_WITHOUT_SPACES.size} tokens"
    )
    text = report(of_learned, cached, matrix, config, about)
    RESULTS.joinpath("inexact_pair.md").write_text(text, encoding="utf-8")
    record = {"hardware": hardware(), "commit": commit(), "date": str(date.today())} | vars(arguments)
    record |= {"learned": [asdict(each) for each in of_learned], "cached": [asdict(row) for row in cached]}
    RESULTS.joinpath("inexact_pair.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
