"""Verbs for teacher caches."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.console import Console
from rich.table import Table

from nemo_opd.cli.command import Command, print_plain
from nemo_opd.config.cluster import Cluster
from nemo_opd.config.command_line import require_no_secrets
from nemo_opd.config.composition import compose
from nemo_opd.config.data import source_of
from nemo_opd.config.run import RunConfig, from_dict
from nemo_opd.config.teacher import Endpoint
from nemo_opd.data.columns import chat_layout, text_layout
from nemo_opd.data.source_files import require_suitable
from nemo_opd.errors import ConfigError, DataError
from nemo_opd.logging.terminal import busy, loading
from nemo_opd.preflight.inputs import with_documents_columns

if TYPE_CHECKING:
    from nemo_opd.teacher_cache.reader import CacheReader

_FILE_DEFAULTS: dict[str, Any] = {
    "max_length": 2048,
    "no_packing": False,
    "no_append_eos": False,
    "text_key": "text",
    "messages_key": None,
    "dtype": "auto",
    "device": "auto",
}
"""Options that replace the settings of a run, and their defaults."""
_SHOWN_TOKENS = 4
_OPTIONAL = ("top_k", "value_bytes", "hidden_size", "chat_template_kwargs", "is_served", "positions")
"""Fields of the manifest that are empty if the cache's form or the teacher does not use them."""


def _add_build_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", help="folder or hub name of the teacher")
    parser.add_argument(
        "--urls", nargs="+", metavar="URL", help="servers that serve --model under this name; key: $OPENAI_API_KEY"
    )
    parser.add_argument("--tokenizer", metavar="TOKENIZER", help="with --urls: its folder or hub name (default: MODEL)")
    programs = get_args(Endpoint.model_fields["program"].annotation)
    parser.add_argument("--program", choices=programs, help="of the servers (default vllm)")
    parser.add_argument("--data", nargs="+", metavar="FILE", help="texts: Parquet, Arrow, JSON lines or .txt; globs")
    parser.add_argument("--config", metavar="FILE", help="settings of a run or name of a recipe, instead of --data")
    parser.add_argument("--teacher", metavar="NAME", help="with --config: the teacher's name (default: the first)")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="the cache: a folder of its own")
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens of each position")
    form.add_argument("--hidden-states", action="store_true", help="keep hidden states, and the head once")
    parser.add_argument(
        "--float32", action="store_true", help="with --top-k: log-probabilities in 4 bytes instead of rounding to 3"
    )
    parser.set_defaults(**_FILE_DEFAULTS)
    parser.add_argument("--max-length", type=int, metavar="N", help="longest sequence (default 2048)")
    parser.add_argument(
        "--no-packing", action="store_true", help="truncate longer texts instead of cutting them into windows"
    )
    parser.add_argument("--no-append-eos", action="store_true", help="do not end texts with the end-of-text token")
    parser.add_argument("--text-key", metavar="KEY", help="column of the texts (default text)")
    parser.add_argument("--messages-key", metavar="KEY", help="column of conversations, instead of texts")
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float16", "float32"),
        help="of the model (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), help="default: a GPU if any")
    parser.add_argument("--part", type=_part, default=(0, 1), metavar="I/N", help="worker I of N, from 0")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="with --config: settings to change")


def _part(text: str) -> tuple[int, int]:
    index, _, number = text.partition("/")
    if not (index.isdecimal() and number.isdecimal() and int(index) < int(number)):
        raise ArgumentTypeError(f"{text}: write I/N with I from 0 to N − 1, such as 0/4")
    return int(index), int(number)


def _build(arguments: Namespace, console: Console) -> None:
    """Build the cache and print how much was added. Raises an OPDError."""
    _require_effect(arguments)
    if arguments.top_k is not None and arguments.top_k < 1:
        raise ConfigError(f"--top-k={arguments.top_k}: keep 1 token or more")
    with loading("PyTorch"):
        from nemo_opd.cluster.local import driving

    with driving(Cluster(launcher="local")) as is_driver:
        if is_driver:
            _drive(arguments, console)


def _drive(arguments: Namespace, console: Console) -> None:
    from nemo_opd.training.cache_build import CacheForm, CacheShard, build_cache

    form = CacheForm(arguments.top_k, 4 if arguments.float32 else 3)
    try:
        config, i = _run_config(arguments) if arguments.config else (_file_config(arguments), 0)
        with busy("reading texts and models"):
            built = build_cache(config, i, arguments.output, form, part=CacheShard(*arguments.part))
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"{arguments.output} has all answers so far; the same command continues")
        raise
    print_plain(
        console,
        f"{arguments.output}: {built.segments:,} segments of {built.tokens:,} tokens added, {built.there:,} were there",
    )


