"""Edits: what of a function changes, and what is left alone."""

import pytest

from mutants.edits import edits_of

PATH = "room/sums.py"


def afters(line: str) -> list[str]:
    """Return the edited statements of a function of one line."""
    source = f"def f(a, b, c=None):\n    {line}\n".encode()
    applied = (edit.applied(source).decode() for edit in edits_of(PATH, source))
    return [text.splitlines()[1].strip() for text in applied]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("return a < b", ["return (a <= b)", "return (a >= b)"]),
        ("return a is None", ["return (a is not None)"]),
        ("return a + b", ["return (a - b)", "return (a)", "return (b)"]),
        ("return a - b", ["return (a + b)", "return (a)"]),
        ("return 4 * a", ["return (4 / a)", "return (4)", "return (a)", "return 5 * a"]),
        ("return not a", ["return (a)"]),
        ("return a and b", ["return (a or b)", "return (b)", "return (a)"]),
        ("return f(a, c=True)", ["return f(a, c=False)"]),
        ("return a if b else c", ["return (a)", "return (c)", "return a if (not (b)) else c"]),
        ("while a: break", ["while (not (a)): break", "while a: pass"]),
        ("return min(a, key=b)", ["return max(a, key=b)"]),
        ("a += b", ["a -= b"]),
        ("a.x = b", ["pass"]),
        ("a(b)", ["pass"]),
    ],
)
def test_each_edit_changes_one_thing(line: str, expected: list[str]) -> None:
    assert afters(line) == expected


@pytest.mark.parametrize(
    "line",
    [
        "'A text: 1 + 1.'",
        "raise ValueError(f'{a + 1}')",
        "assert a > 1",
        "logger.info('%d', a + 1)",
        "return f'{a + 1}'",
        "a: dict[int, 1 | 2] = b",
    ],
)
def test_types_texts_errors_and_logs_are_left_alone(line: str) -> None:
    assert afters(line) == []


def test_constants_outside_of_functions_are_left_alone() -> None:
    assert edits_of(PATH, b"A = 1 + 1\nclass B:\n    c: int = 3\n") == []


def test_equal_edits_of_a_method_have_numbers_and_names_without_lines() -> None:
    source = b"class A:\n    @g(1)\n    def f(self):\n        return [7, 7]\n"
    first = [edit.name for edit in edits_of(PATH, source)]
    assert first == [f"{PATH}:A.f: 7 -> 8", f"{PATH}:A.f: 7 -> 8 (2)"]
    assert [edit.name for edit in edits_of(PATH, b"B = 1\n\n" + source)] == first


def test_an_edit_after_other_letters_is_in_its_place() -> None:
    assert "return (4 / a)  # \N{GREEK SMALL LETTER MU}s" in afters("return 4 * a  # \u03bcs")
    assert afters("return ['\u03bc', a < 'b']")[0] == "return ['\u03bc', (a <= 'b')]"
