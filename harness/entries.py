"""How much an object holds: the entries of all containers that it reaches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_CONTAINERS = (dict, list, set, frozenset, tuple, deque)


def entries(root: object) -> int:
    """Count the entries of all dicts, lists, sets, tuples and deques that an object reaches through
    attributes and entries.
    """
    seen: dict[int, object] = {}
    found, left = 0, [root]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, _CODE):
            continue
        seen[id(one)] = one  # keeps it, and so its id
        if isinstance(one, _CONTAINERS):
            found += len(one)
        left += _reached(one)
    return found


def _reached(one: Any) -> Iterator[object]:
    if isinstance(one, Mapping):
        yield from one.keys()
        yield from one.values()
    elif isinstance(one, _CONTAINERS):
        yield from one
    yield from getattr(one, "__dict__", {}).values()
    for kind in type(one).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(one, name):
                yield getattr(one, name)
