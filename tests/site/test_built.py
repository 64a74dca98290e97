"""The built site works from a disk without a network; skipped unless NEMO_OPD_SITE names it, as in `.ci/run`."""

import json
import os
import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.site.pages import DOCS, ROOT

SITE = Path(os.environ.get("NEMO_OPD_SITE", ""))
pytestmark = pytest.mark.skipif("NEMO_OPD_SITE" not in os.environ, reason="NEMO_OPD_SITE names no built site")
LINKED = re.compile(r'<a[^>]*\shref="([^"]+)"')
LOADED = re.compile(r'<(?:script|img)[^>]*\ssrc="([^"]+)"|<link[^>]*\srel="(?:stylesheet|icon)"[^>]*href="([^"]+)"')


def pages() -> list[Path]:
    return sorted(SITE.rglob("*.html"))


def test_nothing_is_loaded_from_elsewhere() -> None:
    """Bug: the site needs a font, script or icon from the network."""
    sources = (pair for page in pages() for pair in LOADED.findall(page.read_text("utf-8")))
    loaded = {script or link for script, link in sources}
    assert any(target.endswith("site/iframe-worker.js") for target in loaded)
    assert [target for target in loaded if "//" in target] == []


def test_links_of_the_site_lead_to_its_files() -> None:
    """Bug: a link to an excluded file, which MkDocs' strict mode does not report."""
    missing = set()
    for page in pages():
        if page.name == "404.html":
            continue  # its links start at a server's root
        for link in LINKED.findall(page.read_text("utf-8")):
            target = unquote(unescape(link)).partition("#")[0]
            if target and "://" not in target and not target.startswith(("mailto:", "javascript:")):
                file = page.parent / target
                if not (file / "index.html" if file.is_dir() else file).exists():
                    missing.add(f"{page.relative_to(SITE)}: {link}")
    assert not missing


def test_the_search_knows_pages_and_no_code() -> None:
    text = (SITE / "search" / "search_index.js").read_text(encoding="utf-8")
    entries = json.loads(text.removeprefix("var __index = "))["docs"]
    places = {entry["location"].partition("#")[0] for entry in entries}
    assert {"losses.html", "tutorials/off_policy.html", "repository/CHANGELOG.html"} <= places
    assert [place for place in places if place.endswith(".py.html")] == []


def test_the_search_finds_parts_of_settings() -> None:
    """Bug: a search for `push_to_hub` does not find `run.push_to_hub.repo`."""
    text = (SITE / "search" / "search_index.js").read_text(encoding="utf-8")
    separator = json.loads(text.removeprefix("var __index = "))["config"]["separator"]
    assert re.split(separator, "run.push_to_hub.repo=me/x") == ["run", "push_to_hub", "repo", "me", "x"]
    assert re.split(separator, "torch 2.13.0, 5e-4") == ["torch", "2.13.0", "5e", "4"]


QUESTIONS = {
    "memory": {"scaling", "losses", "troubleshooting"},
    "conversations": {"data"},
    "sharegpt": {"data"},
    "alpaca": {"data"},
    "prompt completion": {"data"},
    "jsonl": {"data"},
    "gold": {"losses"},
    "which loss": {"losses"},
    "learning rate": {"start", "how_to", "checkpoints", "troubleshooting"},
    "chat template": {"troubleshooting", "alignment", "data"},
    "resume": {"checkpoints"},
    "lora": {"teachers", "how_to", "command"},
    "wandb": {"publishing", "how_to"},
    "several teachers": {"losses", "tutorials/several_teachers"},
    "vllm": {"on_policy"},
    "slurm": {"deploying"},
    "bits per byte": {"evaluation"},
    "cache teacher": {"teacher_cache"},
    "grpo": {"losses", "recipes"},
    "trl": {"migrating"},
    "benchmarks": {"evaluation"},
}
"""Searches of users, and pages; one of them must be among the first three results."""


def test_the_search_answers_questions_with_guides() -> None:
    """Bug: class attributes and settings' keys come before the page that explains them.

    Uses lunr as the site's search does, with the site's boosts of fields and pages.
    """
    import lunr  # takes seconds
    from lunr.stop_word_filter import WORDS as STOP_WORDS
    from lunr.stop_word_filter import stop_word_filter

    text = (SITE / "search" / "search_index.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("var __index = "))
    separator, boosts = index["config"]["separator"], index["config"]["fields"]

    def words(text: str) -> list[str]:
        return [word for word in re.split(separator, re.sub(r"<[^>]+>", " ", text).lower()) if word]

    documents = [
        (
            {"id": entry["location"], "title": " ".join(words(entry["title"])), "text": " ".join(words(entry["text"]))},
            {"boost": entry.get("boost", 1)},
        )
        for entry in index["docs"]
    ]
    builder = lunr.get_default_builder()
    builder.pipeline.reset()
    builder.pipeline.add(stop_word_filter)
    builder.search_pipeline.reset()
    builder.search_pipeline.add(stop_word_filter)
    fields = [{"field_name": name, "boost": boosts[name]["boost"]} for name in ("title", "text")]
    search = lunr.lunr("id", fields, documents, builder=builder)
    wrong = {}
    for question, answers in QUESTIONS.items():
        results = search.search(" ".join(f"+{word}" for word in words(question) if word not in STOP_WORDS))
        pages = list(dict.fromkeys(result["ref"].partition(".html")[0] for result in results))
        if not answers & set(pages[:3]) or pages[0] == "settings" or pages[0].startswith("api/"):
            wrong[question] = pages[:4]
    assert not wrong


def test_linked_files_of_the_repository_are_shown() -> None:
    links = set(re.findall(r'href="(repository/[\w/]+\.py)\.html"', (SITE / "architecture.html").read_text("utf-8")))
    assert len(links) > 10
    for target in links:
        (code,) = re.findall(r"<pre><code>(.*?)</code></pre>", (SITE / f"{target}.html").read_text("utf-8"), re.DOTALL)
        source = (ROOT / target.removeprefix("repository/")).read_text("utf-8")
        assert "".join(unescape(re.sub(r"<[^>]+>", "", code)).split()) == "".join(source.split())


def test_every_page_of_the_documentation_is_there() -> None:
    assert {page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md")} <= {
        page.relative_to(SITE) for page in pages()
    }


def test_code_in_tables_has_no_backslashes() -> None:
    assert "<code>&lt;|eot_id|&gt;</code>" in (SITE / "projection.html").read_text("utf-8")
