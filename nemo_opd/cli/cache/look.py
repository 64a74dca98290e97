"""Contents of a cache, as a table or JSON."""

import json
from argparse import Namespace
from dataclasses import asdict

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast

from nemo_opd.errors import DataError
from nemo_opd.models.load import load_tokenizer
from nemo_opd.models.stored_output import require_head, sparse_layout
from nemo_opd.teacher_cache.reader import CacheReader, shard_files
from nemo_opd.teacher_cache.shard import Segment, decoded_ids

_SHOWN_TOKENS = 4
_OPTIONAL = ("top_k", "value_bytes", "hidden_size", "chat_template_kwargs", "is_served", "positions")
"""Fields of the manifest that are empty if the cache's form or the teacher does not use them."""


def show(arguments: Namespace, console: Console) -> None:
    """Print the cache's contents. Raises DataError for damaged files."""
    reader = CacheReader(arguments.cache)
    if arguments.verify:
        require_head(reader)
        for _ in reader.each():
            pass
    facts = _facts(reader, is_verified=arguments.verify)
    if arguments.json:
        print(json.dumps(facts))
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
    if arguments.segment is not None:
        _show_segment(reader, arguments.segment, console)


def _facts(reader: CacheReader, *, is_verified: bool) -> dict[str, object]:
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
    shard = next((shard for shard in reader.shards if len(shard) > number), None)
    if shard is None:
        most = max(map(len, reader.shards), default=0)
        raise DataError(f"--segment={number}: the largest shard of {reader.folder} has {most:,}, counted from 0")
    segment, tokenizer = shard.segment(number), load_tokenizer(str(reader.folder), key="DIR")
    ids = decoded_ids(segment.tokens)
    console.print(repr(tokenizer.decode(ids)), markup=False, highlight=False, soft_wrap=True)
    if reader.manifest.form == "top_k":
        console.print(_likeliest(reader, segment, ids, tokenizer))


def _likeliest(reader: CacheReader, segment: Segment, ids: np.ndarray, tokenizer: PreTrainedTokenizerFast) -> Table:
    layout = sparse_layout(reader.manifest)
    rows = layout.decode(torch.from_numpy(np.array(segment.rows)))
    table = Table("after", "next", "probability", "likeliest", "other tokens")
    for i, token in enumerate(ids[:-1].tolist()):
        top = zip(rows.ids[i, :_SHOWN_TOKENS].tolist(), rows.log_p[i].exp().tolist(), strict=False)
        likeliest = "  ".join(f"{tokenizer.decode([top_id])!r} {p:.3f}" for top_id, p in top)
        next_token, p, tail = tokenizer.decode([int(ids[i + 1])]), rows.log_p_next[i].exp(), rows.log_rest[i].exp()
        table.add_row(repr(tokenizer.decode([token])), repr(next_token), f"{p:.3f}", likeliest, f"{tail:.3f}")
    return table
