"""Makes the demo's models: corpus -> tokenizers -> models -> Hugging Face folders, with fixed seeds.

    uv run tools/demo/train_models.py --output nemo_opd/demo/models

Two models train at a time, a process and a thread each.
"""

import argparse
import math
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.managers import SyncManager
from pathlib import Path
from queue import Empty, Queue

import torch
from bits_per_byte import bits_per_byte
from byte_bpe import train_bpe
from datasets import Dataset
from recipes import RECIPES, SEQUENCE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from training import Budget, save, train
from transformers.utils.logging import disable_progress_bar

from nemo_opd.demo.python_sources import arrow_file

NICENESS = 5
WORKERS = 2


@dataclass(frozen=True)
class Step:
    """A finished step of one model; loss in nats per token."""

    model: str
    step: int
    loss: float


@dataclass(frozen=True)
class Trained:
    """A finished model, measured as saved."""

    model: str
    parameters: int
    steps: int
    train_tokens: int
    bits_per_byte: float
    size_bytes: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the chosen models and print their validation bits per byte."""
    options = _parser().parse_args(arguments)
    arrow_file("train")
    seconds = options.minutes * 60
    budgets = {name: Budget(options.steps or RECIPES[name].steps, seconds) for name in options.only}
    context = get_context("spawn")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with context.Manager() as manager, ProcessPoolExecutor(WORKERS, context, _be_nice) as pool:
        _print_results(_run(budgets, options.output, manager, pool))


def make_model(name: str, budget: Budget, output: Path, report: Callable[[Step], None]) -> Trained:
    """Train `name` within `budget`, replace its folder below `output` with the result, and measure it."""
    recipe = RECIPES[name]
    texts = _texts("train")
    tokenizer = train_bpe(recipe.bpe, iter(texts))
    steps = 0

    def count(step: int, loss: float) -> None:
        nonlocal steps
        steps = step
        report(Step(name, step, loss))

    model = train(recipe, tokenizer, texts, budget, count)
    folder = output / name
    partial = output / f".{name}.{uuid.uuid4().hex}"
    save(model, tokenizer, recipe, partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return Trained(
        model=name,
        parameters=model.num_parameters(),
        steps=steps,
        train_tokens=steps * recipe.batch * SEQUENCE,
        bits_per_byte=bits_per_byte(folder, _texts("validation")),
        size_bytes=sum(file.stat().st_size for file in folder.iterdir()),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder that gets one folder a model")
    parser.add_argument(
        "--only", nargs="+", choices=RECIPES, default=list(RECIPES), help="models to make (default: all)"
    )
    parser.add_argument("--steps", type=int, help="steps of every chosen model (default: its recipe's)")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="end a model's training, decayed, after this time"
    )
    return parser


def _run(budgets: dict[str, Budget], output: Path, manager: SyncManager, pool: ProcessPoolExecutor) -> list[Trained]:
    queue: Queue[Step] = manager.Queue()
    columns = (
        "[bold]{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
    )
    with Progress(*columns, TimeRemainingColumn()) as progress:
        tasks: dict[str, TaskID] = {}
        futures: list[Future[Trained]] = []
        for name, budget in budgets.items():
            tasks[name] = progress.add_task(name, total=budget.steps, loss=float("nan"))
            futures.append(pool.submit(make_model, name, budget, output, queue.put))
        while not (queue.empty() and all(future.done() for future in futures)):
            try:
                done = queue.get(timeout=1.0)
            except Empty:
                continue
            progress.update(tasks[done.model], completed=done.step, loss=done.loss)
    return [future.result() for future in futures]


def _be_nice() -> None:
    os.nice(NICENESS)
    disable_progress_bar()
    torch.set_num_threads(1)


def _texts(split: str) -> list[str]:
    return list(Dataset.from_file(str(arrow_file(split)))["text"])


def _print_results(results: list[Trained]) -> None:
    table = Table("model", "parameters", "steps", "trained tokens", "validation bits/byte", "bytes on disk")
    for result in results:
        table.add_row(
            result.model,
            f"{result.parameters:,}",
            f"{result.steps:,}",
            f"{result.train_tokens:,}",
            f"{result.bits_per_byte:.4f}",
            f"{result.size_bytes:,}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