def _require_effect(arguments: Namespace) -> None:
    """Raise ConfigError for an option that other options make ineffective."""
    for_files = [name for name, default in _FILE_DEFAULTS.items() if getattr(arguments, name) != default]
    for_texts = [name for name in for_files if name in ("no_packing", "no_append_eos", "text_key")]
    conflicts = (
        (arguments.config, for_files, "with --config, which has these settings; add KEY=VALUE to change one"),
        (arguments.messages_key, for_texts, "with --messages-key; it is for texts"),
        (not arguments.config, ["teacher"], "without --config, which names teachers; leave it out"),
        (not arguments.urls, ["program", "tokenizer"], "with a --model that is loaded; it is only for --urls"),
        (arguments.hidden_states, ["float32"], "with --hidden-states, which have the precision of the model"),
    )
    for applies, names, reason in conflicts:
        if applies and (option := next((name for name in names if getattr(arguments, name)), None)):
            raise ConfigError(f"--{option.replace('_', '-')}={getattr(arguments, option)} has no effect {reason}")
    if arguments.urls and arguments.model is None:
        raise ConfigError("--urls: requests to the servers need the model's name; give --model")


def _run_config(arguments: Namespace) -> tuple[RunConfig, int]:
    """Return the run's settings and the index of the teacher."""
    if arguments.data:
        raise ConfigError("--data with --config: the settings name the texts; leave either out")
    if wrong := next((setting for setting in arguments.settings if "=" not in setting), None):
        raise ConfigError(f"{wrong}: settings are written KEY=VALUE")
    require_no_secrets(arguments.settings)
    config = compose(arguments.config, arguments.settings, with_documents_columns)
    names = config.active_names
    name = arguments.teacher or next(iter(names), None)
    if name not in names:
        raise ConfigError(f"--teacher={name}: the run's teachers are {', '.join(names) or 'none'}; name one of them")
    i = names.index(name)
    if arguments.model is None:
        return config, i
    from nemo_opd.training.cache_build import asked_again

    return asked_again(config, i, {"model": arguments.model} | _served(arguments)), i


def _file_config(arguments: Namespace) -> RunConfig:
    """Return settings of a run whose student is the teacher."""
    if not arguments.model or not arguments.data:
        raise ConfigError("give --model and --data, or --config with the settings of a run")
    if arguments.settings:
        raise ConfigError(f"{arguments.settings[0]}: settings can be changed only with --config")
    source = source_of(arguments.data, key="--data", otherwise="jsonl_files")
    model, served = {"model": arguments.model}, _served(arguments)
    data: dict[str, Any] = {"train": source.model_dump(exclude_unset=True), "cache": False}
    settings = {key: f"--{key.replace('_', '-')}" for key in ("text_key", "messages_key")}
    if arguments.messages_key:
        layout = chat_layout(arguments.messages_key, None, settings)
        data |= {"messages_key": arguments.messages_key}
    else:
        data |= {"packing": not arguments.no_packing, "append_eos": not arguments.no_append_eos}
        data["text_key"] = arguments.text_key
        layout = text_layout(arguments.text_key, settings)
    require_suitable(source, layout, key="--data")
    return from_dict(
        {
            "train": {"max_steps": 1, "global_batch_size": 1, "max_length": arguments.max_length},
            "student": model | {name: value for name, value in served.items() if name == "tokenizer"},
            "teachers": [model | {"name": "teacher", "type": "same_tokenizer", "dtype": arguments.dtype} | served],
            "loss": {"type": "same_vocab"},
            "data": data,
            "cluster": {"device": arguments.device},
        }
    )


def _served(arguments: Namespace) -> dict[str, Any]:
    """Return a teacher's settings for --urls; empty without --urls."""
    if not arguments.urls:
        return {}
    tokenizer = {} if arguments.tokenizer is None else {"tokenizer": arguments.tokenizer}
    program = {} if arguments.program is None else {"program": arguments.program}
    served = {"urls": arguments.urls, "api_key": os.environ.get("OPENAI_API_KEY"), **program}
    return {"served": served} | tokenizer


BUILD = Command(
    "Stores a teacher's output on the texts of a run, for all runs that read the same texts.",
    """\
A position takes 399 bytes with --top-k 64 (a vocabulary above 65,535; 271 below), and with --hidden-states the width
of the model times the bytes of --dtype. Hidden states are exact. With the likeliest tokens, losses compare these and
one more cell for all other tokens (docs/teacher_cache.md).

A segment is one sequence that the teacher reads, and is looked up by its ids. They depend on the tokenizer and on how
texts are cut: with --config they are the run's, whatever its student and settings. Without it a text is read whole, or
in windows of --max-length if it is longer; a student with the teacher's tokenizer and that length reads the same
windows, and texts that are shorter are the same for any student.

A killed process loses at most 256 MB of output; the same command adds missing and damaged segments. --part I/N splits
the work among processes, which may run at the same time. A teacher that is too large for one GPU is sharded over
torchrun's, or as the `parallelism` of --config says.

examples:
  nemo-opd cache build --model Qwen/Qwen3-4B --data 'texts/*.parquet' --output qwen --top-k 64
  nemo-opd distil teachers=qwen3_4b --cfg job --resolve > run.yaml
  nemo-opd cache build --config run.yaml --output qwen --hidden-states
  CUDA_VISIBLE_DEVICES=1 nemo-opd cache build --config run.yaml --output qwen --hidden-states --part 1/4
  torchrun --rdzv-backend=static --master-addr=127.0.0.1 --master-port=29500 --nproc-per-node=4 \\
      -m nemo_opd cache build --config run.yaml --output qwen --top-k 64
  nemo-opd cache build --urls http://a:8000 http://b:8000 --model Qwen/Qwen3-32B --config run.yaml --output qwen \\
      --top-k 64                 with running servers; no model is loaded

Then name the folder in the run instead of the model:
  teachers:
    - {name: qwen, type: cached, cache: qwen}
""",
    _add_build_arguments,
    _build,
)


