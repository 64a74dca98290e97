"""Table of verbs, one line each."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol


class Runnable(Protocol):
    """The `COMMAND` of a verb's module."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Define the arguments."""
        ...

    def run(self, program: str, arguments: Sequence[str]) -> int:
        """Return the exit status."""
        ...


@dataclass(frozen=True)
class Verb:
    module: str
    """Module of `nemo_opd.cli` with a `COMMAND`; imported when the verb is used."""
    help: str

    def command(self) -> Runnable:
        command: Runnable = import_module(f"nemo_opd.cli.{self.module}").COMMAND
        return command


@dataclass(frozen=True)
class Group:
    """Verbs on one topic."""

    help: str
    verbs: Mapping[str, Verb]


VERBS: Mapping[str, Verb | Group] = {
    "init": Verb("init", "write a commented configuration for your models and your data"),
    "distil": Verb("distil", "distil teachers into a student on a corpus"),
    "distil-on-policy": Verb("distil_on_policy", "distil teachers into a student on its own samples"),
    "evaluate": Verb("evaluate", "measure how well a model answers questions with checkable answers"),
    "generate": Verb("generate", "let a model continue prompts"),
    "transplant": Verb("transplant", "give a model another tokenizer"),
    "report": Verb("report", "rewrite the report of a run or of a folder of runs"),
    "compare": Verb("compare", "write one page over several runs: results, curves, settings that differ"),
    "projection": Group(
        "maps between two vocabularies",
        {
            "build": Verb("projection.build", "build the map of a pair of tokenizers, all passes at once"),
            "inspect": Verb("projection.inspect", "show the coverage of a map"),
            "convert": Verb("projection.convert", "convert a map from NeMo-RL"),
            "exact-map": Verb("projection.exact_map", "pass 1: tokens with the same bytes"),
            "multi-token": Verb("projection.multi_token", "passes 2 and 3: all other tokens, spelled in pieces"),
            "embedding": Verb("projection.embedding", "pass 4: tokens with near embeddings"),
            "sort-and-cut": Verb("projection.sort_and_cut", "pass 5: the heaviest entries of a row"),
            "byte-prefix": Verb("projection.byte_prefix", "pass 6: maps by common prefixes"),
        },
    ),
    "cache": Group(
        "stored output of teachers, on disk",
        {
            "build": Verb("cache.build", "store a teacher's output on the texts of a run"),
            "inspect": Verb("cache.inspect", "show the contents of a cache"),
        },
    ),
    "checkpoint": Group(
        "checkpoints and Hugging Face folders",
        {
            "to-hf": Verb("checkpoint.to_hf", "convert a checkpoint to a Hugging Face folder"),
            "push": Verb("checkpoint.push", "upload a model's folder to the Hugging Face Hub"),
            "from-hf": Verb("checkpoint.from_hf", "convert a Hugging Face folder to the first checkpoint of a run"),
        },
    ),
    "check": Verb("check.gpu", "try this project on the GPUs of this machine"),
    "completion": Verb("completion", "print the code that lets a shell complete this command"),
}
