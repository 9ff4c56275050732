"""`flying-serving` with time stamps: when each group step is sent by its leader, when each member
begins it, and when its output is there.

python -m benchmarks.stamped serve MODEL ... with STAMPS naming a folder: each engine appends
records to a file there.
"""

from __future__ import annotations

import os
import struct
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.entry import run
from flying_serving.engine import group_steps
from flying_serving.engine.channel import Channel
from flying_serving.engine.messages import RunStep
from flying_serving.engine.sampled import SampledTokens

RECORD = struct.Struct("<iiiid")
"""What (SENT, BEGUN or OVER), number of the step, requests, tokens, CLOCK_MONOTONIC."""
SENT, BEGUN, OVER = 0, 1, 2
BUFFERED = 64


class Stamps:
    """The records of one engine process."""

    def __init__(self) -> None:
        self._counts = [0, 0, 0]
        self._kept: list[bytes] = []

    def add(self, what: int, plan: Any, at_s: float) -> None:
        """Keep one, and write them now and then. `plan`: None if it is not known."""
        self._counts[what] += 1
        tokens = {} if plan is None else plan.num_scheduled_tokens
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
    send, translate, note = Channel.send, group_steps.in_physical_blocks, SampledTokens.note

    def stamped_send(self: Channel, members: Sequence[int], message: Any) -> None:
        if isinstance(message, RunStep):
            stamps.add(SENT, message.plan, time.monotonic())
        send(self, members, message)

    def stamped_translate(plan: Any, lent: Any) -> Any:
        translated = translate(plan, lent)
        stamps.add(BEGUN, plan, time.monotonic())
        return translated

    def stamped_note(self: SampledTokens, size: int, output: Any) -> None:
        stamps.add(OVER, None, time.monotonic())
        note(self, size, output)

    Channel.send = stamped_send  # type: ignore[method-assign]
    group_steps.in_physical_blocks = stamped_translate
    SampledTokens.note = stamped_note  # type: ignore[method-assign]


def read(folder: Path) -> dict[int, tuple[int, int, float, list[float]]]:
    """Steps by number: requests, tokens, when it was sent, when each member began it."""
    steps: dict[int, tuple[int, int, float, list[float]]] = {}
    begun: list[tuple[int, float]] = []
    for path in folder.iterdir():
        for what, number, requests, tokens, at_s in RECORD.iter_unpack(path.read_bytes()):
            if what == SENT:
                steps[number] = (requests, tokens, at_s, [])
            elif what == BEGUN:
                begun.append((number, at_s))
    for number, at_s in begun:
        if number in steps:
            steps[number][3].append(at_s)
    return steps


def gaps_s(folder: Path) -> dict[int, list[float]]:
    """Return the seconds from the output of a step to the launch of the next one, on each engine.

    Of steps that decode one token of each request, by the number of requests. With async scheduling
    the next step may be launched before, and has none.
    """
    found: defaultdict[int, list[float]] = defaultdict(list)
    for path in folder.iterdir():
        over_s: float | None = None
        for what, _, requests, tokens, at_s in RECORD.iter_unpack(path.read_bytes()):
            if what == OVER:
                over_s = at_s
            elif what == BEGUN:
                if over_s is not None and requests == tokens:
                    found[requests].append(at_s - over_s)
                over_s = None
    return dict(found)


if __name__ == "__main__":
    run("benchmarks.stamped", install)
