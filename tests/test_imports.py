"""Rules for imports (docs/architecture.md): packages import lower ones only, and few of them heavy libraries."""

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import nemo_opd
from nemo_opd.extras import EXTRAS, TRAIN

PACKAGE = Path(nemo_opd.__file__).parent
ORDER = (
    "errors types paths progress files rotary",
    "config",
    "extras",
    "teacher_cache",
    "users_code",
    "sandbox",
    "alignment",
    "projection",
    "distributed",
    "kernels",
    "logits",
    "losses",
    "demo",
    "data",
    "aggregation",
    "models",
    "handoff",
    "checkpoint",
    "logging",
    "rewards",
    "rollout",
    "served",
    "evaluation",
    "transplant",
    "workers",
    "cluster",
    "preflight",
    "training",
    "cli integrations",
    "__main__",
)
"""Packages by level, the lowest first: a package may import packages of earlier lines. `nemo_opd/__init__.py`, which
imports its names lazily, is above all of them.
"""
LEVEL = {part: level for level, parts in enumerate(ORDER) for part in parts.split()} | {"": len(ORDER)}
HOME = {"ray": {"cluster"}, "numba": {"alignment", "projection"}, "triton": {"kernels"}}
HOME |= {tracker: {"logging"} for tracker in ("wandb", "mlflow", "trackio")}
"""The only packages that may import a library."""
WITHOUT_TORCH = {*ORDER[0].split(), "config", "extras", "teacher_cache", "sandbox", "alignment"}
LIGHT = ("alignment", "projection", "losses", "logits", "kernels", "integrations.distillation", "integrations.hf")
"""Packages that work without extras."""
OUTSIDE = {"examples", "tools", "tests", "benchmarks"}


@dataclass(frozen=True)
class Import:
    file: Path
    module: str
    at_run_time: bool
    """False under `if TYPE_CHECKING`."""
    with_its_file: bool
    """False in a function."""

    @property
    def importer(self) -> str:
        return part_of(self.file)

    def __str__(self) -> str:
        return f"{self.file.relative_to(PACKAGE.parent)} imports {self.module}"


