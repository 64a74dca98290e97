"""`nemo-opd`: table of verbs, dispatch of the arguments to one, and exit statuses."""

import difflib
import os
import sys
import textwrap
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from shutil import get_terminal_size
from typing import Protocol

from nemo_opd.extras import require_train
from nemo_opd.paths import package_version

PROGRAM = "nemo-opd"
ENDED_EARLY = 75
"""EX_TEMPFAIL of sysexits.h: try again later."""
INTERRUPTED = 130
"""By shell convention, 128 plus the number of the signal SIGINT."""
MEANINGS = {
    0: "done: the run, the dry run or the command ended as asked; a worse student is not exported (run.export_worse)",
    1: "an error, or a run that does not fit: the last lines on stderr say why",
    2: "wrong options of a command without settings, or no such command",
    ENDED_EARLY: "the run ended before its last step, also by a callback or alarm; run.resume=auto continues or "
    "starts it",
    INTERRUPTED: "interrupted before it could save",
}
"""Meaning of each status, for users."""


class _Runnable(Protocol):
    """A verb's command."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Define the arguments."""
        ...

    def run(self, program: str, arguments: Sequence[str]) -> int:
        """Return the exit status."""
        ...


@dataclass(frozen=True)
class Verb:
    module: str
    """Module of `nemo_opd.cli`, imported when the verb is used."""
    name: str
    """Name of the command in the module."""
    help: str

    def command(self) -> _Runnable:
        command: _Runnable = getattr(import_module(f"nemo_opd.cli.{self.module}"), self.name)
        return command


@dataclass(frozen=True)
class Group:
    """Verbs on one topic."""

    help: str
    verbs: Mapping[str, Verb]


VERBS: Mapping[str, Verb | Group] = {
    "init": Verb("init", "COMMAND", "write a commented configuration for your models and your data"),
    "distil": Verb("settings_verbs", "DISTIL", "distil teachers into a student on a corpus"),
    "distil-on-policy": Verb("settings_verbs", "DISTIL_ON_POLICY", "distil teachers into a student on its own samples"),
    "evaluate": Verb("settings_verbs", "EVALUATE", "measure how well a model answers questions with checkable answers"),
    "generate": Verb("generate", "COMMAND", "let a model continue prompts"),
    "transplant": Verb("transplant", "COMMAND", "give a model another tokenizer"),
    "runs": Verb("runs", "RUNS", "list runs with status, step and verdict"),
    "report": Verb("runs", "REPORT", "rewrite the report of a run or of a folder of runs"),
    "compare": Verb("runs", "COMPARE", "write one page over several runs: results, curves, settings that differ"),
    "projection": Group(
        "maps between two vocabularies",
        {
            "build": Verb("projection", "BUILD", "build the map of a pair of tokenizers, all passes at once"),
            "inspect": Verb("projection", "INSPECT", "show the coverage of a map"),
            "convert": Verb("projection", "CONVERT", "convert a map from NeMo-RL"),
            "exact-map": Verb("projection", "EXACT_MAP", "pass 1: tokens with the same bytes"),
            "multi-token": Verb("projection", "MULTI_TOKEN", "passes 2 and 3: all other tokens, spelled in pieces"),
            "embedding": Verb("projection", "EMBEDDING", "pass 4: tokens with near embeddings"),
            "sort-and-cut": Verb("projection", "SORT_AND_CUT", "pass 5: the heaviest entries of a row"),
            "byte-prefix": Verb("projection", "BYTE_PREFIX", "pass 6: maps by common prefixes"),
        },
    ),
    "cache": Group(
        "stored output of teachers, on disk",
        {
            "build": Verb("cache", "BUILD", "store a teacher's output on the texts of a run"),
            "inspect": Verb("cache", "INSPECT", "show the contents of a cache"),
        },
    ),
    "checkpoint": Group(
        "checkpoints and Hugging Face folders",
        {
            "to-hf": Verb("checkpoint", "TO_HF", "convert a checkpoint to a Hugging Face folder"),
            "push": Verb("checkpoint", "PUSH", "upload a model's folder to the Hugging Face Hub"),
            "from-hf": Verb("checkpoint", "FROM_HF", "convert a Hugging Face folder to the first checkpoint of a run"),
        },
    ),
    "check": Verb("check", "COMMAND", "test this project on the GPUs of this machine, from a checkout"),
    "completion": Verb("completion", "COMMAND", "print the code that lets a shell complete this command"),
}
_VERBS_OF_OTHERS = {"train": "distil"}
"""Verbs of other trainers, by their names here."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb and return the exit status. Raises SystemExit for wrong arguments or after an error was printed."""
    if "_ARGCOMPLETE" in os.environ:
        _complete(os.environ["COMP_LINE"].split()[1:])
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["help"]:
        is_verb = not words[1:] or _find(words[1:])[0] or _close_verb([], words[1:])
        words = [*words[1:], "--help"] if is_verb else ["distil", "--help", *words[1:]]
    names, verb = _find(words)
    if verb is None:
        parser = _parser()
        if close := _close_verb(names, words[len(names) :]):
            parser.error(
                f"{words[len(names)]}: there is no such verb; did you mean {' '.join((PROGRAM, *names, close))}?"
            )
        parser.parse_args(words if len(words) > len(names) else [*words, "--help"])
        parser.error("name a verb first")
    program = " ".join((PROGRAM, *names))
    try:
        require_train(program)
    except ImportError as error:
        raise SystemExit(str(error)) from None
    return verb.command().run(program, words[len(names) :])


