"""The rooms of the API server's part import in one direction, from vLLM's way in down to the
figures.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

SERVER = Path(__file__).parents[2] / "flying_serving" / "server"
PREFIX = "flying_serving.server."
ORDER = (
    *("plugin", "patches", "http", "client", "clock", "engines", "metrics", "shell"),
    *("start", "requests", "calls", "figures", "engine_record", "own_thread"),
)
"""Rooms and modules beside them, from the top to the bottom: each imports what is below it."""


def room_of(path: Path) -> str:
    """Return the room, or the module beside the rooms, of a source file."""
    return path.relative_to(SERVER).with_suffix("").parts[0]


def imported(path: Path) -> Iterator[str]:
    """Yield the rooms that a source file imports from, inside functions and for types too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(PREFIX):
            for alias in node.names:
                yield f"{node.module}.{alias.name}".removeprefix(PREFIX).split(".")[0]


def test_the_order_names_every_room() -> None:
    rooms = {room_of(path) for path in SERVER.rglob("*.py")} - {"__init__"}
    assert rooms == set(ORDER)


def test_no_import_goes_up_from_room_to_room() -> None:
    upward = [
        f"{path.relative_to(SERVER)} imports {room}"
        for path in SERVER.rglob("*.py")
        if path.name != "__init__.py"
        for room in imported(path)
        if ORDER.index(room) < ORDER.index(room_of(path))
    ]
    assert upward == []
