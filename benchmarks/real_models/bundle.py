"""Carry what the `languages` experiment reads to a machine without a network, in parts.

python -m benchmarks.real_models.bundle split PARTS    # here: compressed parts of at most 40 MiB, and their checksums
python -m benchmarks.real_models.bundle join PARTS     # there, when all parts have arrived

--place names the prepared folder. Compression is lossless: weights that were quantised to 4 bits repeat, also as bf16.
"""

import argparse
import hashlib
import json
import lzma
import os
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from benchmarks.real_models.place import ROOT, Place

CHECKSUMS = "checksums.json"
PART_BYTES = 40 * 2**20
_BLOCK_BYTES = 8 * 2**20
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3, "lp": 1, "pb": 1}]
"""For numbers of two bytes."""


def split(place: Place, parts: Path, part_bytes: int = PART_BYTES, block_bytes: int = _BLOCK_BYTES) -> dict[str, str]:
    """Write the parts and their checksums; return the checksums by the part's name.

    block_bytes: bytes compressed by themselves, so that several cores share the work. Raises SystemExit if
    the folder is not prepared, or `parts` contains other files.
    """
    files = [place.original, place.gemma3, place.languages_train, place.languages_validation, place.facts]
    if missing := [str(file) for file in files if not file.exists()]:
        command = f"python -m benchmarks.real_models.prepare --output {place.root}"
        raise SystemExit(f"error: {', '.join(missing)}: missing; run `{command}`")
    parts.mkdir(parents=True, exist_ok=True)
    if any(parts.iterdir()):
        raise SystemExit(f"error: {parts} is not empty, and its files would be mixed with the new parts; name another")
    checksums: dict[str, str] = {}
    with tempfile.TemporaryFile(dir=parts) as archive:
        with tarfile.open(fileobj=archive, mode="w", dereference=True) as tar:
            for file in files:
                tar.add(file, str(file.relative_to(place.root)))
        archive.seek(0)
        part = b""
        for block in _compressed(archive, block_bytes):
            if part and len(part) + len(block) > part_bytes:
                _write_part(parts, part, checksums)
                part = b""
            part += block
        _write_part(parts, part, checksums)
    (parts / CHECKSUMS).write_text(json.dumps(checksums, indent=1) + "\n", encoding="utf-8")
    return checksums


def _compressed(archive: IO[bytes], block_bytes: int) -> Iterator[bytes]:
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as threads:  # lzma works without the interpreter's lock
        while blocks := [block for _ in range(4 * cores) if (block := archive.read(block_bytes))]:
            yield from threads.map(lambda block: lzma.compress(block, filters=_FILTERS), blocks)


def _write_part(parts: Path, content: bytes, checksums: dict[str, str]) -> None:
    name = f"part_{len(checksums):02}.xz"
    (parts / name).write_bytes(content)
    checksums[name] = hashlib.sha256(content).hexdigest()


def join(parts: Path, place: Place) -> None:
    """Unpack the parts into the folder. Raises SystemExit if one is missing or damaged."""
    if not (parts / CHECKSUMS).is_file():
        raise SystemExit(f"error: {parts / CHECKSUMS} is missing; bring it with the last part")
    checksums = json.loads((parts / CHECKSUMS).read_text(encoding="utf-8"))
    if wrong := [name for name, checksum in checksums.items() if _checksum(parts / name) != checksum]:
        raise SystemExit(f"error: {parts}: {', '.join(wrong)}: missing or damaged; bring them again")
    with tempfile.TemporaryFile(dir=parts) as archive:
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for content in threads.map(lambda name: lzma.decompress((parts / name).read_bytes()), checksums):
                archive.write(content)
        archive.seek(0)
        with tarfile.open(fileobj=archive) as tar:
            tar.extractall(place.root, filter="data")


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("split", "join"))
    parser.add_argument("parts", type=Path, help="folder of the parts")
    parser.add_argument("--place", type=Path, default=ROOT / "outputs" / "real_models", help="prepared folder")
    options = parser.parse_args()
    place = Place(options.place.resolve())
    if options.action == "join":
        join(options.parts, place)
        return
    for name in split(place, options.parts):
        print(f"{(options.parts / name).stat().st_size / 2**20:5.1f} MiB  {name}")


if __name__ == "__main__":
    main()
