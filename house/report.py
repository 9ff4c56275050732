"""`make house`: the figures in words."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from house.budgets import Figure, figures, rooms_of_features
from house.source import (
    PRODUCT,
    ROOT,
    ClassSize,
    Module,
    all_statements,
    class_sizes,
    modules,
    room_of,
    statements,
)
from house.walks import WALKS, Record, load

BIGGEST = 15


def report() -> Iterator[str]:
    """Yield the lines of the report."""
    product = modules(PRODUCT)
    found = {(figure.kind, figure.name): figure for figure in figures()}
    yield from of_statements(product, found["statements", PRODUCT])
    rooms = {name: figure for (kind, name), figure in found.items() if kind == "rooms"}
    yield from of_features(rooms_of_features(product), rooms)
    records = load()
    for walk in WALKS:
        yield from of_walk(walk.heading, records[walk.name], found["walk", walk.name])
    yield from of_classes(class_sizes(product)[:BIGGEST])


def of_statements(product: Sequence[Module], whole: Figure) -> Iterator[str]:
    """Yield statements and files by room, the biggest first."""
    sizes, code, files = Counter[str](), Counter[str](), Counter[str]()
    for module in product:
        room = room_of(module.path)
        sizes[room] += all_statements(module.tree)
        code[room] += statements(module.tree)
        files[room] += 1
    yield f"Statements of {PRODUCT}: {whole.now:,} with docstrings (budget {whole.budget:,}),"
    yield f"{code.total():,} without, in {files.total()} files"
    yield ""
    for room, size in sizes.most_common():
        yield f"{size:8,} {code[room]:8,}   {room:14}{files[room]:4} files"


def of_features(files: dict[str, list[str]], rooms: dict[str, Figure]) -> Iterator[str]:
    """Yield files and rooms of each feature, with the files in each room."""
    budget = next(iter(rooms.values())).budget
    yield from ("", f"Files and rooms of each feature (budget: {budget} rooms)", "")
    for name, paths in files.items():
        by_room = Counter(map(room_of, paths)).most_common()
        where = ", ".join(f"{room} {count}" for room, count in by_room)
        yield f"{name:21}{len(paths):4} /{rooms[name].now:3}   {where}"


def of_walk(heading: str, record: Record, figure: Figure) -> Iterator[str]:
    """Yield the files of a walk in the order in which they were entered."""
    yield from ("", f"{heading}: {len(record.files)} files entered, {figure.now} of them needed")
    yield f"(budget {figure.budget}); statements on the walk, file, functions; * is needed"
    yield ""
    for number, file in enumerate(record.files, start=1):
        mark = "*" if file.is_needed else " "
        gone = "" if (ROOT / PRODUCT / file.path).exists() else " (gone: make house ARGS=--record)"
        names = ", ".join(file.functions)
        yield f"{number:4} {mark}{file.statements:4}  {file.path}{gone}: {names}"
    if record.sometimes:
        yield f"     in some rounds only: {', '.join(record.sometimes)}"


def of_classes(sizes: Iterable[ClassSize]) -> Iterator[str]:
    """Yield the sizes of classes."""
    yield from ("", "Biggest classes: statements, methods, attributes (without bases)", "")
    for size in sizes:
        figures = f"{size.statements:6}{size.methods:5}{size.attributes:5}"
        yield f"{figures}  {size.name}  {size.path}"
