"""Verbs for projections: all passes at once, single passes, and inspection of the result."""

from __future__ import annotations

import json
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from nemo_opd.cli.command import Command, print_plain
from nemo_opd.config.loss import LossTerm
from nemo_opd.config.settings import models_in
from nemo_opd.errors import ProjectionError
from nemo_opd.files import write_obstacle
from nemo_opd.logging.terminal import busy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from nemo_opd.projection import EmbeddingSource, ProjectionMatrix

_SUFFIX = ".safetensors"
_TOKENIZER = "folder or hub name of the {side}'s tokenizer"
_OR_DEMO = f"{_TOKENIZER}, or a demo: name"
_IF_MOVED = f"{_OR_DEMO}; needed if it has moved since FILE was written"

_Adder = Callable[[ArgumentParser], object]
"""Adds arguments to a parser."""


def _arguments(*adders: _Adder) -> Callable[[ArgumentParser], None]:
    def add(parser: ArgumentParser) -> None:
        for adder in adders:
            adder(parser)

    return add


def _argument(*names: str, **options: Any) -> _Adder:
    return lambda parser: parser.add_argument(*names, **options)


def _file(help: str = "a projection written by another pass") -> _Adder:
    return _argument("file", type=Path, metavar="FILE", help=help)


def _tokenizers(help: str, *, required: bool = False) -> _Adder:
    student, teacher = (
        _argument(f"--{side}", required=required, metavar="TOKENIZER", help=help.format(side=side))
        for side in ("student", "teacher")
    )
    return _arguments(student, teacher)


_OUTPUT = _argument("--output", required=True, type=Path, metavar="FILE", help=f"the {_SUFFIX} file to write")


def add_roles(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--roles",
        nargs="+",
        action="extend",
        default=[],
        metavar="TOKEN=ROLE",
        help="roles of special tokens of either side that are not detected; tokens with equal roles are paired. "
        "Separate several roles by commas; no role (TOKEN=) leaves the token unpaired",
    )


