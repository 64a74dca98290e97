"""Makes the models of the arithmetic demo: sums -> tokenizers -> models -> Hugging Face folders, with fixed seeds.

    uv run tools/demo/train_arithmetic.py --output nemo_opd/demo/models

Eight minutes of one core for all four, one after the other in one thread.
"""

import argparse
import random
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from arithmetic_accuracy import accuracy
from arithmetic_recipes import ARITHMETIC_RECIPES, ArithmeticRecipe
from byte_bpe import train_bpe
from recipes import SEED
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tokenizers import Tokenizer
from torch.nn.utils.rnn import pad_sequence
from training import IGNORED, Budget, Examples, build_model, fit, save
from transformers.utils.logging import disable_progress_bar

from nemo_opd.demo.arithmetic_questions import OPERANDS, Column, Sum, response_of, split_of, sums


@dataclass(frozen=True)
class Trained:
    """A finished model, measured as saved."""

    model: str
    parameters: int
    steps: int
    greedy: float
    sampled: float
    worked: float
    """Greedy, with the sum and its right response in front."""
    size_bytes: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the chosen models and print the share of the validation sums that each answers rightly."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    disable_progress_bar()
    columns = ("[bold]{task.description}", BarColumn(), MofNCompleteColumn(), "loss {task.fields[loss]:.4f}")
    with Progress(*(TextColumn(c) if isinstance(c, str) else c for c in columns), TimeRemainingColumn()) as progress:
        results = [make_model(name, options.steps, options.output, progress) for name in options.only]
    _print_results(results)


def make_model(name: str, steps: int | None, output: Path, progress: Progress) -> Trained:
    """Train `name`, replace its folder below `output` with the result, and measure it."""
    recipe = ARITHMETIC_RECIPES[name]
    tokenizer = train_bpe(recipe.model.bpe, (question.prompt + question.response for question in sums()))
    budget = Budget(steps or recipe.model.steps)
    task = progress.add_task(name, total=budget.steps, loss=float("nan"))
    torch.manual_seed(SEED)
    model = build_model(recipe.model, tokenizer)
    batches = examples(recipe, tokenizer)
    fit(model, recipe.model, batches, budget, lambda step, loss: progress.update(task, completed=step, loss=loss))
    folder, partial = output / name, output / f".{name}.{uuid.uuid4().hex}"
    save(model, tokenizer, recipe.model, partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    questions = [question for question in sums() if split_of(question) == "validation"]
    return Trained(
        model=name,
        parameters=model.num_parameters(),
        steps=budget.steps,
        greedy=accuracy(folder, questions, greedy=True),
        sampled=accuracy(folder, questions, greedy=False),
        worked=accuracy(folder, questions, greedy=True, worked=True),
        size_bytes=sum(file.stat().st_size for file in folder.iterdir()),
    )


def examples(recipe: ArithmeticRecipe, tokenizer: Tokenizer) -> Iterator[Examples]:
    """Endless batches of newly drawn sums, of which the response and its end token are learned."""
    generator = random.Random(SEED)
    eos, pad = (tokenizer.token_to_id(token) for token in (recipe.model.bpe.eos, recipe.model.bpe.pad))
    while True:
        inputs, labels = [], []
        for question in (draw(generator) for _ in range(recipe.model.batch)):
            is_worked = recipe.worked > 0 and generator.random() < recipe.worked
            prompt = tokenizer.encode(question.worked_prompt if is_worked else question.prompt).ids
            written = question.response if is_worked else slipped(question, recipe, generator)
            response = [*tokenizer.encode(written).ids, eos]
            inputs.append(torch.tensor([*prompt, *response[:-1]]))
            labels.append(torch.tensor([IGNORED] * (len(prompt) - 1) + response))
        yield Examples(pad_sequence(inputs, True, pad), pad_sequence(labels, True, IGNORED))


def draw(generator: random.Random) -> Sum:
    """A sum of any two numbers that is not of the validation split."""
    while True:
        question = Sum(generator.choice(OPERANDS), generator.choice(OPERANDS))
        if split_of(question) == "train":
            return question


def slipped(question: Sum, recipe: ArithmeticRecipe, generator: random.Random) -> str:
    """The response with the recipe's slips, consistent with itself; the right one for a recipe without."""
    columns: list[Column] = []
    for column in question.columns:
        due = bool(columns) and columns[-1].total >= 10
        slips = bool(columns) and generator.random() < (recipe.forgotten if due else recipe.invented)
        columns.append(replace(column, carry=int(due != slips)))
    return response_of(columns)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder that gets one folder a model")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=ARITHMETIC_RECIPES,
        default=list(ARITHMETIC_RECIPES),
        help="models to make (default: all)",
    )
    parser.add_argument("--steps", type=int, help="steps of every chosen model (default: its recipe's)")
    return parser


def _print_results(results: list[Trained]) -> None:
    table = Table(
        "model", "parameters", "steps", "greedy accuracy", "sampled accuracy", "worked in front", "bytes on disk"
    )
    for result in results:
        table.add_row(
            result.model,
            f"{result.parameters:,}",
            f"{result.steps:,}",
            f"{result.greedy:.1%}",
            f"{result.sampled:.1%}",
            f"{result.worked:.1%}",
            f"{result.size_bytes:,}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
