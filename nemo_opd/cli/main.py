"""`nemo-opd`: from its arguments to a verb."""

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
    given = sys.argv[1:] if arguments is None else list(arguments)
    names, verb = _find(given)
    if verb is None:
        parser = _parser()
        if close := _close(names, given[len(names) :]):
            parser.error(
                f"{given[len(names)]}: there is no such verb; did you mean {' '.join((PROGRAM, *names, close))}?"
            )
        parser.parse_args(given if len(given) > len(names) else [*given, "--help"])
        parser.error("name a verb first")
    return verb.command().run(" ".join((PROGRAM, *names)), given[len(names) :])


def _find(words: Sequence[str]) -> tuple[list[str], Verb | None]:
    """Return the words that name a verb; None where they end before."""
    found: Verb | Group | None = VERBS.get(words[0]) if words else None
    if isinstance(found, Group):
        verb = found.verbs.get(words[1]) if len(words) > 1 else None
        return list(words[: 1 + (verb is not None)]), verb
    return list(words[: found is not None]), found


def _close(names: Sequence[str], rest: Sequence[str]) -> str | None:
    """Return the verb that a misspelled one in its place is close to."""
    entry = VERBS[names[0]] if names else None
    known = entry.verbs if isinstance(entry, Group) else VERBS
    return next(iter(difflib.get_close_matches(rest[0], known, n=1)), None) if rest else None


def _parser(path: Sequence[str] = (), verb: Verb | None = None) -> ArgumentParser:
    """Return the parser of all verbs, with the arguments of the one at `path`."""
    parser = ArgumentParser(
        PROGRAM,
        description="Distil any set of teacher language models into a student, whatever their tokenizers.",
        epilog=f"{PROGRAM} VERB --help says what a verb takes. With no arguments, {PROGRAM} distil runs a demo.",
    )
    parser.add_argument("--version", action="version", version=package_version())
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for name, entry in VERBS.items():
        own = verbs.add_parser(name, help=entry.help, description=entry.help)
        if isinstance(entry, Verb):
            parsers: dict[tuple[str, ...], ArgumentParser] = {(name,): own}
        else:
            inner = own.add_subparsers(metavar="VERB", required=True)
            parsers = {
                (name, other): inner.add_parser(other, help=each.help, description=each.help)
                for other, each in entry.verbs.items()
            }
        if verb is not None and tuple(path) in parsers:
            verb.command().add_arguments(parsers[tuple(path)])
    return parser


def _complete(words: Sequence[str]) -> None:
    """Answer the shell and end the process."""
    import argcomplete  # only a shell that completes needs it

    argcomplete.autocomplete(_parser(*_find(words)))
