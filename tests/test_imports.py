"""Imports go in one direction, and what decides (controller, policy, ...) imports neither torch nor vLLM."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flying_serving"
ORDER = (
    *("deploy", "demo", "cli", "bench", "sim", "server", "engine", "controller", "policy", "predict"),
    *("migration", "worker", "vllm_adapter", "memory", "comm", "config", "layout", "wire", "placement"),
    *("results", "observe", "testing", "workload", "start_error", "validation", "errors", "log"),
)
"""Packages and modules from the top to the bottom: each imports what is below it, and nothing above."""
PURE = (
    "sim",
    "controller",
    "policy",
    "predict",
    "layout",
    "results",
    "observe",
    "server/figures",
    "workload",
    "placement",
)
FORBIDDEN = ("torch", "vllm")
FILES = sorted(PACKAGE.rglob("*.py"))


def _module_name(path: Path) -> str:
    """Return the dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of each import statement of a file, those inside functions and for types too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide where they go"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                is_module = name in MODULES
                yield node.lineno, name if is_module else str(node.module)


MODULES = {_module_name(path) for path in FILES}


def _place(module: str) -> int:
    """Where a module of ours is in ORDER."""
    return ORDER.index(module.split(".")[1])


def _of_ours(path: Path) -> list[tuple[int, str]]:
    return [(line, name) for line, name in _imported(path) if name.startswith("flying_serving.")]


def test_the_order_names_every_package_and_module() -> None:
    found = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert found - {"__init__", "__pycache__", "py"} == set(ORDER)


def test_no_import_goes_up() -> None:
    """Lazy imports and those for types count as well."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in FILES
        if path.parent != PACKAGE or path.stem != "__init__"
        for line, name in _of_ours(path)
        if _place(name) < _place(_module_name(path))
    ]
    assert found == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    """`prepare` raises CycleError, which names the modules of a cycle."""
    graph = {_module_name(path): {name for _, name in _of_ours(path)} for path in FILES}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("package", PURE)
def test_no_import_statement_names_torch_or_vllm(package: str) -> None:
    """No source file names a forbidden module, not even lazily or for typing."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((PACKAGE / package).rglob("*.py"))
        for line, name in _imported(path)
        if name.split(".")[0] in FORBIDDEN
    ]
    assert found == []


@pytest.mark.parametrize("package", PURE)
def test_importing_loads_neither_torch_nor_vllm(package: str) -> None:
    """Importing every module of the package, in a fresh process, loads no forbidden module by any path."""
    modules = [_module_name(path) for path in sorted((PACKAGE / package).rglob("*.py"))]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    loaded = sorted(set({FORBIDDEN!r}) & set(sys.modules))\n"
        "    if loaded:\n"
        "        sys.exit(f'importing {name} loads {loaded}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
