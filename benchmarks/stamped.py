"""`flying-serving` with time stamps: when each group step is sent by its leader, and when each
member begins it.

python -m benchmarks.stamped serve MODEL ... with STAMPS naming a folder: each engine appends
records to a file there.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.entry import run
from flying_serving.engine import loop
from flying_serving.engine.channel import Channel
from flying_serving.engine.messages import RunStep

RECORD = struct.Struct("<iiiid")
"""What (SENT or BEGUN), number of the step, requests, tokens, CLOCK_MONOTONIC."""
SENT, BEGUN = 0, 1
BUFFERED = 64


class Stamps:
    """The records of one engine process."""

    def __init__(self) -> None:
        self._counts = [0, 0]
        self._kept: list[bytes] = []

    def add(self, what: int, plan: Any, at_s: float) -> None:
        """Keep one, and write them now and then."""
        self._counts[what] += 1
        tokens = plan.num_scheduled_tokens
        self._kept.append(
            RECORD.pack(what, self._counts[what], len(tokens), sum(tokens.values()), at_s)
        )
        if len(self._kept) == BUFFERED:
            with (Path(os.environ["STAMPS"]) / str(os.getpid())).open("ab") as file:
                file.write(b"".join(self._kept))
            self._kept.clear()


def install() -> None:
    """Stamp what every engine of this server does; engines are forked from this process."""
    stamps = Stamps()
    send, translate = Channel.send, loop.in_physical_blocks

    def stamped_send(self: Channel, members: Sequence[int], message: Any) -> None:
        if isinstance(message, RunStep):
            stamps.add(SENT, message.plan, time.monotonic())
        send(self, members, message)

    def stamped_translate(plan: Any, lent: Any) -> Any:
        translated = translate(plan, lent)
        stamps.add(BEGUN, plan, time.monotonic())
        return translated

    Channel.send = stamped_send  # type: ignore[method-assign]
    loop.in_physical_blocks = stamped_translate


def read(folder: Path) -> dict[int, tuple[int, int, float, list[float]]]:
    """Steps by number: requests, tokens, when it was sent, when each member began it."""
    steps: dict[int, tuple[int, int, float, list[float]]] = {}
    begun: list[tuple[int, float]] = []
    for path in folder.iterdir():
        for what, number, requests, tokens, at_s in RECORD.iter_unpack(path.read_bytes()):
            if what == SENT:
                steps[number] = (requests, tokens, at_s, [])
            else:
                begun.append((number, at_s))
    for number, at_s in begun:
        if number in steps:
            steps[number][3].append(at_s)
    return steps


if __name__ == "__main__":
    run("benchmarks.stamped", install)