def _find(words: Sequence[str]) -> tuple[list[str], Verb | None]:
    """Return the leading words that name a verb, and the verb; None if they do not name one."""
    entry: Verb | Group | None = VERBS.get(words[0]) if words else None
    if isinstance(entry, Group):
        verb = entry.verbs.get(words[1]) if len(words) > 1 else None
        return list(words[: 1 + (verb is not None)]), verb
    return list(words[: entry is not None]), entry


def _close_verb(names: Sequence[str], arguments: Sequence[str]) -> str | None:
    """Return the verb that resembles the first argument or is called so elsewhere; None if none does."""
    entry = VERBS[names[0]] if names else None
    verbs = entry.verbs if isinstance(entry, Group) else VERBS
    if not arguments:
        return None
    if arguments[0] in _VERBS_OF_OTHERS and not names:
        return _VERBS_OF_OTHERS[arguments[0]]
    return next(iter(difflib.get_close_matches(arguments[0], verbs, n=1)), None)


def _parser(path: Sequence[str] = (), verb: Verb | None = None) -> ArgumentParser:
    """Return a parser of all verbs, with the arguments of the verb at `path`."""
    wrapped = partial(textwrap.fill, width=get_terminal_size().columns - 2)
    more_help = (
        f"{PROGRAM} VERB --help describes a verb, and {PROGRAM} help WORD finds settings. With no arguments, {PROGRAM} "
        "distil runs a demo."
    )
    statuses = (
        wrapped(meaning, initial_indent=f"  {status:<6}", subsequent_indent=" " * 8)
        for status, meaning in MEANINGS.items()
    )
    parser = ArgumentParser(
        PROGRAM,
        description=wrapped("Distil any set of teacher language models into a student, whatever their tokenizers."),
        epilog="\n".join((wrapped(more_help), "", "exit statuses:", *statuses)),
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=package_version())
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for name, entry in VERBS.items():
        subparser = verbs.add_parser(name, help=entry.help, description=entry.help)
        if isinstance(entry, Verb):
            parsers: dict[tuple[str, ...], ArgumentParser] = {(name,): subparser}
        else:
            group = subparser.add_subparsers(metavar="VERB", required=True)
            parsers = {
                (name, inner): group.add_parser(inner, help=inner_verb.help, description=inner_verb.help)
                for inner, inner_verb in entry.verbs.items()
            }
        if verb is not None and tuple(path) in parsers:
            verb.command().add_arguments(parsers[tuple(path)])
    return parser


def _complete(words: Sequence[str]) -> None:
    """Print completions for the shell and exit."""
    import argcomplete  # needed only for completion

    argcomplete.autocomplete(_parser(*_find(words)))
