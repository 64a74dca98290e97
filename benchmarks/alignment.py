"""Token alignment of real tokenizers: ours, Needleman–Wunsch over token strings, and character offsets, in one run.

uv run benchmarks/alignment.py --tokenizers FOLDER --corpus FILE.jsonl     # writes benchmarks/results/alignment.*

FOLDER holds one folder per tokenizer; FILE has lines of {"domain", "text"}. Both come from NEMO_OPD_TOKENIZERS and
NEMO_OPD_CORPUS (the folder of multidomain.jsonl) where they are not given.
"""

import argparse
import json
import os
import statistics
import time
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import cache, lru_cache, partial
from importlib.metadata import version
from itertools import permutations
from pathlib import Path

import numpy as np
from alignment_baselines import LONGEST_COMBINATION, TokenStrings, character_offsets, needleman_wunsch
from alignment_oracle import Bounds, Reader, Score, Side, judge, wanted_cuts
from demo import ROOT, commit, hardware
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from nemo_opd.alignment import TokenAligner
from nemo_opd.models.load import load_tokenizer

COMMAND = "uv run benchmarks/alignment.py"
OURS, NEEDLEMAN_WUNSCH, OFFSETS = "nemo_opd", "Needleman–Wunsch", "character offsets"
METHODS = (OURS, NEEDLEMAN_WUNSCH, OFFSETS)
WIDTH = 118
"""Columns of the widest table, which no terminal or pipe should break."""
REPEATS = {OURS: 20, NEEDLEMAN_WUNSCH: 2, OFFSETS: 10}
DECOMPOSED = ("es", "ja")
"""Domains that are measured once more with their accents as combining marks."""
NOTES = f"""\
* **used chunks**: those a method offers for training; **wrong**: of them, those whose bytes differ between the two
  sides; **exact**: the share that is equal.
* **tokens aligned**: student tokens inside exact chunks. What is missing to 100 % has no partner where a tokenizer
  rewrites the text (Gemma reads `▁` as a space, Qwen3 composes accents).
* **cuts found**: of the places where both tokenizers cut the text, beside a stretch both spell alike, those that are an
  edge of a chunk. Fewer cuts: coarser chunks.
* The truth is taken from the text (`benchmarks/alignment_oracle.py`), not from the aligner's tables.
* **µs**: the best of {", ".join(f"{REPEATS[method]} calls ({method})" for method in METHODS)};
  of that, the median over pairs and domains, and the slowest. One thread, from Python lists to chunks.
* **{OURS}**: `TokenAligner.align`, the public call with its checks and piece look-up.
* **{NEEDLEMAN_WUNSCH}**: a global alignment of token strings (`Ġ`, `▁` → space; each token decoded alone, so parts of
  a character are U+FFFD), one string against one or against up to {LONGEST_COMBINATION} that spell it together;
  strings are numbered first and the quadratic loop is compiled by Numba, as ours is.
* **{OFFSETS}**: cuts where tokens of both sides end at one character, from the fast tokenizers' offsets, in NumPy.
  The time to make the offsets is not counted. It needs the text and its canonical tokenization: ids that a model
  sampled have no offsets.
"""


@dataclass
class Cell:
    """What one method does on several texts of one kind."""

    score: Score = field(default_factory=Score)
    best_us: list[float] = field(default_factory=list)
    """Per text."""

    def add(self, score: Score, best_us: float) -> None:
        self.score += score
        self.best_us.append(best_us)


Cells = dict[tuple[int, str, str], Cell]
"""By student tokens, domain or pair of tokenizers, and method."""


@dataclass(frozen=True)
class Growth:
    """Time per call against length."""

    tokens: int
    median_us: float
    worst_us: float
    ns_per_token: float
    """Of the median, per student token."""
    arrays_us: float
    """The median with ids given as int32 arrays, as the data loader does."""


