"""The edits of a source file: in each a function loses or changes one operator, term, condition,
number or statement.

Left alone are types, decorators, texts, what errors say, what is logged, and constants outside of
functions, which are settings.
"""

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

SWAPPED: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitOr: (ast.BitAnd,),
    ast.BitAnd: (ast.BitOr,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
EITHER_ALONE = (ast.Add, ast.Mult, ast.BitOr, ast.BitAnd)
"""Of another operator's operands, only the first can stand alone."""
UNTOUCHED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Global)
NOT_CODE = {"annotation", "returns", "decorator_list", "type_params", "bases"}
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Edit:
    """One edit. `number`: of equal edits in the function. `start`, `end`: bytes of the file."""

    path: str
    function: str
    line: int
    before: str
    after: str
    start: int
    end: int
    number: int = 0

    @property
    def name(self) -> str:
        """The edit, whatever else of the file changes."""
        again = f" ({self.number + 1})" if self.number else ""
        return f"{self.path}:{self.function}: {self.before} -> {self.after}{again}"

    def applied(self, source: bytes) -> bytes:
        """Return the source with the edit."""
        return source[: self.start] + self.after.encode() + source[self.end :]


def edits_of(path: str, source: bytes) -> list[Edit]:
    """Return all edits of a file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Edit] = []
    seen: Counter[str] = Counter()
    for function, node, after in _in_functions(ast.parse(source), ()):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        edit = Edit(path, function, node.lineno, ast.unparse(node), after, start, end)
        found.append(replace(edit, number=seen[edit.name]))
        seen[edit.name] += 1
    return found


def _in_functions(node: ast.AST, outer: tuple[str, ...]) -> Iterator[tuple[str, Any, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            name = ".".join((*outer, child.name))
            yield from ((name, *edit) for edit in _below(child))
        elif isinstance(child, ast.ClassDef):
            yield from _in_functions(child, (*outer, child.name))


def _below(node: ast.AST) -> Iterator[tuple[Any, str]]:
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or field in NOT_CODE or _is_untouched(child):
                continue
            yield from ((child, after) for after in _edited(child))
            if field == "test" or field == "ifs":
                yield from ((child, after) for after in _negated(child))
            yield from _below(child)


def _is_untouched(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        is_log = ast.unparse(node).startswith("logger.")
        return is_log or isinstance(node.value, ast.Constant)
    return isinstance(node, UNTOUCHED)


def _with(node: ast.AST, **changed: Any) -> str:
    other = copy.copy(node)
    for field, value in changed.items():
        setattr(other, field, value)
    text = ast.unparse(other)
    return f"({text})" if isinstance(node, ast.expr) else text


def _negated(node: ast.AST) -> Iterator[str]:
    """A comparison and a `not` have their opposite among the other edits."""
    if not isinstance(node, ast.Compare | ast.UnaryOp):
        yield f"(not ({ast.unparse(node)}))"


def _edited(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Compare(ops=ops):
            for place, op in enumerate(ops):
                for other in SWAPPED[type(op)]:
                    yield _with(node, ops=[*ops[:place], other(), *ops[place + 1 :]])
        case ast.BinOp(left=left, op=op, right=right):
            yield from (_with(node, op=other()) for other in SWAPPED.get(type(op), ()))
            yield _with(left)
            if isinstance(op, EITHER_ALONE):
                yield _with(right)
        case ast.BoolOp(op=op, values=values):
            yield from (_with(node, op=other()) for other in SWAPPED[type(op)])
            for place in range(len(values)):
                rest = [*values[:place], *values[place + 1 :]]
                yield _with(rest[0]) if len(rest) == 1 else _with(node, values=rest)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield _with(operand)
        case ast.IfExp(body=body, orelse=orelse):
            yield _with(body)
            yield _with(orelse)
        case ast.Constant(value=bool() as value):
            yield repr(not value)
        case ast.Constant(value=int() | float() as value):
            yield repr(value + 1)
        case ast.Name(id=name) if name in NAMES:
            yield NAMES[name]
        case ast.AugAssign(op=op):
            yield from (_with(node, op=other()) for other in SWAPPED.get(type(op), ()))
        case ast.Expr(value=ast.Call()) | ast.Delete():
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"
        case ast.Continue():
            yield "break"
        case ast.Break():
            yield "pass"
