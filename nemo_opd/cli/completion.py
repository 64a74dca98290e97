"""Prints the code for shell completion of nemo-opd: verbs, options, settings and their values."""

from argparse import ArgumentParser, Namespace

from rich.console import Console

from nemo_opd.cli.command import Command

EPILOG = """\
examples:
  eval "$(nemo-opd completion bash)"                      in ~/.bashrc; for zsh the same in ~/.zshrc
  nemo-opd completion fish > ~/.config/fish/completions/nemo-opd.fish
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish", "tcsh"))


def show(arguments: Namespace, _: Console) -> None:
    import argcomplete

    print(argcomplete.shellcode(["nemo-opd"], shell=arguments.shell))


COMMAND = Command(__doc__, EPILOG, add_arguments, show)
