"""The tests of a source file are found by its name: `policy/ranking.py` has `test_ranking*.py` in
`policy/` of a suite. `house/tested_by.toml` lists what is tested elsewhere.
"""

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from house.source import PRODUCT, ROOT, Function, Module, definitions, is_docstring, modules

TABLE = "house/tested_by.toml"
FEW_STATEMENTS = 15
"""In functions: a file with no more mostly declares, and needs no test of its name."""
UNIT_SUITES = ("unit", "with_vllm")
SOURCES = {module.path: module for module in modules(PRODUCT)}
TESTS = sorted(ROOT.glob("tests/*/**/test_*.py"))
TESTED_BY: dict[str, str] = tomllib.loads((ROOT / TABLE).read_text(encoding="utf-8"))


def _room(path: str | Path) -> str:
    """Return the folder of a source file below the product, or of a test below its suite."""
    parts = Path(path).parts
    return "/".join(parts[1 if parts[0] == PRODUCT else 2 : -1])


def _is_of(test: Path, source: str) -> bool:
    """Return whether a test has the name of a source file, and is in its room."""
    begin = f"test_{Path(source).stem}"
    has_name = test.stem == begin or test.stem.startswith(f"{begin}_")
    return has_name and _room(test.relative_to(ROOT)) == _room(source)


def _has_tests(source: str) -> bool:
    return any(_is_of(test, source) for test in TESTS)


def _in_functions(module: Module) -> int:
    """Count the statements in functions of a file."""
    functions = [node for _, node in definitions(module.tree) if isinstance(node, Function)]
    below = {child for node in functions for child in ast.walk(node) if child is not node}
    return sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in below)


def _path(name: str) -> Path:
    """Return the file of a dotted name."""
    path = ROOT / name.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _named(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that a file imports, and what it imports from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def _imported(name: str) -> frozenset[str]:
    """Return the files of the product and of tests that a file imports, by their dotted names."""
    names = _named(ast.parse(_path(name).read_text(encoding="utf-8")))
    ours = (found for found in names if found.startswith((f"{PRODUCT}.", "tests.")))
    return frozenset(found for found in ours if _path(found).is_file())


def _reached(test: str) -> set[str]:
    """Return what a test imports itself or by helpers of tests, and what these files import."""
    helpers, new = {test}, {test}
    while new:
        new = {name for helper in new for name in _imported(helper) if name.startswith("tests.")}
        new -= helpers
        helpers |= new
    direct = {name for helper in helpers for name in _imported(helper)}
    return direct.union(*(_imported(name) for name in direct))


def test_every_file_that_does_something_has_a_test_of_its_name() -> None:
    without = [
        path
        for path, module in SOURCES.items()
        if Path(path).stem != "__init__" and _in_functions(module) > FEW_STATEMENTS
        if not _has_tests(path) and path.removeprefix(f"{PRODUCT}/") not in TESTED_BY
    ]
    assert without == [], f"name a test after each, or add a row to {TABLE}"


@pytest.mark.parametrize(("source", "test"), TESTED_BY.items(), ids=TESTED_BY)
def test_file_is_tested_where_the_table_says(source: str, test: str) -> None:
    path = f"{PRODUCT}/{source}"
    assert not _has_tests(path), "the row is not needed"
    file = ROOT / "tests" / test
    assert file in TESTS
    name = f"tests.{test.removesuffix('.py').replace('/', '.')}"
    is_named = source in file.read_text(encoding="utf-8")  # where a whole server is started
    assert is_named or SOURCES[path].name in _reached(name), "the test neither imports nor names it"


def test_every_unit_test_has_the_name_of_a_file_of_its_room() -> None:
    rooms = {_room(path).split("/")[0] for path in SOURCES}
    nameless = [
        test.relative_to(ROOT).as_posix()
        for test in TESTS
        if test.relative_to(ROOT / "tests").parts[0] in UNIT_SUITES
        if _room(test.relative_to(ROOT)).split("/")[0] in rooms
        if not any(_is_of(test, path) for path in SOURCES)
        if test.relative_to(ROOT / "tests").as_posix() not in TESTED_BY.values()
    ]
    assert nameless == [], "begin the name with that of the file that it tests"