def part_of(file: Path) -> str:
    """Return the package or module directly under nemo_opd; empty for nemo_opd/__init__.py."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py").removesuffix("__init__")


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


@cache
def import_statements(file: Path) -> list[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    """Return the statements of a file, with `at_run_time` and `with_its_file`."""
    statements, pending = [], [(ast.parse(file.read_text(encoding="utf-8")), True, True)]
    while pending:
        node, at_run_time, with_its_file = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            statements.append((node, at_run_time, at_run_time and with_its_file))
        with_its_file &= not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for_types = node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else ()
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.stmt | ast.ExceptHandler | ast.match_case):
                pending.append((inner, at_run_time and inner not in for_types, with_its_file))
    return statements


def imports_of(file: Path) -> Iterator[Import]:
    for node, at_run_time, with_its_file in import_statements(file):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            assert not node.level, f"{file} has a relative import, which this test does not follow"
            module = node.module or ""
            # `from nemo_opd import data` names a package, `from nemo_opd.data import …` a member.
            modules = [f"{module}.{alias.name}" for alias in node.names] if module == "nemo_opd" else [module]
        yield from (Import(file, name, at_run_time, with_its_file) for name in modules)


@cache
def imports() -> list[Import]:
    """Return all imports of the package. Not a constant: every test process collects this file."""
    return [statement for file in sorted(PACKAGE.rglob("*.py")) for statement in imports_of(file)]


@cache
def own_imports() -> list[Import]:
    return [statement for statement in imports() if statement.module.startswith("nemo_opd.")]


@cache
def by_file() -> dict[str, list[Import]]:
    """Return the imports that run with their file, keyed by module."""
    by_module: dict[str, list[Import]] = defaultdict(list)
    for statement in imports():
        if statement.with_its_file:
            by_module[module_of(statement.file)].append(statement)
    return by_module


def files_loaded_by(modules: list[str]) -> set[str]:
    """Return all modules of the package that importing the given ones loads."""
    loaded, waiting = set(modules), list(modules)
    while waiting:
        name = waiting.pop()
        imported = {statement.module for statement in by_file()[name]} | {name.rpartition(".")[0]} - {""}
        waiting += imported - loaded
        loaded |= imported
    return loaded


def as_lines(imports: list[Import]) -> str:
    return "\n".join(map(str, imports))


def test_the_table_names_every_package() -> None:
    parts = {part_of(file) for file in PACKAGE.rglob("*.py")} - {""}

    assert parts - LEVEL.keys() == set()
    assert len(own_imports()) > 100  # the walk itself works


def test_imports_run_one_way() -> None:
    upward = [
        statement for statement in own_imports() if LEVEL[statement.module.split(".")[1]] > LEVEL[statement.importer]
    ]

    assert not upward, as_lines(upward)


def test_the_package_does_not_import_its_users() -> None:
    wrong = [statement for statement in imports() if statement.module.split(".")[0] in OUTSIDE]

    assert not wrong, as_lines(wrong)


@pytest.mark.parametrize("library", HOME)
def test_a_library_stays_in_its_packages(library: str) -> None:
    importers = [statement for statement in imports() if statement.module.split(".")[0] == library]
    wrong = [statement for statement in importers if statement.importer not in HOME[library]]

    assert importers
    assert not wrong, as_lines(wrong)


def test_config_and_alignment_import_no_torch() -> None:
    wrong = [
        statement
        for statement in imports()
        if statement.at_run_time and statement.module.split(".")[0] == "torch" and statement.importer in WITHOUT_TORCH
    ]

    assert not wrong, as_lines(wrong)


def test_a_run_imports_no_library_of_an_extra() -> None:
    """Bug: a library of an extra at the top of a file that every run imports, so that a base install does not start.

    Follows imports statically; `test_base_install.py` tries the same with a real install.
    """
    starts = [name for name in by_file() if name.split(".")[1:2] in (["cli"], ["training"], ["workers"], ["cluster"])]
    loaded = files_loaded_by(starts)
    wrong = [
        statement
        for name in loaded
        for statement in by_file()[name]
        if statement.module.split(".")[0] in EXTRAS.keys() - {*TRAIN}
    ]

    assert "nemo_opd.rollout.server.client" in loaded
    assert not wrong, as_lines(wrong)


@pytest.mark.world
@pytest.mark.parametrize(
    ("modules", "libraries"),
    [
        (
            "config, config.composition, alignment, preflight.inputs, "
            "cli.settings_verbs, cli.projection, cli.cache, cli.checkpoint",
            ("torch", "transformers", "ray", "datasets"),
        ),
        ("cluster.ray.ray_cluster", ("transformers", "datasets", "numba")),
        ("alignment", ("torch", "transformers", "numba", "pydantic", "hydra")),
    ],
    ids=["settings", "rank", "alignment"],
)
def test_importing_leaves_heavy_libraries_out(modules: str, libraries: tuple[str, ...]) -> None:
    """Catches indirect imports, too: errors of a command line, and ranks, would wait for seconds of imports."""
    imported = ", ".join(f"nemo_opd.{module}" for module in modules.split(", "))
    script = f"import sys, {imported}\nprint([name for name in {libraries} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", LIGHT)
def test_a_light_package_imports_no_library_of_training(module: str) -> None:
    """Follows imports statically: transformers imports some of these libraries if they are installed."""
    loaded = files_loaded_by([f"nemo_opd.{module}"])
    wrong = [
        statement
        for name in loaded
        for statement in by_file()[name]
        if statement.module.split(".")[0] in (*TRAIN, "omegaconf")
    ]

    assert not wrong, as_lines(wrong)


@pytest.mark.world
def test_light_packages_import_without_the_libraries_of_training() -> None:
    """Bug: an import of such a library that static analysis misses. transformers needs httpx2."""
    absent = {*TRAIN, "accelerate", "omegaconf"} - {"httpx2"}
    script = f"""
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *rest: None if name.split(".")[0] in {absent} else find(name, *rest))
import {", ".join(f"nemo_opd.{module}" for module in LIGHT)}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


@pytest.mark.world
def test_a_file_that_shadows_a_package_is_named(tmp_path: Path) -> None:
    """Bug: "No module named 'torch.utils'; 'torch' is not a package", without the user's file of that name."""
    (tmp_path / "torch.py").touch()
    (tmp_path / "script.py").write_text("import nemo_opd")
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True)

    assert done.returncode == 1
    assert f"{tmp_path / 'torch.py'} is imported in place of the package torch; rename it" in done.stderr


def test_losses_know_no_config_but_where_they_are_built() -> None:
    wrong = [
        statement
        for statement in own_imports()
        if statement.importer == "losses"
        and statement.module.startswith("nemo_opd.config")
        and statement.file.name != "term_loss.py"
    ]

    assert not wrong, as_lines(wrong)


def test_no_two_files_import_each_other() -> None:
    """Catches longer circles, too, and imports under TYPE_CHECKING or in a function."""
    modules = {module_of(file): file for file in PACKAGE.rglob("*.py")}
    names = set(modules)
    graph: dict[str, set[str]] = {}
    for importer, file in modules.items():
        targets = {
            target
            for node, *_ in import_statements(file)
            if isinstance(node, ast.ImportFrom) and node.module
            for target in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        }
        # `from package import module` needs the module, not the names that the package re-exports.
        packages = {target.rpartition(".")[0] for target in targets if target in names}
        graph[importer] = (targets & names) - packages - {importer}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_file_names_occur_once() -> None:
    """Catches two files that a search by name or a traceback cannot distinguish."""
    names = Counter(file.name for file in PACKAGE.rglob("*.py"))

    assert {name for name, count in names.items() if count > 1} == {"__init__.py"}
