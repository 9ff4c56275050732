"""Size budget of the package: a file fits in a sitting, a function on a screen."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flying_serving"
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 50

# "path" or "path:qualified.function" -> why it is larger. Keep this short; an entry no longer needed is an error.
EXCEPTIONS: dict[str, str] = {}


def _functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield (qualified name, lines from `def` to the end) of each function below `node`."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _functions(child, prefix)
            continue
        name = f"{prefix}{child.name}"
        if not isinstance(child, ast.ClassDef):
            assert child.end_lineno is not None
            yield name, child.end_lineno - child.lineno + 1
        yield from _functions(child, f"{name}.")


def _over_budget() -> dict[str, str]:
    """Return each file and function over budget, with its size in words."""
    over: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(ROOT).as_posix()
        lines = len(text.splitlines())
        if lines > MAX_FILE_LINES:
            over[name] = f"{lines} lines, at most {MAX_FILE_LINES}"
        for function, size in _functions(ast.parse(text, name)):
            if size > MAX_FUNCTION_LINES:
                over[f"{name}:{function}"] = f"{size} lines, at most {MAX_FUNCTION_LINES}"
    return over


def test_files_and_functions_are_within_budget() -> None:
    """Nothing is over budget but what EXCEPTIONS names."""
    over = {name: size for name, size in _over_budget().items() if name not in EXCEPTIONS}
    if over:
        pytest.fail("\n".join(f"{name}: {size}" for name, size in over.items()))


def test_exceptions_are_needed() -> None:
    """Every named exception is still over budget."""
    assert sorted(set(EXCEPTIONS) - set(_over_budget())) == []