@dataclass(frozen=True)
class Grid:
    """A table for the terminal and for Markdown."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join([f"## {self.title}", "", *("| " + " | ".join(line) + " |" for line in lines), ""])

    def rich(self) -> Table:
        table = Table(title=self.title, title_justify="left", box=SIMPLE_HEAD)
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="left" if i < 2 else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        return table


class Bench:
    """Tokenizers and documents, with each text read once per tokenizer."""

    def __init__(self, folder: Path, corpus: Path, names: list[str]) -> None:
        self.tokenizers = {name: load_tokenizer(str(folder / name), key="--tokenizers") for name in names}
        self._readers = {name: Reader(tokenizer) for name, tokenizer in self.tokenizers.items()}
        self._strings = {name: TokenStrings(tokenizer) for name, tokenizer in self.tokenizers.items()}
        self.documents: dict[str, str] = defaultdict(str)
        for line in corpus.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            self.documents[record["domain"]] += record["text"]
        self.aligner = cache(self._aligner)
        self.read = lru_cache(maxsize=128)(self._read)
        """The pairs of one student come one after the other, so its texts are read once."""

    def _aligner(self, student: str, teacher: str) -> TokenAligner:
        return TokenAligner(self.tokenizers[student], self.tokenizers[teacher])

    def _read(self, name: str, text: str) -> Side:
        return self._readers[name].read(text)

    def ids(self, name: str, text: str) -> list[int]:
        return self._readers[name].backend.encode(text, add_special_tokens=False).ids

    def text(self, document: str, student: str, tokens: int) -> str:
        """The beginning of a document, repeated where it is too short, that has so many student tokens."""
        characters = 8 * tokens
        while True:
            text = (document * (characters // len(document) + 1))[:characters]
            offsets = self._readers[student].backend.encode(text, add_special_tokens=False).offsets
            if len(offsets) > tokens:
                return text[: offsets[tokens - 1][1]]
            characters *= 2

    def calls(self, student: str, teacher: str, text: str) -> dict[str, Callable[[], Bounds]]:
        """What is timed, by method."""
        s, t = self.read(student, text), self.read(teacher, text)
        aligner, s_strings, t_strings = self.aligner(student, teacher), self._strings[student], self._strings[teacher]

        def ours() -> Bounds:
            alignment = aligner.align(s.ids, t.ids)
            return alignment.bounds[~alignment.inexact]

        return {
            OURS: ours,
            NEEDLEMAN_WUNSCH: lambda: needleman_wunsch(s_strings.of(s.ids), t_strings.of(t.ids)),
            OFFSETS: lambda: character_offsets(s.offsets, t.offsets),
        }


def best_us(call: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter_ns()
        call()
        best = min(best, (time.perf_counter_ns() - began) / 1e3)
    return best


def texts(bench: Bench, student: str, tokens: int) -> Iterator[tuple[str, str]]:
    """Every domain's text, and some of them decomposed, as (domain, text)."""
    for domain, document in bench.documents.items():
        yield domain, bench.text(document, student, tokens)
    for domain in DECOMPOSED:
        if domain in bench.documents:
            decomposed = unicodedata.normalize("NFD", bench.documents[domain])
            yield f"{domain}, decomposed", bench.text(decomposed, student, tokens)


def measure(bench: Bench, pairs: list[tuple[str, str]], lengths: list[int], quadratic_limit: int) -> Cells:
    """Every method on every pair, domain and length; Needleman–Wunsch up to `quadratic_limit` tokens."""
    cells: Cells = defaultdict(Cell)
    for student, teacher in track(pairs, "pairs of tokenizers"):
        for tokens in lengths:
            for domain, text in texts(bench, student, tokens):
                s, t = bench.read(student, text), bench.read(teacher, text)
                wanted = wanted_cuts(s, t)
                for method, call in bench.calls(student, teacher, text).items():
                    if method == NEEDLEMAN_WUNSCH and tokens > quadratic_limit:
                        continue
                    score = judge(s, t, call(), wanted)
                    spent = best_us(call, REPEATS[method])
                    cells[tokens, domain, method].add(score, spent)
                    if "decomposed" not in domain:
                        cells[tokens, "all", method].add(score, spent)
                        cells[tokens, f"{student} → {teacher}", method].add(score, spent)
    return cells


def measure_growth(bench: Bench, pairs: list[tuple[str, str]], lengths: list[int]) -> list[Growth]:
    """Our aligner on the whole corpus, one document after the other, up to the longest length."""
    return [growth(bench, pairs, tokens) for tokens in track(lengths, "lengths")]


def growth(bench: Bench, pairs: list[tuple[str, str]], tokens: int) -> Growth:
    document = "".join(bench.documents.values())
    lists, arrays = [], []
    for student, teacher in pairs:
        text = bench.text(document, student, tokens)
        s, t = bench.ids(student, text), bench.ids(teacher, text)
        align = bench.aligner(student, teacher).align
        lists.append(best_us(partial(align, s, t), REPEATS[OURS]))
        arrays.append(best_us(partial(align, np.array(s, np.int32), np.array(t, np.int32)), REPEATS[OURS]))
    median = statistics.median(lists)
    return Growth(tokens, median, max(lists), 1e3 * median / tokens, statistics.median(arrays))


def percent(part: int, whole: int) -> str:
    """Two decimals, and 100 only where nothing is missing."""
    share = 100 * part / whole if whole else 100.0
    return "100 %" if part == whole else f"{min(share, 99.99):.2f} %"


FIGURES = ["used chunks", "wrong", "exact", "tokens aligned", "cuts found", "µs", "slowest µs"]


def figures(cell: Cell) -> list[str]:
    score = cell.score
    return [
        f"{score.used_chunks:,}",
        f"{score.used_chunks - score.exact_chunks:,}",
        percent(score.exact_chunks, score.used_chunks),
        percent(score.aligned_tokens, score.student_tokens),
        percent(score.found_cuts, score.common_cuts),
        f"{statistics.median(cell.best_us):,.0f}",
        f"{max(cell.best_us):,.0f}",
    ]


