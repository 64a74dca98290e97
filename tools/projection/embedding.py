#!/usr/bin/env python
"""Step 4 of a projection (optional): teacher tokens whose input embeddings are near a student token's."""

import sys

# A script's folder comes first on its path, and this one's inspect.py would hide the standard library's.
if sys.path[0] == __file__.rpartition("/")[0]:
    sys.path[0] = __file__.rpartition("/tools/")[0]

import argparse
from pathlib import Path

import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from nemo_opd.errors import ModelError
from nemo_opd.models.folder import first_line, resolve, safetensors_files
from nemo_opd.models.load import load_config
from nemo_opd.projection import EmbeddingSource, add_embeddings
from tools.projection import command

EPILOG = """\
A token that the teacher does not have may have relatives it does have: 'Haus' and 'house'. Models place such tokens
near each other. The two models' input embeddings are read from their safetensors files (the models are not loaded),
turned into one space by the tokens that both vocabularies share, and each row that is not exact gets the teacher tokens
of the highest cosine similarity, with --embedding-weight in all.

Not needed where the multi-token pass spells everything, which is the usual case; of use where the teacher lacks whole
scripts or bytes. Both models have to be trained: random embeddings have no neighbours.

example:
  uv run tools/projection/embedding.py spelled.safetensors --output near.safetensors \\
      --embeddings demo:student demo:teacher_cross
      wrote near.safetensors: 2,048 of 2,048 rows, 2,029 exact, up to 6 teacher tokens each (0.2 MB)
"""
DEFAULTS = {field: EmbeddingSource.__dataclass_fields__[field].default for field in ("weight", "temperature", "width")}


def add_embeddings_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """--embeddings and its settings, for this command and build.py."""
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
        default=DEFAULTS["weight"],
        metavar="W",
        help="mass of the near tokens beside the 1 that a row has already (default %(default)s)",
    )
    parser.add_argument(
        "--embedding-temperature",
        type=float,
        default=DEFAULTS["temperature"],
        metavar="T",
        help="similarities are divided by it before the softmax: the smaller, the sharper (default %(default)s)",
    )
    parser.add_argument(
        "--embedding-width",
        type=int,
        default=DEFAULTS["width"],
        metavar="N",
        help="near tokens of a row (default %(default)s)",
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.make_parser(__doc__, EPILOG)
    command.add_file(parser, "what exact_map.py or multi_token.py wrote")
    command.add_output(parser)
    add_embeddings_arguments(parser, required=True)
    command.add_pair(parser, required=False)
    return parser.parse_args(arguments)


def read_source(arguments: argparse.Namespace) -> EmbeddingSource:
    """Raises ModelError for a model without readable input embeddings."""
    student, teacher = (input_embeddings(model, key="--embeddings") for model in arguments.embeddings)
    return EmbeddingSource(
        student,
        teacher,
        weight=arguments.embedding_weight,
        temperature=arguments.embedding_temperature,
        width=arguments.embedding_width,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )


def input_embeddings(reference: str, *, key: str) -> Tensor:
    """[vocabulary, hidden width] from a model folder's safetensors files. Raises ModelError naming `key`."""
    config = load_config(reference, key=key)
    folder = Path(resolve(reference))
    if not folder.is_dir():
        raise ModelError(f"{key}={reference}: there is no such folder; download the model and name its folder")
    files = safetensors_files(folder)
    if not files:
        raise ModelError(f"{key}={reference}: the folder has no safetensors files; save the weights in that format")
    name = embedding_name(config)
    try:
        found = {tensor: file for file in files for tensor in tensors_like(file, name)}
        chosen = name if name in found else min(found, key=len, default=None)
        if chosen is None:
            raise ModelError(
                f"{key}={reference}: none of {', '.join(file.name for file in files)} holds the input embeddings "
                f"{name} or a tensor whose name ends with {tail(name)}; name a folder with all weights"
            )
        with safe_open(found[chosen], framework="pt") as weights:
            return weights.get_tensor(chosen)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{key}={reference}: the weights are damaged ({first_line(error)}); copy them again"
        ) from error


def embedding_name(config: PretrainedConfig) -> str:
    """The input embeddings' name in a model of this architecture, which is built without memory for its weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embeddings = model.get_input_embeddings()
    return next(f"{name}.weight" for name, module in model.named_modules() if module is embeddings)


def tensors_like(file: Path, name: str) -> list[str]:
    """Tensors of that name, whatever stands before its last two parts: checkpoints of base or larger models differ."""
    with safe_open(file, framework="pt") as weights:
        return [key for key in weights.keys() if f".{key}".endswith(f".{tail(name)}")]  # noqa: SIM118


def tail(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def build(arguments: argparse.Namespace, console: Console) -> None:
    command.check_output(arguments.output)
    matrix, pair = command.load_file(arguments)
    with command.steps(console) as steps:
        steps.begin("reading embeddings")
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
            progress=steps.begin("finding near tokens"),
        )
    command.write(matrix, arguments.output, console)


def main(arguments: list[str] | None = None) -> int:
    return command.run(build, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
