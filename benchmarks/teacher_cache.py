"""Cached teachers: what a student learns from the k likeliest tokens, and how fast they are read.

uv run benchmarks/teacher_cache.py            # writes benchmarks/results/teacher_cache.md and teacher_cache.json

The demo's student learns from its teacher with another tokenizer, without CE, in the same batches from the same start:
from the teacher itself, and from caches. Reading is timed as a run's worker does it: segments of the corpus in random
order, from the mapped files to one tensor, checksums compared.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from demo import ROOT, commit, hardware
from hydra import compose, initialize_config_dir
from rich.console import Console

from nemo_opd.config.composition import from_omegaconf
from nemo_opd.config.run import RunConfig, from_dict
from nemo_opd.data.columns import run_layout
from nemo_opd.data.document_sources import load_documents
from nemo_opd.data.row_types import TEXT
from nemo_opd.logging.loggers import read
from nemo_opd.logits.sources import Packing
from nemo_opd.models.stored_output import stored_output
from nemo_opd.teacher_cache.reader import CacheReader
from nemo_opd.teacher_cache.shard import decoded_ids
from nemo_opd.training.cache_build import CacheForm, build_cache
from nemo_opd.training.off_policy import distil
from nemo_opd.types import TokenRows

RESULTS = ROOT / "benchmarks" / "results"
FORMS: dict[str, CacheForm] = {f"k = {k}": CacheForm(k) for k in (4, 16, 64, 256)} | {"hidden states": CacheForm(None)}
_AT_A_TIME = 32
"""Segments of a reading."""


@dataclass(frozen=True)
class Row:
    form: str
    bits_per_byte: float
    """Of the student on the validation texts, after training."""
    accuracy: float
    train_tokens_per_s: float
    """Of the student, over all steps: reading, forward, backward."""
    bytes_per_token: float = 0.0
    """Of the teacher's tokens, on disk; 0 for the teacher itself."""
    read_tokens_per_s: float = 0.0
    """Of the teacher's tokens."""
    moved: float = 0.0
    """Mean share of a row's weight that has moved, of a projection that is learned."""


def settings(folder: Path, steps: int, texts: int) -> RunConfig:
    """Return a run of the demo's pair on some of its texts, in one process."""
    overrides = ["teachers=demo_single", "loss=p_kl", "++loss.ce_weight=0", f"++train.max_steps={steps}"]
    overrides += ["++train.global_batch_size=8", "++train.micro_batch_size=8", "++cluster.launcher=local"]
    overrides += ["++cluster.device=cpu", "++train.validate_every=null", "++train.save_every=null"]
    overrides += ["++logging.console.enabled=false", "++data.validation.max_samples=64"]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = from_omegaconf(compose("off_policy_demo", overrides), RunConfig)
    documents = load_documents(config.data.train, run_layout(config), key="data.train")
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": documents[i][TEXT]}) + "\n" for i in range(texts)), encoding="utf-8")
    data = config.model_dump(mode="json")
    data["data"]["train"] = {"jsonl_files": [str(path)]}
    return from_dict(data)


def trained(config: RunConfig, form: str, folder: Path, cache: Path | None) -> Row:
    """Train to the end and return what the run says."""
    data = config.model_dump(mode="json")
    data["run"] |= {"output_dir": str(folder)}
    if cache is not None:
        data["teachers"] = [{"name": config.teachers[0].name, "type": "cached", "cache": str(cache)}]
    distil(from_dict(data))
    records = read(folder / "metrics.jsonl")
    steps = [record for record in records if "perf/step_s" in record][1:]  # without the first, which warms up
    seconds = sum(record["perf/step_s"] for record in steps)
    tokens = sum(record["train/student_tokens"] for record in steps)
    last = records[-1]
    moved = last.get(f"train/projection_moved/{config.teachers[0].name}", 0.0)
    return Row(form, last["val/bits_per_byte"], last["val/accuracy"], tokens / seconds, moved=moved)


def reading_rate(cache: Path) -> float:
    """Return the tokens that are read in a second."""
    reader = CacheReader(cache)
    stored = stored_output(reader, "cpu")
    segments = [decoded_ids(segment.tokens) for segment in reader.each()]
    order = np.random.default_rng(0).permutation(len(segments))
    tokens, seconds = 0, 0.0
    for begin in range(0, len(order), _AT_A_TIME):
        ids = [torch.from_numpy(segments[i]).long() for i in order[begin : begin + _AT_A_TIME]]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        nothing = torch.zeros_like(padded, dtype=torch.int32)
        packing = Packing.of(TokenRows(padded, torch.tensor([len(each) for each in ids]), nothing.bool(), nothing))
        start = time.perf_counter()
        stored(padded, packing)
        seconds += time.perf_counter() - start
        tokens += len(packing.tokens)
    return tokens / seconds


def measured(config: RunConfig, folder: Path, console: Console) -> list[Row]:
    rows = [trained(config, "the teacher itself", folder / "live", None)]
    for form, kept in FORMS.items():
        cache = folder / form
        build_cache(config, 0, cache, kept)
        reader = CacheReader(cache)
        size = sum(shard.num_bytes for shard in reader.shards) / sum(shard.num_tokens for shard in reader.shards)
        row = trained(config, form, folder / f"run {form}", cache)
        rows.append(Row(**(asdict(row) | {"bytes_per_token": size, "read_tokens_per_s": reading_rate(cache)})))
        console.print(rows[-1])
    return rows


def report(rows: list[Row], config: RunConfig, texts: int) -> str:
    lines = [
        "# Cached teachers",
        "",
        f"{hardware()}; commit {commit()}; {date.today()}. `uv run benchmarks/teacher_cache.py`: the demo's student "
        f"and {config.teachers[0].model}, loss p_kl without CE, {config.train.max_steps} steps of 8 rows of "
        f"{config.train.max_length} tokens from {texts:,} texts, one seed. The machine did other work meanwhile.",
        "",
        *table(rows),
    ]
    return "\n".join(lines) + "\n"


def table(rows: list[Row]) -> list[str]:
    lines = [
        "| teacher | student, bits per byte | accuracy | training, tokens/s | bytes of a token | reading, tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        of_cache = f"{row.bytes_per_token:,.0f} | {row.read_tokens_per_s:,.0f}" if row.bytes_per_token else "— | —"
        learned = f"{row.bits_per_byte:.4f} | {row.accuracy:.4f}"
        lines.append(f"| {row.form} | {learned} | {row.train_tokens_per_s:,.0f} | {of_cache} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--texts", type=int, default=1500)
    arguments = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        config = settings(folder, arguments.steps, arguments.texts)
        rows = measured(config, folder, Console())
    RESULTS.joinpath("teacher_cache.md").write_text(report(rows, config, arguments.texts), encoding="utf-8")
    record = {"hardware": hardware(), "commit": commit(), "date": str(date.today())}
    record |= {"steps": arguments.steps, "texts": arguments.texts, "rows": [asdict(row) for row in rows]}
    RESULTS.joinpath("teacher_cache.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
