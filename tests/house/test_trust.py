"""What runs code that its input names: pickle between engines, in the server's own directory, and
nothing else.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "flying_serving", ROOT / "flying_deploy", ROOT / "flying_lab")
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml"}
"""Modules whose loaders run what they read; yaml's may."""
CALLS = {"eval", "exec", "compile", "__import__", "recv_pyobj", "execfile", "unsafe_load"}
SETTINGS = {"allow_pickle", "shell", "weights_only"}
"""Arguments that decide whether numpy, subprocess and torch run what they are given."""

# module -> what it pickles, and where that goes: docs/serving.md, *Security*
ALLOWED = {
    "flying_serving/engine/channel.py": "messages of engines, by ipc sockets in the run directory",
    "flying_serving/memory/cuda_ipc.py": "handles of CUDA memory, by files in the run directory",
}


def found(tree: ast.AST) -> Iterator[str]:
    """Yield what in a module can run its input."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                name for alias in node.names if (name := alias.name.split(".")[0]) in PICKLES
            )
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLES:
            yield str(node.module)
        if isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else None
            method = node.func.attr if isinstance(node.func, ast.Attribute) else None
            # of torch's modules, and of re
            if called in CALLS or method in CALLS - {
                "eval",
                "exec",
                "compile",
            }:
                yield f"{called or method}()"
            yield from (word.arg for word in node.keywords if word.arg in SETTINGS)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import yaml.reader",
        "eval(text)",
        "exec(text)",
        "socket.recv_pyobj()",
        "numpy.load(path, allow_pickle=True)",
        "subprocess.run(line, shell=True)",
    ],
)
def test_calls_that_run_their_input_are_found(code: str) -> None:
    assert list(found(ast.parse(code)))
    assert not list(
        found(ast.parse("import json, re; model.eval(); re.compile('x'); json.loads(text)"))
    )


def test_only_messages_between_engines_are_unpickled() -> None:
    """HTTP bodies, traces and settings are JSON, CSV or msgpack, into types that are declared."""
    paths = [path for package in PACKAGES for path in package.rglob("*.py")]
    uses = {path: list(found(ast.parse(path.read_text(encoding="utf-8")))) for path in paths}
    by_module = {str(path.relative_to(ROOT)): what for path, what in uses.items() if what}
    assert by_module == {module: ["pickle"] for module in ALLOWED}
