"""Which files of the product know a feature: those with one of its words in a name or string."""

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from house.source import Definition, Module, is_docstring

TABLE = Path(__file__).with_name("features.toml")
_HUMP = re.compile(r"([a-z0-9])([A-Z][a-z])")


def features() -> dict[str, list[str]]:
    """Return the words of each feature, as the table declares them."""
    return dict(tomllib.loads(TABLE.read_text(encoding="utf-8")))


def names_of(module: Module) -> str:
    """Return all names of a module and its strings, a line each, as the table's words see them."""
    path = Path(module.path).with_suffix("").as_posix()
    names = {path, *_names(module.tree)}
    return "\n".join(sorted(_HUMP.sub(r"\1_\2", name).lower() for name in names))


def knows(names: str, word: str) -> bool:
    """Return whether one of the names has a word."""
    return re.search(rf"(?<![a-z])(?:{word})", names) is not None


def files_of(words: Iterable[str], names: Mapping[str, str]) -> list[str]:
    """Return the files that know a feature; `names`: those of each file."""
    words = list(words)
    return [path for path, text in names.items() if any(knows(text, word) for word in words)]


def _names(node: ast.AST) -> Iterator[str]:
    """Yield names and strings below a node, without docstrings."""
    for child in ast.iter_child_nodes(node):
        if is_docstring(child):
            continue
        match child:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.alias(name=name, asname=other):
                yield from filter(None, (name, other))
            case ast.ImportFrom(module=str(name)):
                yield name
            case ast.Constant(value=str(text)):
                yield text
            case _ if isinstance(child, Definition):
                yield child.name
        yield from _names(child)
