"""What the check leaves in a folder: few files, which are complete after each line."""

import json
import tarfile
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from benchmarks.cuda_check.lines import Outcome
from benchmarks.cuda_check.page import table

PACK_S = 10.0


class Report:
    """Writes `table.md`, `lines.jsonl` and `logs.tar.gz` into a folder.

    `logs`: the folder of the servers' logs. They are packed after each line, and every PACK_S while
    one takes long: who kills the check has what was written so far.
    """

    def __init__(self, folder: Path, facts: Mapping[str, str], logs: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._facts = facts
        self._logs = logs
        self._outcomes: list[Outcome] = []
        self._packing = threading.Lock()
        self._ended = threading.Event()
        (folder / "lines.jsonl").write_text("", encoding="utf-8")
        self._write_table()
        threading.Thread(target=self._pack_now_and_then, daemon=True).start()

    def add(self, outcome: Outcome) -> None:
        """Write the row of a line."""
        self._outcomes.append(outcome)
        with (self._folder / "lines.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(outcome)) + "\n")
        self._write_table()
        self.pack()

    def pack(self) -> None:
        """Pack the logs as they are now."""
        with self._packing:
            scratch = self._folder / "logs.tar.gz.new"
            with tarfile.open(scratch, "w:gz", compresslevel=3) as packed:
                packed.add(self._logs, "logs")
            scratch.replace(self._folder / "logs.tar.gz")

    def end(self) -> None:
        """Write all for the last time."""
        self._ended.set()
        self.pack()

    def text(self) -> str:
        """Return the table."""
        return table(self._facts, self._outcomes)

    def _write_table(self) -> None:
        scratch = self._folder / "table.md.new"
        scratch.write_text(self.text(), encoding="utf-8")
        scratch.replace(self._folder / "table.md")

    def _pack_now_and_then(self) -> None:
        while not self._ended.wait(PACK_S):
            self.pack()
