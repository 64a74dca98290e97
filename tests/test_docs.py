"""Examples of the documentation run, and its links lead to existing files, sections and symbols."""

import ast
import json
import re
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_opd.config.loss import PKLTerm
from tests import processes
from tests.test_imports import ORDER

pytestmark = pytest.mark.world

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# (\w+\.py)\n")
SYMBOL = re.compile(r"\[`(?![\w./]*\.py`)([\w.]+)`\]\(\.\./([\w/]+\.py)(#L\d+)?\)")
LINK = re.compile(r"(?:\]\(|^\[[\w-]+\]: )([^)#\s]*)(?:#([^)\s]+))?", re.MULTILINE)
"""A link in the text, or the definition of one: `[name]: file.md#place`."""
NAMED, DEFINED = re.compile(r"\]\[([\w-]+)\]"), re.compile(r"^\[([\w-]+)\]: ", re.MULTILINE)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
METHODS = ROOT / "docs" / "methods.md", ROOT / "docs" / "methods_training.md"
REFERENCE = re.compile(r"methods\.md((?:(?:,| and|–)? §[\d.]*\d|–§[\d.]*\d)+)")
"""One or more sections: `methods.md §5.3`, `methods.md §6, §7 and §10`, `methods.md §3–§5`."""
ANCHOR = re.compile(r'<a id="([^"]+)">')


