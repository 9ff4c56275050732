"""Imports go in one direction, and what decides (controller, policy, ...) imports neither torch nor
vLLM.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from flying_serving.cli.lab import LIBRARIES

ROOT = Path(__file__).parents[2]
LABORATORY = (
    *("demo", "cli", "bench", "emulation", "sim", "results", "workload"),
    *("server_process", "signals", "sse", "tiny_models", "errors"),
)
DEPLOYMENT = (
    *("vllm_router", "ray", "own_node", "passing", "ray_args", "scaling"),
    *("nodes", "serve_args", "child", "ports"),
)
PRODUCT = (
    *("cli", "server", "engine", "migration", "worker", "weights", "vllm_adapter"),
    *("controller", "memory", "comm", "config", "slo"),
    *("policy", "scheduling", "predict", "wire", "parallelism", "layout", "placement"),
    *("observe", "start_error", "validation", "errors", "phase", "log", "version"),
)
ORDER = {"flying_lab": LABORATORY, "flying_deploy": DEPLOYMENT, "flying_serving": PRODUCT}
"""Packages, and what each holds, from the top to the bottom: each imports what is below it, and
nothing above.
"""
FLOORS = [(package, part) for package, parts in ORDER.items() for part in parts]
NEEDED_FROM_PRODUCT = {
    *("flying_serving.config", "flying_serving.errors", "flying_serving.validation"),
    "flying_serving.layout.groups",
    *("flying_serving.server.http.access", "flying_serving.server.http.error_body"),
    *("flying_serving.placement.plan", "flying_serving.placement.topology"),
    "flying_serving.worker.parent",
}
"""What `flying_deploy` imports of the product. It starts nodes by their command line."""
NEEDED_FROM_DEPLOYMENT = {"flying_deploy.ports", "flying_deploy.serve_args"}
"""What the laboratory imports to start servers."""
PURE = (
    "flying_lab/sim",
    "flying_lab/results",
    "flying_lab/workload",
    "flying_serving/controller",
    "flying_serving/policy",
    "flying_serving/scheduling",
    "flying_serving/predict",
    "flying_serving/layout",
    "flying_serving/observe",
    "flying_serving/server/figures",
    "flying_serving/placement",
)
SUITES = ("unit", "with_vllm", "smoke", "deep")
"""Suites of tests, the quickest first. Their helpers are in the quickest that needs them."""
FORBIDDEN = ("torch", "vllm")
ENGINE_ROOMS = tuple(
    f"flying_serving.{room}" for room in ("engine", "worker", "weights", "vllm_adapter")
)
"""Rooms of an engine process, which the simulator models and does not import."""
LAB_COMMANDS = "flying_serving/cli/lab.py"
"""The table of the laboratory's commands, which imports one when it is called."""
FILES = [path for package in ORDER for path in sorted((ROOT / package).rglob("*.py"))]


def _module_name(path: Path) -> str:
    """Return the dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of each import statement of a file, those inside functions and for types
    too.
    """
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


def _floor(module: str) -> int:
    """Where a module of ours is in FLOORS; a package itself is above all that it holds."""
    package, _, rest = module.partition(".")
    return FLOORS.index((package, rest.split(".")[0] if rest else ORDER[package][0]))


def _of_ours(path: Path) -> list[tuple[int, str]]:
    return [(line, name) for line, name in _imported(path) if name.split(".")[0] in ORDER]


@pytest.mark.parametrize("package", ORDER)
def test_the_order_names_every_package_and_module(package: str) -> None:
    found = {
        path.stem for path in (ROOT / package).iterdir() if path.is_dir() or path.suffix == ".py"
    }
    assert found - {"__init__", "__pycache__", "py"} == set(ORDER[package])


