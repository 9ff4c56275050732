"""The deciding half of the package (controller, policy, sim, layout, workload, metrics) never imports torch or vLLM."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flying_serving"
PURE = tuple(
    name for name in ("controller", "policy", "sim", "layout", "workload", "metrics") if (PACKAGE / name).exists()
)
FORBIDDEN = ("torch", "vllm")


def _sources(package: str) -> list[Path]:
    """Return the source files of one pure package, none if it does not exist."""
    return sorted((PACKAGE / package).rglob("*.py"))


def _module_name(path: Path) -> str:
    """Return the dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute module name) of each import statement, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module


@pytest.mark.parametrize("package", PURE)
def test_no_import_statement_names_torch_or_vllm(package: str) -> None:
    """No source file names a forbidden module, not even lazily or for typing."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in _sources(package)
        for line, name in _imported(ast.parse(path.read_text(encoding="utf-8"), str(path)))
        if name.split(".")[0] in FORBIDDEN
    ]
    assert found == []


@pytest.mark.parametrize("package", PURE)
def test_importing_loads_neither_torch_nor_vllm(package: str) -> None:
    """Importing every module of the package, in a fresh process, loads no forbidden module by any path."""
    modules = [_module_name(path) for path in _sources(package)]
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