def sections() -> dict[str, list[str]]:
    """Return the Python blocks of each section of extending.md; a block that begins with a file name is that file."""
    _, *parts = re.split(r"^## ", (ROOT / "docs" / "extending.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {part.splitlines()[0]: BLOCK.findall(part) for part in parts}


@pytest.mark.parametrize("section", sections())
def test_a_worked_example_of_extending_runs(section: str, tmp_path: Path) -> None:
    blocks = sections()[section]
    assert blocks
    files = {name[1]: block for block in blocks if (name := FILE.match(block))}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    example = "\n".join(block for block in blocks if block not in files.values())
    assert example.count("assert") >= 1
    (tmp_path / "example.py").write_text(example, encoding="utf-8")
    processes.script(tmp_path / "example.py")


def anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target, place in LINK.findall(text):
        if "://" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        if place and file.suffix == ".md":
            linked = file.read_text(encoding="utf-8")
            assert place in {*map(anchor, HEADING.findall(linked)), *ANCHOR.findall(linked)}, f"{target}#{place}"
    assert set(NAMED.findall(re.sub(r"`[^`]*`", "", text))) == set(DEFINED.findall(text))


def text_of_methods() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in METHODS)


def test_references_to_methods_lead_to_sections() -> None:
    """Bug: a docstring cites a section that has moved, or that is in no file of the repository."""
    numbers = set(re.findall(r"^##+ ([\d.]*\d)", text_of_methods(), re.MULTILINE))
    num_references = 0
    for file in sorted(tracked("*.py", "*.md", "*.yaml")):
        text = (ROOT / file).read_text(encoding="utf-8")
        cited = [section for places in REFERENCE.findall(text) for section in re.findall(r"[\d.]*\d", places)]
        assert set(cited) <= numbers, file
        assert not re.search(r"\b(METHODS|DESIGN) (§|[Nn]otation)", text), file
        num_references += len(cited)
    assert num_references > 100


def test_formulas_of_methods_have_one_number_each() -> None:
    """Bugs: two formulas with one number; a number of another section; a cited formula that does not exist."""
    text = text_of_methods()
    blocks = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    formulas = [number for block in blocks for number in re.findall(r" \((\d+\.\d+)\)", block)]
    assert len(formulas) > 20
    assert len(set(formulas)) == len(formulas)
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        numbers = [
            number for number in formulas if re.search(rf"  +\({re.escape(number)}\)(  |$)", section, re.MULTILINE)
        ]
        assert all(section.startswith(number.split(".")[0] + ".") for number in numbers), numbers
    assert set(re.findall(r"\((\d+\.\d+)\)", text)) <= set(formulas)


def tracked(*patterns: str) -> set[Path]:
    """Return the paths of tracked files and of new files that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    names = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    return {Path(name) for name in names if (ROOT / name).is_file()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_files_define_the_symbols(page: Path) -> None:
    """Bugs: a link to a class that was renamed or moved; a link to a line, which every edit above it moves."""
    for name, file, line in SYMBOL.findall(page.read_text(encoding="utf-8")):
        body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        for part in name.split("."):
            nodes = [node for node in body if getattr(node, "name", None) == part]
            assert nodes, f"{file} does not define {name}"
            body = getattr(nodes[0], "body", [])
        assert not line, f"link {name} without a line"


def test_the_page_of_losses_advises_what_the_help_and_a_run_advise() -> None:
    """Bug: each page gives different advice."""
    page = " ".join((ROOT / "docs" / "losses.md").read_text(encoding="utf-8").replace("`", "").split())
    assert f"p_kl {PKLTerm.take}" in page


def test_the_order_of_imports_is_that_of_the_test() -> None:
    (order,) = re.findall(r"```\n(errors .*?)```", (ROOT / "docs" / "architecture.md").read_text("utf-8"), re.DOTALL)
    assert tuple(level.strip() for level in " ".join(order.split()).split("·")) == ORDER


def shown_tree() -> dict[str, set[str]]:
    """Return the names that "The tree" in docs/architecture.md lists, keyed by folder."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (table, block) = re.findall(r"^## The tree\n\n(.*?)```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    cells = re.findall(r"^\| (`[^|]+`) \|", table, re.MULTILINE)
    listed = {"nemo_opd": set(re.findall(r"`(\w+(?:\.py)?)/?`", " ".join(cells)))}
    folders: list[str] = []
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        if opened := re.match(r" *(\w+)/(?: |$)", line):
            folders = [*folders[:depth], opened[1]]
            listed.setdefault("/".join(folders[:-1]), set()).add(opened[1])
        elif depth < 4:
            folders = folders[:depth]
        listed.setdefault("/".join(folders), set()).update(re.findall(r"\w+\.(?:py|sh|txt)", line))
    return listed


def test_the_tree_has_every_folder_and_every_tool() -> None:
    """Bugs: a package or script without a line; a line for one that was removed."""
    listed = shown_tree()
    files = tracked()
    folders = {file.parts[0] for file in files if len(file.parts) > 1 and not file.parts[0].startswith(".")}
    assert listed[""] == folders
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Tests and the tree")[2]
    assert set(re.findall(r"^(\w+)/ ", readme, re.MULTILINE)) == folders
    package = {file.parts[1] for file in files if file.parts[0] == "nemo_opd"}
    package -= {"__init__.py", "__main__.py", "py.typed"}
    assert listed["nemo_opd"] == package
    tools = [file for file in files if file.parts[0] == "tools"]
    for folder in {file.parent for file in tools}:
        names = {file.name for file in tools if file.parent == folder}
        names |= {file.parts[1] for file in tools if folder == Path("tools") and len(file.parts) > 2}
        assert listed[str(folder)] == names, folder


GPU_RESULTS = ROOT / "benchmarks" / "results" / "gpu"
RECIPE = "llama_1b ← llama_3b + qwen_4b, 2,048 tokens, p_kl"
"""The step whose speed and MFU README and docs/performance.md report."""


def gpu_records() -> Iterator[tuple[tuple[str, int], dict[str, Any]]]:
    """Yield measurements on GPUs, each with a sort key: its date and its commit's time.

    Records are lines of losses_floor.py and summaries of steps; gpu_check.json has both as values of its parts.
    """
    for file in GPU_RESULTS.rglob("gpu_check.json"):
        check = json.loads(file.read_text(encoding="utf-8"))
        values = [value for part in check["parts"].values() for value in part["values"]]
        yield from ((order_of(check["facts"]), value) for value in values)
    for file in GPU_RESULTS.rglob("losses_floor.jsonl"):
        lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        yield from ((order_of(line), line) for line in lines)
    for file in GPU_RESULTS.rglob("step.json"):
        steps = json.loads(file.read_text(encoding="utf-8"))
        for case in steps["cases"]:
            seconds, flops = statistics.median(case["ours"]["seconds"]), case["flops"].values()
            figures = {
                "tokens/s": sum(case["work"]["student_lengths"]) / seconds,
                "MFU": sum(sum(side.values()) for side in flops) / (seconds * case["devices"] * steps["peak"]),
            }
            name = f"{case['student']} ← {case['teacher']}, {case['length']:,} tokens, {case['loss']}"
            yield order_of(steps["facts"]), {"case": name, "nemo_opd": figures}


def order_of(facts: dict[str, str]) -> tuple[str, int]:
    """Return the date and the time of the commit, 0 if the repository does not have it."""
    command = ["git", "log", "-1", "--format=%ct", facts["commit"].removesuffix("-dirty")]
    seconds = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    return facts["date"], int(seconds or 0)


def test_figures_of_a_gpu_are_the_newest_measured() -> None:
    """Bugs: README and docs/performance.md lack the newest measurement, or have a typo in it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    performance = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    steps = [(order, record["nemo_opd"]) for order, record in gpu_records() if record.get("case") == RECIPE]
    step = sorted(steps, key=lambda pair: pair[0])[-1][1]  # the last of a check is on Ray
    for text, pattern in (
        (readme, r"reads ([\d,]+) tokens a second at an MFU of (0\.\d+)"),
        (performance, r"\| ([\d,]+) tokens/s, MFU (0\.\d+) \|\n"),
    ):
        tokens, mfu = re.findall(pattern, text)[0]
        assert float(tokens.replace(",", "")) == pytest.approx(step["tokens/s"], rel=0.005)
        assert float(mfu) == pytest.approx(step["MFU"], abs=0.005)

    budget, ratio = "budget of a block, times the default", "losses / products"
    losses = [(order, record) for order, record in gpu_records() if record.get(budget) == 1]
    newest = max(losses, key=lambda pair: (pair[0], pair[1]["positions"]))[1]
    (figures,) = re.findall(r"the heads' products, ([\d,]+) positions \|.*\| (\d\.\d+) times \|\n", performance)
    assert figures == (f"{newest['positions']:,}", f"{newest[ratio]:.2f}")
