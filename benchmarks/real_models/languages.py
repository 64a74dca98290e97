"""Texts in other languages: GNOME's and LibreOffice's help to train on, Debian's installation guide to measure on.

All are packages of Debian: gnome-user-docs (CC BY-SA 3.0), libreoffice-help-* (MPL 2.0) and installation-guide-amd64
(GPL 2 or later). Their paragraphs are read, each once, without those that are not translated: the original's, and those
in ASCII alone.
"""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.real_models.texts import Document, fitting

TRAINED = ("es", "ja", "ru", "zh_CN")
MEASURED = ("en", *TRAINED)
_OFFICE_NAMES = {language: language.replace("_", "-") for language in TRAINED}
"""Folders of LibreOffice's help."""
PACKAGES = (
    "gnome-user-docs",
    "installation-guide-amd64",
    *(f"libreoffice-help-{name.lower()}" for name in _OFFICE_NAMES.values()),
)
_HELP, _GUIDE = Path("usr/share/help"), Path("usr/share/doc/installation-guide-amd64")
_OFFICE = Path("usr/share/libreoffice/help")
_PARAGRAPH_BYTES, _PAGE_BYTES = 40, 500
"""Shorter paragraphs and pages are left out."""


def unpack(packages: Path, folder: Path) -> None:
    """Unpack the Debian packages in `packages` into a folder, after downloading those that are missing there.

    Raises SystemExit if a package cannot be downloaded or unpacked.
    """
    packages.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        if not any(packages.glob(f"{name}_*.deb")):
            _run("apt-get", "download", name, cwd=packages)
        _run("dpkg-deb", "-x", str(next(packages.glob(f"{name}_*.deb"))), str(folder), cwd=packages)


def _run(*command: str, cwd: Path) -> None:
    try:
        subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"error: {error}; this needs Debian or Ubuntu, or the packages (.deb) in {cwd} and dpkg-deb"
        ) from None


def training_pages(unpacked: Path, num_bytes: int) -> list[Document]:
    """Return pages of GNOME's help and then of LibreOffice's, about `num_bytes` of each language."""
    chosen = []
    for language, office_name in _OFFICE_NAMES.items():
        total = 0
        office = (replace(page, domain=language) for page in _pages(unpacked / _OFFICE, office_name, untranslated="en"))
        for page in chain(_pages(unpacked / _HELP, language, untranslated="C"), office):
            if total >= num_bytes:
                break
            total += len(page.text.encode())
            chosen.append(page)
    return chosen


def validation_pages(unpacked: Path, number: int, tokenizers: Sequence[Any], max_tokens: int) -> list[Document]:
    """Return the beginnings of `number` pages of the guide in each language, of at most `max_tokens` tokens."""
    return [
        replace(page, text=fitting(page.text, tokenizers, max_tokens))
        for language in MEASURED
        for page in _pages(unpacked / _GUIDE, language, untranslated="en")[:number]
    ]


def _pages(manual: Path, language: str, untranslated: str) -> list[Document]:
    """Return the pages of a language by the hash of their names. untranslated: the language of the original."""
    seen: set[str] = set()
    is_translation = language != untranslated
    if is_translation:
        seen.update(*map(_paragraphs, _files(manual / untranslated)))
    pages = []
    for file in _files(manual / language):
        paragraphs = [text for text in _paragraphs(file) if not (is_translation and text.isascii())]
        new = [paragraph for paragraph in paragraphs if paragraph not in seen]
        seen.update(new)
        pages.append(Document(language, file.stem, "\n".join(new)))
    return sorted((page for page in pages if len(page.text.encode()) >= _PAGE_BYTES), key=lambda page: page.rank)


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix in (".page", ".html"))


def _paragraphs(file: Path) -> list[str]:
    """Return the different paragraphs of a page on one line each; a line break between CJK characters is no space."""
    text = file.read_text(encoding="utf-8")
    paragraphs = mallard_paragraphs(text) if file.suffix == ".page" else html_paragraphs(text)
    joined = (re.sub(r"(?<=[\u3000-\uffff])\s+(?=[\u3000-\uffff])", "", paragraph) for paragraph in paragraphs)
    lines = dict.fromkeys(re.sub(r"\s+", " ", paragraph).strip() for paragraph in joined)
    return [line for line in lines if len(line.encode()) >= _PARAGRAPH_BYTES]


def mallard_paragraphs(page: str) -> list[str]:
    """Return the paragraphs of a page of GNOME's help."""
    root = ElementTree.fromstring(page)
    return ["".join(paragraph.itertext()) for paragraph in root.iter("{http://projectmallard.org/1.0/}p")]


def html_paragraphs(page: str) -> list[str]:
    """Return the paragraphs of a page in HTML."""
    parser = _ParagraphParser()
    parser.feed(page)
    return parser.paragraphs


class _ParagraphParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: list[str] = []
        self._is_inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "p":
            self.paragraphs.append("")
            self._is_inside = True

    def handle_endtag(self, tag: str) -> None:
        if tag == "p":
            self._is_inside = False

    def handle_data(self, data: str) -> None:
        if self._is_inside:
            self.paragraphs[-1] += data