def grids(cells: Cells, scaling: list[Growth], pairs: list[str], domains: list[str]) -> list[Grid]:
    lengths = sorted({tokens for tokens, _, _ in cells})
    middle = 2048 if 2048 in lengths else lengths[-1]

    def rows(keys: list[str]) -> list[list[str]]:
        wanted = [(key, method) for key in keys for method in METHODS if (middle, key, method) in cells]
        return [[key, method, *figures(cells[middle, key, method])] for key, method in wanted]

    overall = [
        [f"{tokens:,}", method, *figures(cells[tokens, "all", method])]
        for tokens in lengths
        for method in METHODS
        if (tokens, "all", method) in cells
    ]
    plain = [domain for domain in domains if "decomposed" not in domain]
    grown = [
        [f"{g.tokens:,}", f"{g.median_us:,.0f}", f"{g.worst_us:,.0f}", f"{g.ns_per_token:.1f}", f"{g.arrays_us:,.0f}"]
        for g in scaling
    ]
    return [
        Grid("All pairs and domains", ["tokens", "method", *FIGURES], overall),
        Grid(f"By domain, {middle:,} tokens", ["domain", "method", *FIGURES], rows(plain)),
        Grid(
            f"Where the byte streams differ: decomposed accents, {middle:,} tokens",
            ["domain", "method", *FIGURES],
            rows([domain for domain in domains if domain not in plain]),
        ),
        Grid(f"By pair, {middle:,} tokens", ["student → teacher", "method", *FIGURES], rows(pairs)),
        Grid(
            f"Growth of {OURS} with length",
            ["student tokens", "µs", "slowest µs", "ns per token", "µs, ids as arrays"],
            grown,
        ),
    ]


def versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("numba", "numpy", "tokenizers", "transformers"))


def write(output: Path, facts: dict[str, str], tables: list[Grid], cells: Cells, scaling: list[Growth]) -> None:
    """alignment.md for reading; alignment.json with the counts and times behind every row of it."""
    described = "\n".join(f"* {name}: {value}" for name, value in facts.items())
    text = "\n".join(["# Token alignment, three ways", "", NOTES, *(table.markdown() for table in tables), described])
    (output / "alignment.md").write_text(text + "\n", encoding="utf-8")
    rows = [
        {
            "tokens": tokens,
            "over": over,
            "method": method,
            **asdict(cell.score),
            "texts": len(cell.best_us),
            "median_us": round(statistics.median(cell.best_us), 1),
            "worst_us": round(max(cell.best_us), 1),
        }
        for (tokens, over, method), cell in cells.items()
    ]
    record = {**facts, "cells": rows, "growth": [asdict(row) for row in scaling]}
    (output / "alignment.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    corpus = os.environ.get("NEMO_OPD_CORPUS")
    parser.add_argument("--tokenizers", type=Path, default=os.environ.get("NEMO_OPD_TOKENIZERS"))
    parser.add_argument("--corpus", type=Path, default=Path(corpus) / "multidomain.jsonl" if corpus else None)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192], help="student tokens a text")
    parser.add_argument("--growth", type=int, nargs="*", default=[2048, 8192, 32768, 131072], metavar="LENGTH")
    parser.add_argument(
        "--pairs", nargs="+", metavar="STUDENT:TEACHER", help="folder names (default: all ordered pairs)"
    )
    parser.add_argument("--quadratic-limit", type=int, default=2048, help="longest text for Needleman–Wunsch")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    if options.tokenizers is None or not Path(options.tokenizers).is_dir():
        parser.error(f"--tokenizers is {options.tokenizers}, no folder; give one, or set NEMO_OPD_TOKENIZERS")
    if options.corpus is None or not options.corpus.is_file():
        parser.error(f"--corpus is {options.corpus}, no file; give one, or set NEMO_OPD_CORPUS to its folder")
    options.tokenizers = Path(options.tokenizers)
    return options


def pairs_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    if options.pairs:
        return [(student, teacher) for student, _, teacher in (pair.partition(":") for pair in options.pairs)]
    found = sorted(file.parent.name for file in options.tokenizers.glob("*/tokenizer.json"))
    return list(permutations(found, 2))


def main() -> None:
    options = arguments()
    pairs = pairs_of(options)
    facts = {
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit(),
        "date": date.today().isoformat(),
        "command": COMMAND,
        "pairs": ", ".join(f"{student} → {teacher}" for student, teacher in pairs),
    }
    bench = Bench(options.tokenizers, options.corpus, sorted({name for pair in pairs for name in pair}))
    cells = measure(bench, pairs, options.lengths, options.quadratic_limit)
    scaling = measure_growth(bench, pairs, options.growth)
    names = [f"{student} → {teacher}" for student, teacher in pairs]
    over = list(dict.fromkeys(key for _, key, _ in cells))
    tables = grids(cells, scaling, names, [key for key in over if key != "all" and key not in names])
    options.output.mkdir(parents=True, exist_ok=True)
    write(options.output, facts, tables, cells, scaling)
    console = Console(width=max(WIDTH, Console().width))
    for table in tables:
        console.print(table.rich())
    console.print("\n".join(f"{name}: {value}" for name, value in facts.items()))


if __name__ == "__main__":
    main()
