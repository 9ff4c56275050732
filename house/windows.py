"""The windows of a recording: spans of time in which the entries of functions are noted."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from house.entered import ENTRIES, NUMBER

MOST = 255
"""Numbers of a byte without 0."""


class Windows:
    """Windows of a recording in `folder`, which is empty. Servers note entries there once they have
    run `preamble`.
    """

    def __init__(self, folder: Path) -> None:
        self._number, self._entries = folder / NUMBER, folder / ENTRIES
        self._number.write_bytes(b"\0")
        self._entries.touch()
        self._names: list[str] = []
        self.preamble = f"from house.entered import watch; watch({str(folder)!r})"

    @contextmanager
    def open(self, name: str) -> Iterator[None]:
        """Note entries while the body runs. Windows of one name are its rounds."""
        assert len(self._names) < MOST
        self._names.append(name)
        self._write(len(self._names))
        try:
            yield
        finally:
            self._write(0)

    def _write(self, number: int) -> None:
        with self._number.open("r+b") as file:  # in place: it is mapped
            file.write(bytes([number]))

    def entered(self) -> dict[str, list[dict[tuple[str, str], float]]]:
        """Return what was entered, as `walks.Recording`."""
        rounds: list[dict[tuple[str, str], float]] = [{} for _ in self._names]
        for line in self._entries.read_text(encoding="utf-8").splitlines():
            number, at, path, name = line.split("\t")
            function = path, name.partition(".<locals>")[0]
            entered = rounds[int(number) - 1]
            entered[function] = min(float(at), entered.get(function, float(at)))
        found = defaultdict(list)
        for name, entered in zip(self._names, rounds, strict=True):
            found[name].append(entered)
        return dict(found)
