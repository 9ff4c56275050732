"""Definitions and sizes of a source file."""

import ast

from house.source import Module, class_sizes, functions, room_of, statements

SOURCE = '''
"""Of the module."""

class Box:
    """Of the class."""

    lid: str
    LIMIT = 3

    def __init__(self, side):
        self.side = side
        self.area = side * side

    def grow(self):
        """Of the method."""
        def twice():
            return 2 * self.side
        self.side = twice()
        other.side = 1


def outside():
    pass
'''
MODULE = Module("box", "flying_serving/store/box.py", ast.parse(SOURCE))


def test_statements_are_counted_with_those_inside_and_without_docstrings() -> None:
    assert statements(MODULE.tree) == 13
    assert functions(MODULE) == {
        "Box.__init__": 2,
        "Box.grow": 4,
        "Box.grow.twice": 1,
        "outside": 1,
    }


def test_class_has_methods_and_attributes_of_its_own() -> None:
    (size,) = class_sizes([MODULE])
    assert (size.path, size.name) == (MODULE.path, "Box")
    assert (size.statements, size.methods, size.attributes) == (10, 2, 4)


def test_room_is_the_top_package() -> None:
    assert room_of(MODULE.path) == "store"
    assert room_of("flying_serving/store/shelf/cup.py") == "store"
    assert room_of("flying_serving/config.py") == room_of("flying_serving/wire.py") == "(top)"