def _add_inspect_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("cache", type=Path, metavar="DIR", help="a folder written by `cache build`")
    parser.add_argument("--verify", action="store_true", help="read everything and compare checksums")
    parser.add_argument(
        "--segment", type=_number, metavar="N", help="print segment N of the first shard with more than N"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text}: write a number from 0")
    return int(text)


def _inspect(arguments: Namespace, console: Console) -> None:
    """Print the cache's contents. Raises DataError for damaged files."""
    from nemo_opd.models.stored_output import require_head
    from nemo_opd.teacher_cache.reader import CacheReader

    reader = CacheReader(arguments.cache)
    if arguments.verify:
        require_head(reader)
        for _ in reader.each():
            pass
    facts = _facts(reader, is_verified=arguments.verify)
    if arguments.json:
        print(json.dumps(facts))
        return
    if arguments.segment is not None:
        _show_segment(reader, arguments.segment, console)
        return
    table = Table(show_header=False)
    for name, value in facts.items():
        if name in _OPTIONAL and not value:
            continue
        if name == "verified":
            value = "every segment" if value else "only the index; --verify reads every segment"
        is_number = isinstance(value, int) and not isinstance(value, bool)
        table.add_row(name.replace("_", " "), f"{value:,}" if is_number else str(value))
    console.print(table)


def _facts(reader: CacheReader, *, is_verified: bool) -> dict[str, object]:
    from nemo_opd.teacher_cache.reader import shard_files

    tokens = sum(shard.num_tokens for shard in reader.shards)
    num_bytes = sum(shard.num_bytes for shard in reader.shards)
    unfinished = len(list((reader.folder / "shards").glob(".*")))
    return asdict(reader.manifest) | {
        "shards": len(shard_files(reader.folder)),
        "unfinished_shards": unfinished,
        "segments": len(reader),
        "tokens": tokens,
        "bytes": num_bytes,
        "bytes_per_token": round(num_bytes / max(1, tokens), 1),
        "verified": is_verified,
    }


def _show_segment(reader: CacheReader, number: int, console: Console) -> None:
    import numpy as np
    import torch

    from nemo_opd.models.load import load_tokenizer
    from nemo_opd.models.stored_output import sparse_layout
    from nemo_opd.teacher_cache.shard import decoded_ids

    shard = next((shard for shard in reader.shards if len(shard) > number), None)
    if shard is None:
        most = max(map(len, reader.shards), default=0)
        raise DataError(f"--segment={number}: the largest shard of {reader.folder} has {most:,}, counted from 0")
    segment, tokenizer = shard.segment(number), load_tokenizer(str(reader.folder), key="DIR")
    ids = decoded_ids(segment.tokens).tolist()
    print_plain(console, repr(tokenizer.decode(ids)))
    if reader.manifest.form != "top_k":
        return
    rows = sparse_layout(reader.manifest).decode(torch.from_numpy(np.array(segment.rows)))
    table = Table("after", "next", "probability", "likeliest", "other tokens")
    for i, (token, next_token) in enumerate(pairwise(ids)):
        top = zip(rows.ids[i, :_SHOWN_TOKENS].tolist(), rows.log_p[i].exp().tolist(), strict=False)
        likeliest = "  ".join(f"{tokenizer.decode([top_id])!r} {p:.3f}" for top_id, p in top)
        names = (repr(tokenizer.decode([one])) for one in (token, next_token))
        table.add_row(*names, f"{rows.log_p_next[i].exp():.3f}", likeliest, f"{rows.log_rest[i].exp():.3f}")
    console.print(table)


INSPECT = Command(
    "Shows the contents of a teacher cache, the stored output for a text, and whether the files are undamaged.",
    """\
examples:
  nemo-opd cache inspect qwen
      …
      │ bytes per token │ 399.2                                        │
  nemo-opd cache inspect qwen --verify     every segment is read and compared with its checksum
  nemo-opd cache inspect qwen --segment 0  the likeliest tokens of the first text
  nemo-opd cache inspect qwen --json | jq .tokens
""",
    _add_inspect_arguments,
    _inspect,
)
