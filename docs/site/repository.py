"""Pages written for a reader of the repository, as pages of the site: a hook of MkDocs.

A link of a page to a file outside of docs/, such as `../nemo_opd/losses/p_kl.py`, is right in the repository. For the
site each such file becomes a page, and links are written anew. So the site needs neither the repository nor a network.
"""

import re
from html import escape
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
REPOSITORY = "repository"
"""Folder of the site for files outside of docs/; `not_in_nav` of mkdocs.yml names it too."""
GENERATED = (f"{DOCS}/api/", f"{DOCS}/settings.md")
"""References whose many headings would come before guides in a search."""
GUIDES = {"start.md", "how_to.md", "data.md", "losses.md", "checkpoints.md", "troubleshooting.md"}
"""Pages of `docs/` that answer first questions, which come first in a search."""
FENCE = re.compile(r"^( *)(```+)[^\n]*\n.*?^\1\2 *$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(\[(?:[^\]\n]|\n(?!\n))*\]\(|^\[[\w-]+\]: )(?!#|\w+:)([^)#\s]+)(#[^)\s]+)?", re.MULTILINE)
"""A link's text, which may go on in the next line, or a definition's name; the target; the place in it."""
CODE = re.compile(r"`[^`\n]+`")
ASSETS = {".png", ".svg"}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for each file outside of docs/ that a page, or the navigation, leads to."""
    waiting = [f"{DOCS}/{file.src_uri}" for file in files.documentation_pages()]
    waiting += [path_of(uri) for uri in re.findall(rf"{REPOSITORY}/[^'\"]+", str(config.nav))]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if files.get_file_from_path(uri_of(path)) is None:
            files.append(generated(path, config))
        if path.endswith(".md") or (ROOT / path).is_dir():
            targets = linked(path) - seen
            waiting += sorted(target for target in targets if not is_of_docs(target))
            seen |= targets
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with links to the site's pages, named by their titles where the text is the name of a file."""
    path = path_of(page.file.src_uri)
    if (ROOT / path).is_file() and not path.endswith(".md"):
        page.meta |= {"search": {"exclude": True}, "hide": ["toc", "navigation"]}
        return code_page(path)
    if not path.startswith(f"{DOCS}/") or path.startswith(GENERATED):
        page.meta.setdefault("search", {"boost": 0.001})
    elif path.removeprefix(f"{DOCS}/") in GUIDES:
        page.meta.setdefault("search", {"boost": 2})

    def link(found: re.Match[str]) -> str:
        before, target, place = found.groups(default="")
        file = resolved(path, target)
        if re.fullmatch(r"\[[\w/.]+\.md\]\(", before):
            before = f"[{title(file)}]("
        return f"{before}{relpath(uri_of(file), PurePosixPath(page.file.src_uri).parent)}{place}"

    def prose(part: str) -> str:
        return CODE.sub(lambda code: code[0].replace(r"\|", "|"), LINK.sub(link, part))

    return "".join(part if fenced else prose(part) for part, fenced in parts(markdown))


def generated(path: str, config: MkDocsConfig) -> File:
    """Return a file of the repository as one of the site. Raises PluginError where it is not there."""
    file = ROOT / path
    if not file.exists():
        raise PluginError(f"a page links to {path}, which is not in the repository")
    if file.suffix in ASSETS:
        return File.generated(config, uri_of(path), abs_src_path=str(file))
    return File.generated(config, uri_of(path), content=text_of(path))


def text_of(path: str) -> str:
    """Return the text of a file, or of a folder the list of its pages."""
    file = ROOT / path
    if not file.is_dir():
        return file.read_text(encoding="utf-8")
    pages = sorted(page.name for page in file.glob("*.md"))
    return f"# {path}\n\n" + "".join(f"* [{name}]({file.name}/{name})\n" for name in pages)


def is_of_docs(path: str) -> bool:
    """Return whether MkDocs itself makes a page of a file; of those in docs/ it leaves out code."""
    return path.startswith(f"{DOCS}/") and not path.endswith(".py")


def uri_of(path: str) -> str:
    """Return where the site has a file or folder of the repository, given by its path from the root."""
    if is_of_docs(path):
        return path.removeprefix(f"{DOCS}/")
    page = "" if PurePosixPath(path).suffix in {".md", *ASSETS} else ".md"
    return f"{REPOSITORY}/{path}{page}"


def path_of(uri: str) -> str:
    """Return the path of what `uri_of` was given."""
    if not uri.startswith(f"{REPOSITORY}/"):
        return f"{DOCS}/{uri}"
    path = uri.removeprefix(f"{REPOSITORY}/")
    return path if (ROOT / path).exists() else path.removesuffix(".md")


def resolved(path: str, target: str) -> str:
    """Return a link's target as a path from the root, given the path of the page that has the link."""
    return normpath(PurePosixPath(path).parent / target)


def linked(path: str) -> set[str]:
    """Return the targets of a page's relative links, as paths from the root."""
    prose = "".join(part for part, fenced in parts(text_of(path)) if not fenced)
    return {resolved(path, found[2]) for found in LINK.finditer(prose)}


def title(path: str) -> str:
    """Return the first heading of a page."""
    found = re.search(r"^# (.+)$", text_of(path), re.MULTILINE)
    return found[1] if found else path


def parts(markdown: str) -> list[tuple[str, bool]]:
    """Return a page in pieces, and whether each is a block of code."""
    pieces, end = [], 0
    for block in FENCE.finditer(markdown):
        pieces += [(markdown[end : block.start()], False), (block[0], True)]
        end = block.end()
    return [*pieces, (markdown[end:], False)]


def code_page(path: str) -> str:
    """Return the Markdown of a page that shows a file."""
    try:
        lexer = get_lexer_for_filename(path)
    except ClassNotFound:
        lexer = TextLexer()
    code = highlight((ROOT / path).read_text(encoding="utf-8"), lexer, HtmlFormatter(nowrap=True))
    return f'# {escape(path)}\n\n<div class="highlight"><pre><code>{code}</code></pre></div>\n'
