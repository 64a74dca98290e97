"""Step 4 of a projection (optional): teacher tokens whose input embeddings are near a student token's."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from typing import TYPE_CHECKING

from rich.console import Console

from nemo_opd.cli.command import Command
from nemo_opd.cli.projection.arguments import add_file, add_output, add_pair, check_output
from nemo_opd.cli.projection.steps import steps, write

if TYPE_CHECKING:
    from nemo_opd.projection import EmbeddingSource

EPILOG = """\
The teacher may lack a token but have related ones: 'Haus' and 'house'. Models place such tokens near each other. The
two models' input embeddings are read from their safetensors files (the models are not loaded) and rotated into one
space by the tokens that both vocabularies share. Each row that is not exact gets the teacher tokens with the highest
cosine similarity, with a total weight of --embedding-weight.

Usually not needed, as the multi-token pass spells every token; useful if the teacher lacks whole scripts or bytes. Both
models must be trained: random embeddings have no meaningful neighbours.

example:
  nemo-opd projection embedding spelled.safetensors --output near.safetensors \\
      --embeddings demo:student demo:teacher_cross
      wrote near.safetensors: 2,048 of 2,048 rows, 2,029 exact, up to 6 teacher tokens each (0.2 MB)
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_file(parser, "a file written by exact-map or multi-token")
    add_output(parser)
    add_embeddings_arguments(parser, required=True)
    add_pair(parser, required=False)


def add_embeddings_arguments(parser: ArgumentParser, *, required: bool) -> None:
    """Add --embeddings and its settings, with the defaults of EmbeddingSource."""
    parser.add_argument(
        "--embeddings",
        nargs=2,
        required=required,
        metavar=("STUDENT_MODEL", "TEACHER_MODEL"),
        help="folders (or demo: names) of the two models, for their input embeddings",
    )
    parser.add_argument(
        "--embedding-weight",
        type=float,
        default=SUPPRESS,
        dest="weight",
        metavar="W",
        help="total weight of the near tokens, besides the row's sum of 1 (default 0.1)",
    )
    parser.add_argument(
        "--embedding-temperature",
        type=float,
        default=SUPPRESS,
        dest="temperature",
        metavar="T",
        help="divisor of similarities before the softmax; smaller is sharper (default 0.05)",
    )
    parser.add_argument(
        "--embedding-width",
        type=int,
        default=SUPPRESS,
        dest="width",
        metavar="N",
        help="near tokens per row (default 4)",
    )


def read_source(arguments: Namespace) -> EmbeddingSource:
    """Read the models named by --embeddings. Raises ModelError for a model without readable input embeddings."""
    import torch

    from nemo_opd.models.embeddings import input_embeddings
    from nemo_opd.projection import EmbeddingSource

    student, teacher = (input_embeddings(model, key="--embeddings") for model in arguments.embeddings)
    options = {name: value for name, value in vars(arguments).items() if name in ("weight", "temperature", "width")}
    return EmbeddingSource(student, teacher, device="cuda" if torch.cuda.is_available() else "cpu", **options)


def build(arguments: Namespace, console: Console) -> None:
    check_output(arguments.output)
    from nemo_opd.cli.projection.pair import load_file
    from nemo_opd.projection import add_embeddings

    matrix, pair = load_file(arguments)
    with steps(console) as progress:
        progress.begin("reading embeddings")
        source = read_source(arguments)
        matrix = add_embeddings(
            matrix,
            pair.student,
            pair.teacher,
            source.student,
            source.teacher,
            weight=source.weight,
            temperature=source.temperature,
            width=source.width,
            device=source.device,
            progress=progress.begin("finding near tokens"),
        )
    write(matrix, arguments.output, console)


COMMAND = Command(__doc__, EPILOG, add_arguments, build)
