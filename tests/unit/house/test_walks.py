"""What is of a walk, of all that was entered."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from house import walks
from house.page import walks_of_page
from house.walks import File, Record, Walk, record_of

WALK = Walk("out", "The way out", "walking", ("idle",))
SIZES = {
    ("door.py", "Door.open"): 12,
    ("door.py", "Door.look"): 3,
    ("hall.py", "cross"): 2,
    ("lamp.py", "burn"): 5,
    ("cat.py", "meow"): 1,
}


def entered(*names: str) -> dict[tuple[str, str], float]:
    """Functions in the order in which they were entered, each as file:name."""
    return {
        (path, name): float(at)
        for at, (path, _, name) in enumerate(name.partition(":") for name in names)
    }


def record(rounds: Sequence[Sequence[str]], named: Sequence[tuple[str, str]] = ()) -> Record:
    idle = [entered("lamp.py:burn"), entered("door.py:Door.look")]
    recording = {"walking": [entered(*one) for one in rounds], "idle": idle}
    return record_of(WALK, recording, SIZES, named)


def test_walk_has_what_every_round_enters_and_no_idle_round() -> None:
    found = record(
        [
            ["hall.py:cross", "door.py:Door.open", "lamp.py:burn", "cat.py:meow"],
            ["door.py:Door.look", "door.py:Door.open", "hall.py:cross"],
        ]
    )
    assert found == Record(
        (File("hall.py", ("cross",), 2), File("door.py", ("Door.open",), 12)), ("cat.py",)
    )
    assert found.needed == 1


@pytest.mark.parametrize("named", ["burn", "Lamp"])
def test_what_the_page_names_is_of_the_walk_in_any_case(named: str) -> None:
    found = record([["lamp.py:burn"]], [("lamp.py", named)])
    assert [file.path for file in found.files] == (["lamp.py"] if named == "burn" else [])


def test_code_that_is_no_function_is_left_out() -> None:
    assert record([["door.py:<module>", "door.py:Door"]]) == Record((), ())


def files(always: str, sometimes: str = "") -> Record:
    return Record(tuple(File(path, ("f",), 1) for path in always), tuple(sometimes))


def test_records_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "FILE", tmp_path / "walks.json")
    records = {"out": files("ab", "c"), "back": files("a")}
    walks.save(records)
    assert walks.load() == records


def test_every_walk_is_on_the_page() -> None:
    assert {walk.heading for walk in walks.WALKS} == set(walks_of_page())