def test_no_import_goes_up() -> None:
    """Lazy imports and those for types count as well."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in FILES
        if path.parent.parent != ROOT or path.stem != "__init__"
        for line, name in _of_ours(path)
        if _floor(name) < _floor(_module_name(path))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("package", "below", "needed"),
    [
        ("flying_deploy", "flying_serving", NEEDED_FROM_PRODUCT),
        ("flying_lab", "flying_deploy", NEEDED_FROM_DEPLOYMENT),
    ],
)
def test_what_a_package_needs_of_one_below_is_listed(
    package: str, below: str, needed: set[str]
) -> None:
    imported = {
        name
        for path in (ROOT / package).rglob("*.py")
        for _, name in _of_ours(path)
        if name.startswith(f"{below}.")
    }
    assert imported == needed


def test_no_module_imports_itself_by_way_of_others() -> None:
    """`prepare` raises CycleError, which names the modules of a cycle."""
    graph = {_module_name(path): {name for _, name in _of_ours(path)} for path in FILES}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    ("folder", "others"),
    [
        ("flying_serving", {"harness", "tests", "benchmarks", "experiments", "zoo", "house"}),
        ("flying_deploy", {"harness", "tests", "benchmarks", "experiments", "zoo", "house"}),
        ("flying_lab", {"harness", "tests", "benchmarks", "experiments", "zoo", "house"}),
        ("harness", {"tests", "benchmarks", "experiments", "zoo", "house"}),
        ("benchmarks", {"tests", "house"}),
        ("house", {"tests", "benchmarks", "experiments", "zoo"}),
        ("tests", {"benchmarks"}),
    ],
)
def test_no_import_names_a_folder_that_stands_above(folder: str, others: set[str]) -> None:
    """Only the tests of benchmarks import benchmarks; neither benchmarks nor the harness import a
    test.
    """
    naming = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.parent.name != "benchmarks"
        for line, name in _imported(path)
        if name.split(".")[0] in others
    ]
    assert naming == []


@pytest.mark.parametrize("lower", range(len(SUITES)))
def test_no_suite_imports_one_that_takes_longer(lower: int) -> None:
    naming = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "tests" / SUITES[lower]).rglob("*.py"))
        for line, name in _imported(path)
        if name.startswith(tuple(f"tests.{suite}." for suite in SUITES[lower + 1 :]))
    ]
    assert naming == []


@pytest.mark.parametrize("package", PURE)
def test_no_import_statement_names_torch_or_vllm(package: str) -> None:
    """No source file names a forbidden module, not even lazily or for typing."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, name in _imported(path)
        if name.split(".")[0] in FORBIDDEN
    ]
    assert found == []


def test_the_laboratory_is_named_by_one_table() -> None:
    """Neither an import nor a string of the product names it elsewhere."""
    product = ROOT / "flying_serving"
    naming = [
        path.relative_to(ROOT).as_posix()
        for path in sorted(product.rglob("*.py"))
        if "flying_lab" in path.read_text(encoding="utf-8")
    ]
    assert naming == [LAB_COMMANDS]


def test_a_server_loads_neither_deployment_nor_laboratory() -> None:
    above = {"flying_deploy", "flying_lab", *LIBRARIES}
    code = f"import sys, flying_serving.cli.serve; print(*{above!r} & set(sys.modules))"
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_simulator_loads_no_room_of_an_engine() -> None:
    """Importing every module of the simulator, in a fresh process, loads none of these rooms by any
    path.
    """
    modules = [_module_name(path) for path in sorted((ROOT / "flying_lab" / "sim").rglob("*.py"))]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"print(*(name for name in sys.modules if name.startswith({ENGINE_ROOMS!r})))\n"
    )
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("package", PURE)
def test_importing_loads_neither_torch_nor_vllm(package: str) -> None:
    """Importing every module of the package, in a fresh process, loads no forbidden module by any
    path.
    """
    modules = [_module_name(path) for path in sorted((ROOT / package).rglob("*.py"))]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    loaded = sorted(set({FORBIDDEN!r}) & set(sys.modules))\n"
        "    if loaded:\n"
        "        sys.exit(f'importing {name} loads {loaded}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
