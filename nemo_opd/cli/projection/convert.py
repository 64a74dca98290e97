"""Converts a projection of NeMo-RL's tools (`.pt`) to the format of this package, and prints its coverage."""

from argparse import ArgumentParser, Namespace

from rich.console import Console

from nemo_opd.cli.command import Command
from nemo_opd.cli.projection.arguments import add_file, add_output, add_roles, check_output, roles_of
from nemo_opd.cli.projection.steps import steps, write
from nemo_opd.errors import ProjectionError

EPILOG = """\
Reads two forms: {'indices': [V, K], 'likelihoods': [V, K]}, and {(student id, teacher id): weight or count}. No code in
the file is run. Rows are scaled to sum 1, repeated entries added up, and entries without weight dropped; the last
column of a file that declares `enable_scale_trick` is a scale factor at an arbitrary id and is dropped too.

Such a file does not mark exact rows, and its rows follow the models' padded heads. With --student and --teacher both
are corrected from the tokens' bytes, the maps of byte-prefix are added, and the result is audited. Without them the
file can be inspected, but a run would reject it.

`projection build` makes a new matrix in seconds; convert one to repeat an experiment with exactly the same matrix.

example:
  nemo-opd projection convert projection_matrix_llama_qwen_top4.pt --output llama_qwen.safetensors \\
      --student meta-llama/Llama-3.2-1B --teacher Qwen/Qwen3-4B
      wrote llama_qwen.safetensors: 128,003 of 128,256 rows, 109,487 exact, up to 4 teacher tokens each (5.9 MB)
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_file(parser, "a .pt file of NeMo-RL")
    add_output(parser)
    for side in ("student", "teacher"):
        parser.add_argument(f"--{side}", metavar="TOKENIZER", help=f"folder or hub name of the {side}'s tokenizer")
    parser.add_argument("--top-k", type=int, metavar="K", help="entries kept per row (default all, up to 32)")
    add_roles(parser)


def convert(arguments: Namespace, console: Console) -> None:
    check_output(arguments.output)
    roles = roles_of(arguments.roles)
    if bool(arguments.student) != bool(arguments.teacher):
        raise ProjectionError("a projection is of a pair; give both --student and --teacher, or neither")
    from nemo_opd.cli.projection.pair import load_pair
    from nemo_opd.projection import add_byte_prefix, add_shared_prefix, audit, nemo_rl, sort_and_cut
    from nemo_opd.projection.report import audit_table

    matrix = nemo_rl.read(arguments.file)
    if arguments.top_k is not None:
        matrix = sort_and_cut(matrix, arguments.top_k)
    if not arguments.student:
        console.print(
            "no --student and --teacher: no row is marked as exact, and no run can use the file", soft_wrap=True
        )
        write(matrix, arguments.output, console)
        return
    pair = load_pair(arguments.student, arguments.teacher)
    with steps(console) as progress:
        progress.begin("comparing bytes")
        matrix = nemo_rl.bind(matrix, pair.student, pair.teacher, roles=roles)
        progress.begin("finding prefixes")
        matrix = add_byte_prefix(matrix, pair.student, pair.teacher)
        matrix = add_shared_prefix(matrix, pair.student, pair.teacher)
        progress.begin("auditing")
        figures = audit(pair.student, pair.teacher, matrix)
    console.print(audit_table(figures))
    write(matrix, arguments.output, console)


COMMAND = Command(__doc__, EPILOG, add_arguments, convert)