def roles_of(pairs: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return token → roles. Raises ProjectionError for an argument without `=`."""
    roles = {}
    for pair in pairs:
        token, equals, names = pair.rpartition("=")  # tokens may hold `=`, roles do not
        if not equals or not token:
            raise ProjectionError(f"--roles {pair}: write TOKEN=ROLE, such as '<|im_end|>=end_of_turn'")
        roles[token] = tuple(name for name in names.split(",") if name)
    return roles


def _embeddings(*, required: bool) -> _Adder:
    """Return --embeddings and its settings, with the defaults of EmbeddingSource."""
    models = "folders (or demo: names) of the two models, for their input embeddings"
    numbers = (
        ("weight", float, "W", "total weight of the near tokens, besides the row's sum of 1 (default 0.1)"),
        ("temperature", float, "T", "divisor of similarities before the softmax; smaller is sharper (default 0.05)"),
        ("width", int, "N", "near tokens per row (default 4)"),
    )
    return _arguments(
        _argument("--embeddings", nargs=2, required=required, metavar=("STUDENT_MODEL", "TEACHER_MODEL"), help=models),
        *(
            _argument(f"--embedding-{name}", type=kind, default=SUPPRESS, dest=name, metavar=metavar, help=help)
            for name, kind, metavar, help in numbers
        ),
    )


@contextmanager
def _counting(name: str) -> Iterator[Callable[[int, int], None]]:
    """Show work whose progress is reported by calling the returned function with (done, total)."""
    with busy(name) as work:
        work.unit = "tokens"

        def report(done: int, total: int) -> None:
            work.done, work.total = done, total

        yield report


def _check_output(path: Path) -> None:
    """Raise ProjectionError if the file could not be written, before minutes are spent on it."""
    if path.suffix != _SUFFIX:
        raise ProjectionError(f"--output {path}: a projection is a {_SUFFIX} file; give it that suffix")
    if path.is_dir():
        raise ProjectionError(f"--output {path}: it is a folder; name a file in it")
    if (obstacle := write_obstacle(path.parent)) is not None:
        raise ProjectionError(f"--output {path}: {obstacle}; name another path")


def _saving_task(build: Callable[[Namespace, Console], ProjectionMatrix]) -> Callable[[Namespace, Console], None]:
    """Return a task that writes the matrix to --output, complete or not at all, and prints a line about it."""

    def write(arguments: Namespace, console: Console) -> None:
        path = arguments.output
        _check_output(path)
        matrix = build(arguments, console)
        matrix.save(path)
        rows = int((matrix.row_lengths > 0).sum())
        print_plain(
            console,
            f"wrote {path}: {rows:,} of {matrix.student_vocab_size:,} rows, {int(matrix.exact.sum()):,} exact, up to "
            f"{matrix.row_lengths.max(initial=0)} teacher tokens each ({path.stat().st_size / 1e6:.1f} MB)",
        )

    return write


_Pair = tuple["PreTrainedTokenizerFast", "PreTrainedTokenizerFast"]
"""Student's and teacher's tokenizers."""


def _load_pair(student: str, teacher: str, keys: Sequence[str] = ("--student", "--teacher")) -> _Pair:
    """Return both tokenizers, with the user's names for them, which are stored in the file.

    Raises ModelError if one cannot be loaded, ProjectionError if both are the same.
    """
    from nemo_opd.alignment import fingerprint
    from nemo_opd.models.load import load_tokenizer

    pair = load_tokenizer(student, key=keys[0]), load_tokenizer(teacher, key=keys[1])
    pair[0].name_or_path, pair[1].name_or_path = student, teacher
    if fingerprint(pair[0]) == fingerprint(pair[1]):
        raise ProjectionError(
            f"{student} and {teacher}: both tokenizers are the same; use type: same_tokenizer (no projection)"
        )
    return pair


def _load_file(arguments: Namespace) -> tuple[ProjectionMatrix, _Pair]:
    """Return FILE and its tokenizers: --student and --teacher, or the ones that the file names.

    Raises ProjectionError if the file is not readable, names no tokenizers, or belongs to other ones.
    """
    from nemo_opd.projection import ProjectionMatrix

    header = ProjectionMatrix.load(arguments.file)
    student, teacher = arguments.student or header.student_name, arguments.teacher or header.teacher_name
    if not student or not teacher:
        side = "teacher" if student else "student"
        raise ProjectionError(f"{arguments.file} does not name its {side}'s tokenizer; give --{side}")
    keys = [
        f"--{side}" if getattr(arguments, side) else f"the {side} that {arguments.file} names (--{side} overrides it)"
        for side in ("student", "teacher")
    ]
    pair = _load_pair(student, teacher, keys)
    return ProjectionMatrix.load(arguments.file, *pair), pair


def _read_source(arguments: Namespace) -> EmbeddingSource:
    """Read the models named by --embeddings. Raises ModelError for a model without readable input embeddings."""
    import torch

    from nemo_opd.models.stored_weights import input_embeddings
    from nemo_opd.projection import EmbeddingSource

    with busy("reading embeddings"):
        student, teacher = (input_embeddings(model, key="--embeddings") for model in arguments.embeddings)
    options = {name: value for name, value in vars(arguments).items() if name in ("weight", "temperature", "width")}
    return EmbeddingSource(student, teacher, device="cuda" if torch.cuda.is_available() else "cpu", **options)


def _build(arguments: Namespace, console: Console) -> ProjectionMatrix:
    roles = roles_of(arguments.roles)
    from nemo_opd.projection import audit, build_projection
    from nemo_opd.projection.display import audit_table

    pair = _load_pair(arguments.student, arguments.teacher)
    source = _read_source(arguments) if arguments.embeddings else None
    with _counting("building") as counter:
        matrix = build_projection(
            *pair, arguments.top_k, counter, reverse=arguments.reverse, embeddings=source, roles=roles
        )
    with busy("auditing"):
        figures = audit(*pair, matrix)
    console.print(audit_table(figures))
    return matrix


BUILD = Command(
    "Builds the projection of a student–teacher pair of tokenizers, all passes at once, and prints its coverage.",
    """\
A projection maps each student token to the teacher tokens that spell it. Cross-tokenizer losses such as p_kl compare
vocabularies through it. It is built once per pair, from the two tokenizers alone.

This command runs every pass. To inspect the matrix between two passes, run them one by one:
  exact-map      tokens with the same bytes, special tokens with the same role
  multi-token    all other tokens, spelled with the teacher's; --reverse adds spellings of teacher tokens
  embedding      teacher tokens with near embeddings (optional)
  sort-and-cut   the heaviest K entries of a row
  byte-prefix    the maps that the losses byte_prefix and shared_prefix read

examples:
  nemo-opd projection build --student demo:student --teacher demo:teacher_cross --output pair.safetensors
      …
      │ 2-digit numerals │         0.000 │ 0 of 15 exact, 15 with a row               │
      …
      wrote pair.safetensors: 2,048 of 2,048 rows, 2,029 exact, up to 2 teacher tokens each (0.1 MB)

  nemo-opd projection build --student meta-llama/Llama-3.2-1B --teacher Qwen/Qwen3-4B \\
      --roles '<|reserved_special_token_0|>=think_start' --output llama_qwen.safetensors

A run uses the file if a teacher has `projection: pair.safetensors`. With `projection: auto` the run builds and caches
the matrix itself, without the optional passes.
""",
    _arguments(
        _tokenizers(_OR_DEMO, required=True),
        _OUTPUT,
        _argument(
            "--top-k", type=int, default=4, metavar="K", help="teacher tokens kept per student token (default 4)"
        ),
        add_roles,
        _argument(
            "--reverse",
            action="store_true",
            help="also spell teacher tokens with student tokens and add the symmetric entries, to reach more of the "
            "teacher's vocabulary",
        ),
        _embeddings(required=False),
    ),
    _saving_task(_build),
)


def _inspect(arguments: Namespace, console: Console) -> None:
    from nemo_opd.alignment.roles import paired_roles
    from nemo_opd.projection import audit
    from nemo_opd.projection.build import fit_warnings
    from nemo_opd.projection.display import audit_table, plot_samples, roles_table, sample_table, samples, short_name

    matrix, pair = _load_file(arguments)
    figures = audit(*pair, matrix)
    rows = samples(matrix, *pair, arguments.samples)
    roles = paired_roles(*pair, dict(matrix.options.roles))
    reasons = fit_warnings(figures, arguments.loss) if arguments.loss else []
    if arguments.plot:
        names = f"{short_name(figures.student_name)} → {short_name(figures.teacher_name)}"
        sizes = f"{matrix.student_vocab_size:,} × {matrix.teacher_vocab_size:,}"
        plot_samples(rows, arguments.plot, f"{names}   {sizes}, overlap {figures.overlap:.3f}")
    if arguments.json:
        facts = asdict(figures) | {
            "warnings": reasons,
            "roles": [asdict(row) for row in roles],
            "options": asdict(matrix.options),
            "samples": [asdict(row) for row in rows],
        }
        print(json.dumps(facts))
        return
    for table in (audit_table(figures), roles_table(roles), sample_table(rows)):
        console.print(table)
    if arguments.loss:
        print_plain(console, "\n".join(reasons) or f"{arguments.loss} fits this pair")


INSPECT = Command(
    "Shows a projection file: the coverage audit, special tokens by role, sample rows, a heat map.",
    """\
Points to check:
  overlap            share of the vocabulary that both sides have; published pairs are between 0.63 and 0.85
  N-digit numerals   exact pairs for all of them: h_kl works; for some lengths only: p_kl
  rows of 0          student tokens that learn nothing from this teacher (special tokens without a partner)
  special tokens     the ends of text and turn need a partner, or the student does not learn to stop
  sample rows        a row leads only to the pieces that spell its token

examples:
  nemo-opd projection inspect pair.safetensors
      …
      │ overlap          │         0.991 │ shared tokens / smaller vocabulary                         │
      …
      │ numerals      │ '64'                         │       │ '6' 0.909   '4' 0.0909         │
  nemo-opd projection inspect pair.safetensors --plot pair.png
  nemo-opd projection inspect pair.safetensors --loss h_kl
      h_kl compares exact pairs, but only 0 of 15 numerals of 2 digits and …
  nemo-opd projection inspect pair.safetensors --json | jq .overlap
      0.99072265625
""",
    _arguments(
        _file("a projection, or a .pt file of NeMo-RL"),
        _tokenizers(_IF_MOVED),
        _argument(
            "--json", action="store_true", help="print audit, roles, builder options and samples as one JSON object"
        ),
        _argument("--plot", type=Path, metavar="PNG", help="write a heat map of the sample rows"),
        _argument("--samples", type=int, default=6, metavar="N", help="sample rows of each kind of token (default 6)"),
        _argument(
            "--loss",
            choices=[term.model_fields["type"].default for term in models_in(LossTerm)],
            metavar="TYPE",
            help="explain why a loss of this type, such as h_kl, fits the pair badly",
        ),
    ),
    _inspect,
)


def _convert(arguments: Namespace, console: Console) -> ProjectionMatrix:
    roles = roles_of(arguments.roles)
    if bool(arguments.student) != bool(arguments.teacher):
        raise ProjectionError("a projection is of a pair; give both --student and --teacher, or neither")
    from nemo_opd.projection import audit, nemo_rl, sort_and_cut
    from nemo_opd.projection.display import audit_table

    matrix = nemo_rl.read(arguments.file)
    if arguments.top_k is not None:
        matrix = sort_and_cut(matrix, arguments.top_k)
    if not arguments.student:
        print_plain(console, "no --student and --teacher: no row is marked as exact, and no run can use the file")
        return matrix
    pair = _load_pair(arguments.student, arguments.teacher)
    with busy("comparing bytes"):
        matrix = _add_prefixes(nemo_rl.bind(matrix, *pair, roles=roles), pair)
    with busy("auditing"):
        figures = audit(*pair, matrix)
    console.print(audit_table(figures))
    return matrix


def _add_prefixes(matrix: ProjectionMatrix, pair: _Pair) -> ProjectionMatrix:
    from nemo_opd.projection import add_byte_prefix, add_shared_prefix

    return add_shared_prefix(add_byte_prefix(matrix, *pair), *pair)


CONVERT = Command(
    "Converts a projection of NeMo-RL's tools (`.pt`) to the format of this package, and prints its coverage.",
    """\
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
""",
    _arguments(
        _file("a .pt file of NeMo-RL"),
        _OUTPUT,
        _tokenizers(_TOKENIZER),
        _argument("--top-k", type=int, metavar="K", help="entries kept per row (default all, up to 32)"),
        add_roles,
    ),
    _saving_task(_convert),
)


def _exact_map(arguments: Namespace, console: Console) -> ProjectionMatrix:
    roles = roles_of(arguments.roles)
    from nemo_opd.projection import exact_map

    pair = _load_pair(arguments.student, arguments.teacher)
    with busy("pairing tokens"):
        return exact_map(*pair, roles=roles)


EXACT_MAP = Command(
    "Step 1 of a projection: student tokens with a partner of the same bytes, special tokens by role.",
    """\
Two tokens are partners if they stand for the same bytes: 'Ġthe' of a byte-level vocabulary and '▁the' of a
SentencePiece one are both ' the'. Each token gets at most one partner. Special tokens have no bytes and are paired by
role: <|eot_id|> and <|im_end|> both end a turn. All other rows stay empty; multi-token fills them.

Stop here for a map with only the tokens that both sides share, as the loss strict compares.

example:
  nemo-opd projection exact-map --student demo:student --teacher demo:teacher_cross --output exact.safetensors
      wrote exact.safetensors: 2,029 of 2,048 rows, 2,029 exact, up to 1 teacher tokens each (0.0 MB)
""",
    _arguments(_tokenizers(_OR_DEMO, required=True), _OUTPUT, add_roles),
    _saving_task(_exact_map),
)


def _multi_token(arguments: Namespace, console: Console) -> ProjectionMatrix:
    from nemo_opd.projection import add_multi_token

    matrix, pair = _load_file(arguments)
    with _counting("spelling tokens") as counter:
        return add_multi_token(matrix, *pair, width=arguments.width, reverse=arguments.reverse, progress=counter)


MULTI_TOKEN = Command(
    "Step 2 of a projection: student tokens without a partner, spelled with teacher tokens.",
    """\
The teacher writes '885' as '8', '8', '5'. The row gets these pieces with weights falling by ten: 0.9, 0.09, 0.009,
added up if a piece repeats and scaled to sum 1. The first piece weighs most, because it is the teacher's next token
when the student writes '885'.

--reverse (step 3) also spells each teacher token without a partner with student tokens, and adds the reversed entries
to the rows of these student tokens, the first with the largest weight: more teacher tokens are reached.

example:
  nemo-opd projection multi-token exact.safetensors --output spelled.safetensors
      wrote spelled.safetensors: 2,048 of 2,048 rows, 2,029 exact, up to 2 teacher tokens each (0.1 MB)
""",
    _arguments(
        _file("a file written by exact-map"),
        _OUTPUT,
        _argument(
            "--width", type=int, default=8, metavar="N", help="entries kept per row until sort-and-cut (default 8)"
        ),
        _argument("--reverse", action="store_true", help="also add the spellings of teacher tokens (step 3)"),
        _tokenizers(_IF_MOVED),
    ),
    _saving_task(_multi_token),
)


def _embedding(arguments: Namespace, console: Console) -> ProjectionMatrix:
    from nemo_opd.projection import add_embeddings

    matrix, pair = _load_file(arguments)
    source = _read_source(arguments)
    settings = {name: getattr(source, name) for name in ("weight", "temperature", "width", "device")}
    with _counting("finding near tokens") as counter:
        return add_embeddings(matrix, *pair, source.student, source.teacher, **settings, progress=counter)


EMBEDDING = Command(
    "Step 4 of a projection (optional): teacher tokens whose input embeddings are near a student token's.",
    """\
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
""",
    _arguments(
        _file("a file written by exact-map or multi-token"),
        _OUTPUT,
        _embeddings(required=True),
        _tokenizers(_IF_MOVED),
    ),
    _saving_task(_embedding),
)


def _sort_and_cut(arguments: Namespace, console: Console) -> ProjectionMatrix:
    from nemo_opd.projection import ProjectionMatrix, sort_and_cut

    return sort_and_cut(ProjectionMatrix.load(arguments.file), arguments.top_k)


SORT_AND_CUT = Command(
    "Step 5 of a projection: the heaviest K entries of each row, heaviest first, scaled to sum 1.",
    """\
The cost of a loss grows with the columns of the matrix, and four are enough: the i-th piece of a spelled token weighs
0.9 · 0.1^i, so all pieces after the fourth are less than a ten-thousandth of the row. Empty rows stay empty.

example:
  nemo-opd projection sort-and-cut near.safetensors --top-k 4 --output cut.safetensors
      wrote cut.safetensors: 2,048 of 2,048 rows, 2,029 exact, up to 4 teacher tokens each (0.1 MB)
""",
    _arguments(
        _file(),
        _OUTPUT,
        _argument("--top-k", type=int, required=True, metavar="K", help="teacher tokens kept per student token"),
    ),
    _saving_task(_sort_and_cut),
)


def _byte_prefix(arguments: Namespace, console: Console) -> ProjectionMatrix:
    matrix, pair = _load_file(arguments)
    with busy("finding prefixes"):
        matrix = _add_prefixes(matrix, pair)
    maps = (matrix.byte_prefix, matrix.student_shared_prefix, matrix.teacher_shared_prefix)
    phi, student, teacher = (f"{int((ids >= 0).sum()):,} of {len(ids):,}" for ids in maps if ids is not None)
    print_plain(
        console, f"byte prefix: {phi} teacher tokens; shared prefix: {student} student and {teacher} teacher tokens"
    )
    return matrix


BYTE_PREFIX = Command(
    "Last step of a projection: the prefix maps for the losses byte_prefix and shared_prefix.",
    """\
Adds these maps to the file; the rows are unchanged.
  byte prefix Φ       teacher token → the longest student token that its bytes begin with: 'recognition' → 'recogn'
  shared prefix Ψ     a token of either side → the longest token of both vocabularies that its bytes begin with
Spellings of teacher tokens by the student's tokenizer, Ψ by the first tokens of spellings, and the bytes of all tokens
are added too.

If a vocabulary has all single bytes, every token with bytes has such a prefix, so all the mass of a distribution can be
moved. Special tokens are mapped by role.

example:
  nemo-opd projection byte-prefix cut.safetensors --output pair.safetensors
      byte prefix: 3,050 of 3,050 teacher tokens; shared prefix: 2,048 of 2,048 student and 3,050 of 3,050 …
""",
    _arguments(_file(), _OUTPUT, _tokenizers(_IF_MOVED)),
    _saving_task(_byte_prefix),
)
