"""The source tree as data: modules, definitions, statements and classes."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = "flying_serving"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@dataclass(frozen=True)
class Module:
    """A source file: its dotted name, its path from the root, and its tree."""

    name: str
    path: str
    tree: ast.Module


def modules(folder: str) -> list[Module]:
    """Return the modules of a folder of the repository, in the order of their paths."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        relative = path.relative_to(ROOT)
        name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        found.append(Module(name, relative.as_posix(), tree))
    return found


def room_of(path: str) -> str:
    """Return the top package of a file of the product; its modules at the top are one room."""
    parts = Path(path).parts
    return parts[1] if len(parts) > 2 else "(top)"


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Yield (qualified name, node) of each function and class below `node`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield f"{prefix}{child.name}", child
            yield from definitions(child, f"{prefix}{child.name}.")
        else:
            yield from definitions(child, prefix)


def is_docstring(node: ast.AST) -> bool:
    """Return whether a node is a string that stands alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def statements(tree: ast.AST) -> int:
    """Count the statements below a node, those of nested definitions included, docstrings not."""
    below = (node for node in ast.walk(tree) if node is not tree and isinstance(node, ast.stmt))
    return sum(not is_docstring(node) for node in below)


def all_statements(tree: ast.AST) -> int:
    """Count the statements below a node with the docstrings, which are statements of their own."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree) if node is not tree)


def functions(module: Module) -> dict[str, int]:
    """Return the statements of each function of a module, by its qualified name."""
    return {
        name: statements(node)
        for name, node in definitions(module.tree)
        if isinstance(node, Function)
    }


class Classes:
    """The classes of some modules, by (module, name), each with its bases among them."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self._nodes: dict[tuple[str, str], ast.ClassDef] = {}
        self._names: dict[str, dict[str, tuple[str, str]]] = {}
        for module in modules:
            names: dict[str, tuple[str, str]] = {}
            self._names[module.name] = names
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ImportFrom) and node.module is not None:
                    names |= {a.asname or a.name: (node.module, a.name) for a in node.names}
                elif isinstance(node, ast.ClassDef):
                    self._nodes[module.name, node.name] = node
                    names[node.name] = (module.name, node.name)

    def statements(self, module: str, name: str) -> int:
        """Count the statements of a class and of its bases; 0 for a class of another project."""
        node = self._nodes.get((module, name))
        if node is None:
            return 0
        bases = [self._base(module, base) for base in node.bases]
        inherited = [self.statements(*base) for base in bases if base not in (None, (module, name))]
        return statements(node) + sum(inherited)

    def _base(self, module: str, base: ast.expr) -> tuple[str, str] | None:
        """The class behind a base: `Base`, `Base[T]`; `package.Base` is of another project."""
        if isinstance(base, ast.Subscript):
            return self._base(module, base.value)
        return self._names[module].get(base.id) if isinstance(base, ast.Name) else None


@dataclass(frozen=True)
class ClassSize:
    """The size of a class without its bases.

    `attributes`: names that its body declares or that its methods assign to `self`.
    """

    path: str
    name: str
    statements: int
    methods: int
    attributes: int


def class_sizes(found: Iterable[Module]) -> list[ClassSize]:
    """Return the sizes of all classes, those with the most statements first."""
    sizes = [
        ClassSize(module.path, name, statements(node), _methods(node), len(_attributes(node)))
        for module in found
        for name, node in definitions(module.tree)
        if isinstance(node, ast.ClassDef)
    ]
    return sorted(sizes, key=lambda size: (-size.statements, size.path, size.name))


def _methods(node: ast.ClassDef) -> int:
    return sum(isinstance(child, Function) for child in node.body)


def _attributes(node: ast.ClassDef) -> set[str]:
    declared = {
        name.id
        for child in node.body
        if isinstance(child, ast.AnnAssign | ast.Assign)
        for name in ast.walk(child)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    }
    assigned = {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }
    return declared | assigned
