"""Size budget of both packages: a file fits in a sitting, a function on a screen, a test's name in a line."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import quantiles

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("flying_serving", "flying_lab")
MAX_FILE_LINES = 300
MAX_CLASS_LINES = 200
MAX_FUNCTION_LINES = 50
MAX_P90_FUNCTION_LINES = 20
MAX_PARAMETERS = 6
MAX_CONSTRUCTOR_PARAMETERS = 8
MAX_TEST_NAME = 70

# "path" or "path:qualified.name" -> why it is larger. Keep this short; an entry no longer needed is an error.
EXCEPTIONS: dict[str, str] = {
    "flying_serving/server/patches.py:make_client": "the signature of vLLM, with its defaults",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


def _definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Yield (qualified name, node) of each function and class below `node`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield f"{prefix}{child.name}", child
            yield from _definitions(child, f"{prefix}{child.name}.")
        else:
            yield from _definitions(child, prefix)


def _lines(node: Definition) -> int:
    """Lines from `def` or `class` to the end."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _parameters(function: Function) -> int:
    """How many parameters a caller sees: without self and cls, *args and **kwargs."""
    names = [p.arg for p in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def _sizes(node: Definition) -> Iterator[tuple[int, int, str]]:
    """Yield (size, budget, what is counted)."""
    if isinstance(node, ast.ClassDef):
        yield _lines(node), MAX_CLASS_LINES, "lines"
    else:
        yield _lines(node), MAX_FUNCTION_LINES, "lines"
        most = MAX_CONSTRUCTOR_PARAMETERS if node.name == "__init__" else MAX_PARAMETERS
        yield _parameters(node), most, "parameters"


def _sources() -> list[Path]:
    """Return the source files of both packages, sorted within each."""
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def _over_budget() -> dict[str, str]:
    """Return each file, class and function over budget, with its size in words."""
    over: dict[str, str] = {}
    for path in _sources():
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(ROOT).as_posix()
        lines = len(text.splitlines())
        if lines > MAX_FILE_LINES:
            over[name] = f"{lines} lines, at most {MAX_FILE_LINES}"
        for qualified, node in _definitions(ast.parse(text, name)):
            for size, most, what in _sizes(node):
                if size > most:
                    over[f"{name}:{qualified}"] = f"{size} {what}, at most {most}"
    return over


def _all_definitions(paths: Iterable[Path]) -> Iterator[tuple[Path, Definition]]:
    for path in paths:
        yield from ((path, node) for _, node in _definitions(ast.parse(path.read_text(encoding="utf-8"))))


def test_everything_is_within_budget() -> None:
    over = {name: size for name, size in _over_budget().items() if name not in EXCEPTIONS}
    if over:
        pytest.fail("\n".join(f"{name}: {size}" for name, size in over.items()))


def test_exceptions_are_needed() -> None:
    assert sorted(set(EXCEPTIONS) - set(_over_budget())) == []


def test_nine_in_ten_functions_are_short() -> None:
    lines = [_lines(node) for _, node in _all_definitions(_sources()) if isinstance(node, Function)]
    assert quantiles(lines, n=10)[-1] <= MAX_P90_FUNCTION_LINES


def test_names_of_tests_fit_in_a_line() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}: {len(node.name)} characters"
        for path, node in _all_definitions(sorted((ROOT / "tests").rglob("*.py")))
        if node.name.startswith("test_") and len(node.name) > MAX_TEST_NAME
    ]
    assert not long, "\n".join(long)
