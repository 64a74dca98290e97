"""`nemo-opd`: dispatch of the arguments to a verb."""

import difflib
import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from nemo_opd.cli.verbs import VERBS, Group, Verb
from nemo_opd.version import package_version

PROGRAM = "nemo-opd"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb and return the exit status. Raises SystemExit for wrong arguments or after an error was printed."""
    if "_ARGCOMPLETE" in os.environ:
        _complete(os.environ["COMP_LINE"].split()[1:])
    words = sys.argv[1:] if arguments is None else list(arguments)
    names, verb = _find(words)
    if verb is None:
        parser = _parser()
        if close := _close_verb(names, words[len(names) :]):
            parser.error(
                f"{words[len(names)]}: there is no such verb; did you mean {' '.join((PROGRAM, *names, close))}?"
            )
        parser.parse_args(words if len(words) > len(names) else [*words, "--help"])
        parser.error("name a verb first")
    return verb.command().run(" ".join((PROGRAM, *names)), words[len(names) :])


def _find(words: Sequence[str]) -> tuple[list[str], Verb | None]:
    """Return the leading words that name a verb, and the verb; None if they do not name one."""
    entry: Verb | Group | None = VERBS.get(words[0]) if words else None
    if isinstance(entry, Group):
        verb = entry.verbs.get(words[1]) if len(words) > 1 else None
        return list(words[: 1 + (verb is not None)]), verb
    return list(words[: entry is not None]), entry


def _close_verb(names: Sequence[str], arguments: Sequence[str]) -> str | None:
    """Return the verb that resembles the first argument; None if none does."""
    entry = VERBS[names[0]] if names else None
    verbs = entry.verbs if isinstance(entry, Group) else VERBS
    return next(iter(difflib.get_close_matches(arguments[0], verbs, n=1)), None) if arguments else None


def _parser(path: Sequence[str] = (), verb: Verb | None = None) -> ArgumentParser:
    """Return a parser of all verbs, with the arguments of the verb at `path`."""
    parser = ArgumentParser(
        PROGRAM,
        description="Distil any set of teacher language models into a student, whatever their tokenizers.",
        epilog=f"{PROGRAM} VERB --help describes a verb. With no arguments, {PROGRAM} distil runs a demo.",
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
